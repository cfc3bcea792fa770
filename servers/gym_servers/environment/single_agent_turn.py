"""`single-agent-turn`: one agent activation per episode, in five stages.

    seed -> invoke_agent -> close_agent -> verify -> return

seed and invoke_agent may run again after a crash: a repeated seed replaces the session its episode has, a repeated
activation continues or is answered. The others hold a checkpoint up until they are done. Cleanup runs before the
reply on every path and is never interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from gym_servers.http.peers import PeerFailed, Peers, PeerUnreachable
from gym_servers.http.sessions import sign
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.protocol import headers
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

log = logging.getLogger("gym_servers")

State = dict[str, Any]
STAGES = ("seed", "invoke_agent", "close_agent", "verify", "return")
REPLAYED = frozenset({"seed", "invoke_agent"})
CLEANUP_TIMEOUT_SECONDS = 180.0


class SingleAgentTurn:
    """Runs episodes against one agent and one resources server, named by their peers."""

    def __init__(
        self, participant: EnvironmentParticipant, peers: Peers, secret: str, *, agent: str, resources: str
    ) -> None:
        self._participant, self._peers, self._secret = participant, peers, secret
        self._agent, self._resources = agent, resources
        self._steps: dict[str, Callable[[Episode, dict[str, Any], State, Live], Awaitable[State]]] = {
            "seed": self._seed,
            "invoke_agent": self._invoke_agent,
            "close_agent": self._close_agent,
            "verify": self._verify,
            "return": self._return,
        }

    async def run(self, live: Live, restored: Unclaimed | None, task: dict[str, Any]) -> dict[str, Any]:
        """One episode from its boundary to its reply: `{result}` or `{failure}`. Raises ProtocolError where the
        attempt was replaced."""
        # Named before anything is sent: whatever a seed got to, cleanup finds it.
        names = (f"{live.episode.key}.{uuid.uuid4().hex[:12]}" for _ in range(2))
        state: State = (
            dict(restored.state) if restored else dict(zip(("session", "agent_session"), names, strict=True))
        )
        first = STAGES.index(restored.stage) if restored else 0
        try:
            for stage in STAGES[first:]:
                state = {**state, **await self._stage(live, stage, task, state)}
            return {"result": state["result"]}
        except ProtocolError as refusal:
            if refusal.code == "stale_attempt":
                raise
            kind = "session_lost" if refusal.code == "session_lost" else "agent_request_failed"
            return _failure(live.where, kind, str(refusal))
        except PeerUnreachable as error:
            return _failure(live.where, "transport_unreachable", str(error))
        except PeerFailed as error:
            kind = "verifier_error" if live.where == "verify" else "agent_run_error"
            return _failure(live.where, kind, str(error))
        finally:
            if not state.get("cleaned"):
                await self._clean_up(live, live.episode, state)

    async def _stage(self, live: Live, stage: str, task: dict[str, Any], state: State) -> State:
        replay = stage in REPLAYED or (stage == "verify" and state.get("verify_replays", False))
        return await self._participant.stage(
            live,
            stage,
            replay=replay,
            snapshot=lambda: state,
            step=lambda: self._steps[stage](live.episode, task, state, live),
        )

    async def _seed(self, episode: Episode, task: dict[str, Any], state: State, live: Live) -> State:
        task_data = task["task_input"].get("task_data") or {}
        reply = await self._peers.post(
            self._resources,
            "/seed_session",
            {
                "resources_session_id": state["session"],
                "episode_id": _wire(episode),
                "task_id": task.get("task_id"),
                "task_data": task_data,
            },
            episode=episode,
        )
        if reply.headers.get(headers.RESTART):
            self._participant.restart_only(live)
        access = {
            "kind": "direct_http",
            "base_url": self._peers.url(self._resources),
            "cookies": sign(reply.jar, self._secret),
            "headers": {},
        }
        seeded = await self._peers.post(
            self._agent,
            "/v1/agent_sessions",
            {
                "agent_session_id": state["agent_session"],
                "episode_id": _wire(episode),
                "task_id": task.get("task_id"),
                "tool_accesses": [access],
            },
            episode=episode,
        )
        return {
            "jar": reply.jar,
            "agent_jar": seeded.jar,
            "verify_replays": reply.headers.get(headers.VERIFY) == "replay",
        }

    async def _invoke_agent(self, episode: Episode, task: dict[str, Any], state: State, _: Live) -> State:
        reply = await self._peers.post(
            self._agent,
            "/v1/responses",
            task["task_input"]["responses_create_params"],
            episode=episode,
            jar=state["agent_jar"],
            headers={headers.ACTIVATION: "1"},
        )
        return {"response": reply.body}

    async def _close_agent(self, episode: Episode, _: dict[str, Any], state: State, __: Live) -> State:
        await self._close_agent_session(episode, state)
        return {"agent_closed": True}

    async def _verify(self, episode: Episode, task: dict[str, Any], state: State, _: Live) -> State:
        reply = await self._peers.post(
            self._resources,
            "/verify",
            {
                **(task["task_input"].get("task_data") or {}),
                "responses_create_params": task["task_input"]["responses_create_params"],
                "response": state["response"],
            },
            episode=episode,
            jar=state["jar"],
            headers={headers.CLOSE_FOLLOWS: "1"},
        )
        return {"result": reply.body}

    async def _return(self, episode: Episode, _: dict[str, Any], state: State, live: Live) -> State:
        await self._clean_up(live, episode, state)
        return {"cleaned": True}

    async def _clean_up(self, live: Live, episode: Episode, state: State) -> None:
        """End the sessions. Shielded: a retire that comes now waits for the end instead of cutting it short."""
        live.cleaning = True
        cleanup = asyncio.ensure_future(self._end_sessions(episode, state))
        try:
            await asyncio.shield(cleanup)
        except asyncio.CancelledError:
            await asyncio.wait([cleanup])
            raise

    async def _end_sessions(self, episode: Episode, state: State) -> None:
        try:
            async with asyncio.timeout(CLEANUP_TIMEOUT_SECONDS):
                if "agent_session" in state and not state.get("agent_closed"):
                    await self._close_agent_session(episode, state)
                if "session" in state:
                    await self._peers.post(
                        self._resources,
                        "/close_session",
                        {"resources_session_id": state["session"], "episode_id": _wire(episode)},
                        episode=episode,
                        jar=state.get("jar"),
                    )
        except (ProtocolError, PeerUnreachable, PeerFailed, TimeoutError) as error:
            log.warning("cleanup of %s: %s", episode.key, str(error) or type(error).__name__)

    async def _close_agent_session(self, episode: Episode, state: State) -> None:
        await self._peers.post(
            self._agent,
            "/v1/agent_sessions/close",
            {"agent_session_id": state["agent_session"], "episode_id": _wire(episode)},
            episode=episode,
            jar=state.get("agent_jar"),
        )


def _wire(episode: Episode) -> dict[str, Any]:
    return {"rollout_id": episode.rollout_id, "attempt": episode.attempt}


def _failure(stage: str, kind: str, reason: str) -> dict[str, Any]:
    return {"failure": {"failure_kind": kind, "failure_reason": reason, "stage": stage, "terminal": False}}
