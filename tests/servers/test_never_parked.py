"""Nothing stays parked once no checkpoint is open, whatever the order of what a coordinator, a client, a retire and
the lease do. A random walk over one real control plane with each kind of participant, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gym_rig.virtual import VirtualLoop, settle
from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.ledger import CallRecord
from gym_servers.control.plane import ControlPlane
from gym_servers.control.writes import Author
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation, Session
from gym_servers.participants.base import Participant
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.participants.gate import Gate
from gym_servers.participants.limits import Limits, OverLimit
from gym_servers.participants.model import ModelParticipant
from gym_servers.participants.model_call import Asked, Call
from gym_servers.participants.resources import Hooks, ResourcesParticipant
from gym_servers.participants.tool_sessions import ToolSession
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.storage.manifest import CodeIdentity
from gym_servers.storage.store import ObjectMissing

GRACE = 60.0
LONGEST_STEP = 5.0
IDS = st.sampled_from(["a", "b", "c"])
ROLLOUTS = st.sampled_from(["p", "q", "r"])


class Memory:
    """Objects in memory."""

    def __init__(self) -> None:
        self.uri, self.objects = "memory", dict[str, bytes]()

    def create(self, key: str, data: bytes) -> None:
        self.objects.setdefault(key, data)

    def replace(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise ObjectMissing(key)
        return self.objects[key]

    def list(self, prefix: str) -> dict[str, int]:
        return {key: len(data) for key, data in self.objects.items() if key.startswith(prefix)}


Work = Callable[[Episode], Awaitable[object]]


def environment(gate: Gate) -> tuple[Participant, Work]:
    limits = Limits(
        episode_timeout_seconds=2.5 * LONGEST_STEP,
        max_concurrent_episodes=2,
        queue_timeout_seconds=1.5 * LONGEST_STEP,
    )
    participant = EnvironmentParticipant(gate, limits=limits)

    async def body(live: Live, _: Unclaimed | None) -> str:
        try:
            async with participant.slot(live):
                return await stages(live)
        except OverLimit:
            return "over"

    async def stages(live: Live) -> str:
        for number, replay in enumerate((True, False, True)):
            await participant.stage(
                live, f"{number}", replay=replay, snapshot=dict, step=lambda: asyncio.sleep(LONGEST_STEP)
            )
        return "done"

    return participant, lambda episode: participant.run(episode, "d", body)


def agent(gate: Gate) -> tuple[Participant, Work]:
    participant = AgentParticipant(gate)

    async def turn(activation: Activation) -> dict[str, Any]:
        for _ in range(2):
            await participant.boundary(activation)
            await participant.model_call(activation, lambda: asyncio.sleep(LONGEST_STEP))
            await asyncio.sleep(1)
        return {}

    async def work(episode: Episode) -> None:
        if episode.rollout_id == "q":
            await participant.direct(episode, lambda: asyncio.sleep(LONGEST_STEP))
        session = await participant.seed(f"s-{episode.key}", episode, [])
        await participant.activate(session, 1, "d", turn)
        await participant.close(session.id, episode)

    async def row(episode: Episode) -> None:
        async def begin(_: Session) -> None:
            await asyncio.sleep(1)

        session = await participant.seed(f"s-{episode.rollout_id}", episode, [], begin=begin)
        response = await participant.activate(session, 1, "d", turn)
        async with participant.step(episode, "verify"):
            await asyncio.sleep(1)
            await participant.answered(session, "d", response)

    async def served(episode: Episode) -> None:
        if episode.rollout_id == "r":
            await participant.row(episode, "d", lambda: row(episode))
        else:
            await work(episode)

    return participant, served


def resources(gate: Gate) -> tuple[Participant, Work]:
    async def nothing(*_: Any) -> Any:
        return {}

    participant = ResourcesParticipant(gate, "stateless", Hooks(nothing, nothing, nothing, nothing, nothing))

    async def tool(_: ToolSession) -> None:
        await asyncio.sleep(LONGEST_STEP)

    async def work(episode: Episode) -> None:
        session = f"s-{episode.key}"
        await participant.seed(session, episode, lambda _: asyncio.sleep(0.5), digest="d", fresh_id="f")
        await asyncio.gather(*(participant.call(session, episode, "t", tool) for _ in range(2)))
        await participant.close(session, episode)

    return participant, work


def model(gate: Gate) -> tuple[Participant, Work]:
    participant = ModelParticipant(gate)

    async def generate(_: Call) -> CallRecord:
        await asyncio.sleep(LONGEST_STEP)
        return CallRecord("1.1", "d", int32([]), int32([]), float32([]), (), {})

    return participant, lambda episode: participant.call(episode, Asked("1.1", "d"), generate)


class Walk(RuleBasedStateMachine):
    """What may happen to a participant, in any order. Refusals are fine; what waits for ever is not."""

    kind: Callable[[Gate], tuple[Participant, Work]]

    @initialize()
    def begin(self) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.store = Memory()
        self.work_tasks: list[asyncio.Task[object]] = []
        self.verbs: list[asyncio.Task[object]] = []
        self.attempts: dict[str, int] = {}
        self.loop.run_until_complete(self._build())

    async def _build(self) -> None:
        gate = Gate(coordinated=False, clock=self.loop.time)
        participant, self.work = type(self).kind(gate)
        author = Author(
            participant.kind, "x", "s", CodeIdentity(image="", server="", config_digest="", record_format=1)
        )
        self.gate = gate
        self.plane = ControlPlane(participant, author, lambda _: self.store, grace=GRACE, wall=self.loop.time)

    def _do(self, call: Awaitable[object] | None = None, seconds: float = 0.0) -> None:
        async def go() -> None:
            if call is not None:
                self.verbs.append(asyncio.ensure_future(call))
            await (asyncio.sleep(seconds) if seconds else settle())

        self.loop.run_until_complete(go())

    def _deadline(self, seconds: float = 20.0) -> float:
        return self.loop.time() + seconds

    @rule(checkpoint_id=IDS, seconds=st.sampled_from([0.5, 20.0, 200.0]))
    def prepare(self, checkpoint_id: str, seconds: float) -> None:
        self._do(
            self.plane.prepare(m.PrepareRequest(checkpoint_id=checkpoint_id, deadline_ts=self._deadline(seconds)))
        )

    @rule(checkpoint_id=IDS, how=st.sampled_from([{}, {"background": True}, {"stop": True}]))
    def commit(self, checkpoint_id: str, how: dict[str, bool]) -> None:
        request = m.CommitRequest(
            checkpoint_id=checkpoint_id, deadline_ts=self._deadline(), checkpoint_dir="x", **how
        )
        self._do(self.plane.commit(request))

    @rule(checkpoint_id=IDS)
    def resume(self, checkpoint_id: str) -> None:
        self._do(self.plane.resume(m.ResumeRequest(checkpoint_id=checkpoint_id, deadline_ts=self._deadline())))

    @rule(rollout=ROLLOUTS)
    def retire(self, rollout: str) -> None:
        key = Episode(rollout, self.attempts.get(rollout, 0)).key
        self._do(
            self.plane.retire(m.RetireRequest(checkpoint_id="v", deadline_ts=self._deadline(), episode_ids=[key]))
        )

    @rule()
    def told_to_end(self) -> None:
        """After a commit with stop its sessions are parked; whether it ends is another matter."""
        self._do(self.plane.parking())

    @rule(rollout=ROLLOUTS)
    def ask(self, rollout: str) -> None:
        self.attempts[rollout] = self.attempts.get(rollout, -1) + 1

        async def go() -> None:
            self.work_tasks.append(asyncio.ensure_future(self.work(Episode(rollout, self.attempts[rollout]))))
            await settle()

        self.loop.run_until_complete(go())

    @rule(which=st.integers(0, 5))
    def client_leaves(self, which: int) -> None:
        if which < len(self.work_tasks):
            self.work_tasks[which].cancel()
            self._do()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, GRACE + 1]))
    def time_passes(self, seconds: float) -> None:
        self._do(seconds=seconds)

    @invariant()
    def a_closed_process_has_a_lease(self) -> None:
        if hasattr(self, "plane"):
            assert self.gate.is_open == (self.loop.run_until_complete(self._status()).lease_expires_at is None)

    async def _status(self) -> m.Status:
        return self.plane.status()

    def teardown(self) -> None:
        """No coordinator comes any more: the lease opens the gate, and everything that waits comes to an end."""
        if not hasattr(self, "loop"):
            return
        try:
            self._do(seconds=GRACE + 1)
            assert self.gate.is_open
            # Verbs with long deadlines and work of a few steps: nothing here lasts longer.
            self._do(seconds=200 + 10 * LONGEST_STEP * max(1, len(self.work_tasks)))
            for task in [*self.work_tasks, *self.verbs]:
                assert task.done(), task
                if not task.cancelled() and (error := task.exception()) is not None:
                    assert isinstance(error, ProtocolError), error
            survey = self.plane.participant.survey()
            assert survey.ready
            assert not {name: n for name, n in survey.counts.items() if name in ("live", "busy", "calls") and n}
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            self.loop.close()


def walk(kind: Callable[[Gate], tuple[Participant, Work]], name: str) -> Any:
    case = type(name, (Walk,), {"kind": staticmethod(kind)}).TestCase
    case.settings = settings(
        max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    return case


TestEnvironmentWalk = walk(environment, "EnvironmentWalk")
TestAgentWalk = walk(agent, "AgentWalk")
TestResourcesWalk = walk(resources, "ResourcesWalk")
TestModelWalk = walk(model, "ModelWalk")
