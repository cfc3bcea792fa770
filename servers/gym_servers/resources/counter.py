"""`counter`: the smallest environment with state. A lost or doubled effect scores silently wrong elsewhere; here an
unknown session is an error, and the count is exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from gym_servers.resources.server import ResourcesServer, Tool, ToolCall


class CounterServer(ResourcesServer):
    """Row: `initial_count`, `expected_count`. Tools: `increment_counter{count}`, `get_counter_value{}`.

    Reward 1.0 where the counter equals `expected_count` at verify, else 0.0.
    """

    name = "counter"
    checkpoint_mode: ClassVar[Literal["stateless", "exported", "restart_only"]] = "exported"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._counts: dict[str, int] = {}

    def tools(self) -> Mapping[str, Tool]:
        return {"increment_counter": self._increment, "get_counter_value": self._get}

    async def seed(self, session_id: str, task_data: Mapping[str, Any]) -> None:
        self._counts[session_id] = _integer(task_data, "initial_count", 0)

    async def _increment(self, call: ToolCall, arguments: dict[str, Any]) -> Any:
        before = self._counts[call.session_id]
        after = before + _integer(arguments, "count")
        await call.effect(before, after)
        self._counts[call.session_id] = after
        return {"success": True}

    async def _get(self, call: ToolCall, _: dict[str, Any]) -> Any:
        return {"count": self._counts[call.session_id]}

    async def verify(self, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"reward": 1.0 if self._counts[session_id] == _integer(body, "expected_count") else 0.0}

    async def export_session_states(self, ids: Sequence[str]) -> Mapping[str, Any]:
        return {session: {"count": self._counts[session]} for session in ids}

    async def restore_session_states(self, states: Mapping[str, Any]) -> None:
        self._counts.update({session: _integer(state, "count") for session, state in states.items()})

    async def retire_session_state(self, session_id: str) -> None:
        self._counts.pop(session_id, None)


def _integer(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"`{name}` must be an integer")
    return value
