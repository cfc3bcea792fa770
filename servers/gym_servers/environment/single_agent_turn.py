"""`single-agent-turn`: one agent activation per episode, in five stages.

    seed -> invoke_agent -> close_agent -> verify -> return

seed and invoke_agent may run again after a crash: a repeated seed replaces the session its episode has, a repeated
activation continues or is answered. The others hold a checkpoint up until they are done. Cleanup runs before the
reply on every path and is never interrupted.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar

from gym_servers.environment.server import EnvironmentServer, State, named
from gym_servers.http.peers import Peers
from gym_servers.http.sessions import sign
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.protocol import headers

STAGES = ("seed", "invoke_agent", "close_agent", "verify", "return")
REPLAYED = frozenset({"seed", "invoke_agent"})


class SingleAgentTurn(EnvironmentServer):
    """Runs episodes against one agent and one resources server, named by their peers."""

    checkpoint_boundaries: ClassVar[bool] = True

    def __init__(
        self, participant: EnvironmentParticipant, peers: Peers, secret: str, *, agent: str, resources: str
    ) -> None:
        super().__init__(participant, peers)
        self._secret = secret
        self._agent, self._resources = agent, resources
        self._steps: dict[str, Callable[[Live, dict[str, Any], State], Awaitable[State]]] = {
            "seed": self._seed,
            "invoke_agent": self._invoke_agent,
            "close_agent": self._close_agent,
            "verify": self._verify,
            "return": self._return,
        }

    async def episode(self, live: Live, restored: Unclaimed | None, task: dict[str, Any]) -> dict[str, Any]:
        # Named before anything is sent: whatever a seed got to, cleanup finds it.
        names = (f"{live.episode.key}.{uuid.uuid4().hex[:12]}" for _ in range(2))
        state: State = (
            dict(restored.state) if restored else dict(zip(("session", "agent_session"), names, strict=True))
        )
        first = STAGES.index(restored.stage) if restored else 0
        try:
            for stage in STAGES[first:]:
                state = {**state, **await self._stage(live, stage, task, state)}
            result: dict[str, Any] = state["result"]
            return result
        finally:
            if not state.get("cleaned"):
                await self.finish(live, *self._ends(live, state))

    async def _stage(self, live: Live, stage: str, task: dict[str, Any], state: State) -> State:
        replay = stage in REPLAYED or (stage == "verify" and state.get("verify_replays", False))
        return await self.stage(
            live, stage, replay=replay, state=state, step=lambda: self._steps[stage](live, task, state)
        )

    async def _seed(self, live: Live, task: dict[str, Any], state: State) -> State:
        task_data = task["task_input"].get("task_data") or {}
        reply = await self.post(
            live,
            self._resources,
            "/seed_session",
            {
                "resources_session_id": state["session"],
                **_wire(live),
                "task_id": task.get("task_id"),
                "task_data": task_data,
            },
        )
        granted = _accesses(reply.body)
        # Tokens of an MCP session are addresses and secrets at once: no record can hold them.
        if reply.headers.get(headers.RESTART) or any(access.get("kind") == "mcp" for access in granted):
            self._participant.restart_only(live)
        direct = {
            "kind": "direct_http",
            "base_url": self._peers.url(self._resources),
            "cookies": sign(reply.jar, self._secret),
            "headers": {},
        }
        seeded = await self.post(
            live,
            self._agent,
            "/v1/agent_sessions",
            {
                "agent_session_id": state["agent_session"],
                **_wire(live),
                "task_id": task.get("task_id"),
                "tool_accesses": [direct, *granted],
            },
        )
        if seeded.headers.get(headers.RESTART):
            self._participant.restart_only(live)
        return {
            "jar": reply.jar,
            "agent_jar": seeded.jar,
            "verify_replays": reply.headers.get(headers.VERIFY) == "replay",
        }

    async def _invoke_agent(self, live: Live, task: dict[str, Any], state: State) -> State:
        reply = await self.post(
            live,
            self._agent,
            "/v1/responses",
            task["task_input"]["responses_create_params"],
            jar=state["agent_jar"],
            headers={headers.ACTIVATION: "1"},
        )
        return {"response": reply.body}

    async def _close_agent(self, live: Live, _: dict[str, Any], state: State) -> State:
        await self._close_agent_session(live, state)
        return {"agent_closed": True}

    async def _verify(self, live: Live, task: dict[str, Any], state: State) -> State:
        reply = await self.post(
            live,
            self._resources,
            "/verify",
            {
                **(task["task_input"].get("task_data") or {}),
                "responses_create_params": task["task_input"]["responses_create_params"],
                "response": state["response"],
            },
            jar=state["jar"],
            headers={headers.CLOSE_FOLLOWS: "1"},
        )
        return {"result": reply.body}

    async def _return(self, live: Live, _: dict[str, Any], state: State) -> State:
        await self.finish(live, *self._ends(live, state))
        return {"cleaned": True}

    def _ends(self, live: Live, state: State) -> list[Callable[[], Awaitable[None]]]:
        """What ends the sessions that are left, the agent's first: it is stopped before its tools go."""
        ends = [] if state.get("agent_closed") else [partial(self._close_agent_session, live, state)]
        return [*ends, partial(self._close_tool_session, live, state)]

    async def _close_tool_session(self, live: Live, state: State) -> None:
        await self.post(
            live,
            self._resources,
            "/close_session",
            {"resources_session_id": state["session"], **_wire(live)},
            jar=state.get("jar"),
        )

    async def _close_agent_session(self, live: Live, state: State) -> None:
        await self.post(
            live,
            self._agent,
            "/v1/agent_sessions/close",
            {"agent_session_id": state["agent_session"], **_wire(live)},
            jar=state.get("agent_jar"),
        )


def _accesses(seeded: Any) -> list[dict[str, Any]]:
    """The accesses that a seed's reply grants: one, a list of them, or none."""
    given = seeded.get("resources_tools") if isinstance(seeded, dict) else None
    return [dict(access) for access in (given if isinstance(given, list) else [given]) if isinstance(access, dict)]


def _wire(live: Live) -> dict[str, Any]:
    """The episode as bodies carry it: as little as paths do where its caller gave none."""
    episode = named(live)
    return {} if episode is None else {"episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt}}
