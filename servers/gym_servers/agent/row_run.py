"""Row-shaped `/run`: the agent alone leads a row through seed, its loop, verify and close.

The loop is activation 1 of a session of the agent's own, so a checkpoint between the loop's reply and the verify
holds the reply, and a restored row is scored without running the loop again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gym_servers.agent.server import AgentServer
from gym_servers.http.peers import PeerFailed, Peers, PeerUnreachable
from gym_servers.http.row_identity import row_session
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation, RowRun, Session
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

log = logging.getLogger("gym_servers")

PARAMS = "responses_create_params"


class RowRuns:
    """Serves rows against one resources server. `verified=False` leaves the verify out: whoever asks scores."""

    def __init__(
        self, participant: AgentParticipant, agent: AgentServer, peers: Peers, resources: str, *, verified: bool
    ) -> None:
        self._participant, self._agent, self._peers = participant, agent, peers
        self._resources, self._verified = resources, verified

    async def run(self, episode: Episode, row: Mapping[str, Any], digest: str, *, anonymous: bool) -> dict[str, Any]:
        """The row's verify reply. Raises ProtocolError, PeerFailed or PeerUnreachable."""
        session = self._participant.session_of(episode)
        if session is None or session.row is None or session.row.digest != digest:
            session = await self._participant.seed(
                row_session(episode),
                episode,
                [],
                anonymous=anonymous,
                begin=lambda new: self._seed(new, row, digest),
            )
        try:
            return await self._serve(session, row)
        except Exception:
            async with self._participant.step(episode, "cleanup"):
                await self._close(session)
            await self._participant.close(session.id, episode)
            raise

    async def _seed(self, session: Session, row: Mapping[str, Any], digest: str) -> None:
        reply = await self._peers.post(self._resources, "/seed_session", row, episode=session.named)
        body = reply.body if isinstance(reply.body, dict) else {}
        session.accesses = [{"peer": self._resources, "jar": reply.jar, "tools": None}]
        session.restart = bool(reply.headers.get(headers.RESTART))
        session.row = RowRun(
            digest, str(body.get("resources_session_id") or ""), reply.headers.get(headers.VERIFY) == "replay"
        )

    async def _serve(self, session: Session, row: Mapping[str, Any]) -> dict[str, Any]:
        assert session.row is not None
        params, gate, episode = row[PARAMS], self._participant.gate, session.episode

        async def drive(activation: Activation) -> dict[str, Any]:
            return await self._agent.turn(session, activation, params)

        response = await self._participant.activate(session, 1, digest_of(params), drive)
        result = {**row, "response": response}
        if self._verified and session.row.verify_replays:
            await gate.wait_checkpoint_closed()
            result = await self._verify(session, result)
        async with self._participant.step(episode, "verify" if self._verified else "return"):
            if self._verified and not session.row.verify_replays:
                result = await self._verify(session, result)
            await self._close(session)
            await self._participant.answered(session, session.row.digest, result)
        return result

    async def _verify(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        reply = await self._peers.post(
            self._resources,
            "/verify",
            body,
            episode=session.named,
            jar=session.accesses[0]["jar"],
            headers={headers.CLOSE_FOLLOWS: "1"},
        )
        scored: dict[str, Any] = reply.body
        return scored

    async def _close(self, session: Session) -> None:
        assert session.row is not None
        body: dict[str, Any] = {"resources_session_id": session.row.resources_session}
        if session.named is not None:
            body["episode_id"] = {"rollout_id": session.named.rollout_id, "attempt": session.named.attempt}
        try:
            await self._peers.post(
                self._resources, "/close_session", body, episode=session.named, jar=session.accesses[0]["jar"]
            )
        except (ProtocolError, PeerFailed, PeerUnreachable) as error:
            log.warning("closing the tool session of %s: %s", session.episode.key, error)
