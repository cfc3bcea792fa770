"""What a resources server is written against: subclass `ResourcesServer`, name its tools, keep its state.

The framework binds sessions to episodes, runs the calls of a session one after another, answers repeated tool
calls, and carries state through checkpoints as `checkpoint_mode` says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from gym_servers.journal.client import Journal
from gym_servers.participants.tool_sessions import ToolSession

Tool = Callable[["ToolCall", dict[str, Any]], Awaitable[Any]]


class ToolCall:
    """One tool call: its session, and the journal of what it changes."""

    def __init__(self, session: ToolSession, tool: str, call_id: str | None, journal: Journal, server: str) -> None:
        self.session_id = session.id
        self._session, self._tool, self._call_id = session, tool, call_id
        self._journal, self._server = journal, server

    async def effect(self, before: Any, after: Any) -> None:
        """Record a change, before it is made: a change without its entry must not exist."""
        self._session.effects += 1
        await self._journal.append(
            [
                {
                    "kind": "effect",
                    "server": self._server,
                    **journal_identity(self._session),
                    "tool": self._tool,
                    "call_id": self._call_id,
                    "n": self._session.effects,
                    "before": before,
                    "after": after,
                }
            ]
        )


def journal_identity(session: ToolSession) -> dict[str, Any]:
    episode = session.episode
    return {
        "session": session.id,
        "rollout": episode.rollout_id if episode else None,
        "attempt": episode.attempt if episode else None,
    }


class ResourcesServer:
    """Base of resources servers.

    `checkpoint_mode`: `stateless` keeps nothing per session, `exported` carries it by the hooks below,
    `restart_only` (the default: it fails closed) makes its episodes start over. `verify_replays`: verify may simply
    run again after a crash.
    """

    name: ClassVar[str]
    checkpoint_mode: ClassVar[Literal["stateless", "exported", "restart_only"]] = "restart_only"
    verify_replays: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def tools(self) -> Mapping[str, Tool]:
        """Tool name -> handler. Handlers get JSON arguments and return JSON; ValueError is shown to the model."""
        return {}

    def tool_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Tool name -> JSON schema of its arguments, for those who ask over MCP."""
        return {name: {"type": "object"} for name in self.tools()}

    async def seed(self, session_id: str, task_data: Mapping[str, Any]) -> None:
        """Begin a session from a task's row. ValueError for a row that is not usable. What a seed that fails has
        begun is freed by `retire_session_state`."""

    async def verify(self, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Score a rollout: at least `{"reward": float}`."""
        raise NotImplementedError

    async def export_session_states(self, ids: Sequence[str]) -> Mapping[str, Any]:
        """The states of these sessions as JSON values. None of them is being called meanwhile."""
        return {}

    async def restore_session_states(self, states: Mapping[str, Any]) -> None:
        """Validate all states - ValueError, KeyError or TypeError refuses the restore - and only then build them. No
        call comes before this has returned. Cut short, what was built is freed by `retire_session_state`."""

    async def retire_session_state(self, session_id: str) -> None:
        """Free one session. Repeatable, also for a session that is not known."""

    async def park_session_states(self, ids: Sequence[str]) -> None:
        """The process is about to end after a commit with stop: give up what must not outlive it."""

    async def unpark_session_states(self, ids: Sequence[str]) -> None:
        """The process goes on after all: take back what was parked."""
