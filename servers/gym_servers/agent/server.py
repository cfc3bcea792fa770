"""What an agent server is written against: subclass `AgentServer`.

Either implement `turn`, one activation's loop, and get all routes; or build the whole application in
`setup_webserver`: then the framework knows of its sessions by watching its calls (`own_app`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import FastAPI

from gym_servers.http.peers import Peers
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation, AgentHooks, Session


@dataclass(frozen=True)
class AgentSetup:
    """What an agent is made with. `secret` signs session cookies; `participant` knows its sessions."""

    name: str
    config: Mapping[str, Any]
    participant: AgentParticipant
    peers: Peers
    secret: str


class AgentServer:
    """Base of agents.

    `checkpoint_sessions_supported`: whether its sessions can be carried to another process. Without it (the default:
    it fails closed) they are restarts, reported and never exported.
    """

    checkpoint_sessions_supported: ClassVar[bool] = False

    def __init__(self, setup: AgentSetup) -> None:
        self.setup = setup

    def setup_webserver(self) -> FastAPI | None:
        """The agent's own application; None for the framework's."""
        return None

    async def turn(self, session: Session, activation: Activation, params: Mapping[str, Any]) -> dict[str, Any]:
        """One activation from where it stands to its response."""
        raise NotImplementedError

    async def export_agent_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """What the agent keeps of its own for these sessions, by capture key, as JSON values."""
        return {}

    async def restore_agent_sessions(self, sessions: Mapping[str, Any]) -> None:
        """Take the sessions over, in place of all it had: validate all - ValueError, KeyError or TypeError refuses
        the restore - and only then install all. Failed or cut short, what was taken over is ended by
        `retire_agent_session`."""

    async def retire_agent_session(self, key: str) -> None:
        """End what the agent keeps or runs for one session, such as a sandbox. Repeatable, also for a session that is
        not known; its activation has been stopped."""


def hooks_of(made: Sequence[AgentServer]) -> AgentHooks:
    """The hooks of an agent that is made after its participant: `made` holds it by then."""
    return AgentHooks(
        export=lambda keys: made[0].export_agent_sessions(keys),
        restore=lambda sessions: made[0].restore_agent_sessions(sessions),
        retire=lambda key: made[0].retire_agent_session(key),
    )
