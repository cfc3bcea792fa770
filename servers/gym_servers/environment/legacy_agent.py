"""`legacy-agent`: hands the whole row to an agent's `/run`, which seeds, loops, verifies and closes by itself.

    invoke_agent -> return

For agents that know the row-shaped `/run` alone. The agent continues or answers the row when it is sent again, so the
one long stage replays.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gym_servers.environment.server import EnvironmentServer, State
from gym_servers.http.peers import Peers
from gym_servers.http.row_identity import row_session
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed


class LegacyAgent(EnvironmentServer):
    """Relays rows to one agent, named by its peer."""

    checkpoint_boundaries: ClassVar[bool] = True

    def __init__(self, participant: EnvironmentParticipant, peers: Peers, *, agent: str) -> None:
        super().__init__(participant, peers)
        self._agent = agent

    async def episode(self, live: Live, restored: Unclaimed | None, task: dict[str, Any]) -> dict[str, Any]:
        state: State = dict(restored.state) if restored else {}
        try:
            if "result" not in state:
                row = await self.stage(
                    live, "invoke_agent", replay=True, state=state, step=lambda: self._invoke(live, task)
                )
                state = {"result": row}
            return await self.stage(live, "return", replay=False, state=state, step=lambda: _same(state["result"]))
        finally:
            if "result" not in state:
                # The agent may still be at it: the limit was reached, the connection lost, the attempt replaced.
                await self.finish(live, lambda: self._close(live))

    async def _invoke(self, live: Live, task: dict[str, Any]) -> dict[str, Any]:
        given = task["task_input"]
        row = {**(given.get("task_data") or {}), "responses_create_params": given["responses_create_params"]}
        answer: dict[str, Any] = (await self.post(live, self._agent, "/run", row)).body
        return answer

    async def _close(self, live: Live) -> None:
        await self.post(
            live, self._agent, "/v1/agent_sessions/close", {"agent_session_id": row_session(live.episode)}
        )


async def _same(result: dict[str, Any]) -> dict[str, Any]:
    return result
