"""c8: what slips in around a cut is in it or after it. For everything that a client can begin, at every turn of the
loop around the closing of admission and the freeze: never in neither, never in both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from gym_rig.verbs import prepare, ready, restore, resume, start
from gym_rig.virtual import now, settle
from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.ledger import CallRecord
from gym_servers.capture.tokens import Span
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation
from gym_servers.participants.base import Participant, Scope
from gym_servers.participants.collection import CollectionParticipant, Job, Rollout, RunResult
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.participants.gate import Gate
from gym_servers.participants.model import ModelParticipant
from gym_servers.participants.model_call import Asked, Call
from gym_servers.participants.resources import Hooks, ResourcesParticipant
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.phases import Input, moved

R0, R1 = Episode("r", 0), Episode("r", 1)
MOMENTS = pytest.mark.parametrize("moment", range(-9, 6))


class Cut:
    """A checkpoint of a participant, and what was done by then. `begin` is called that many turns of the loop after
    the closing of admission, or before it. `look` tells what has had an effect so far: the log, if not given."""

    def __init__(
        self,
        participant: Participant,
        moment: int,
        begin: Callable[[], Any],
        look: Callable[[], list[str]] | None = None,
    ) -> None:
        self.participant = participant
        self._look = look or (lambda: list(self.log))
        self.log: list[str] = []  # what has had an effect
        self.records: dict[str, bytes] = {}
        self.done: list[str] = []
        self.restarts: frozenset[str] = frozenset()
        self._moment, self._begin, self._turns = moment, begin, min(moment, 0)

    async def taken(self, scope: Callable[[], Scope] = lambda: Scope(None), *, still: bool = True) -> None:
        """`still`: nothing has an effect from the readiness to the resume. A restart goes on: it is in no record."""
        while self._turns < 0:
            await self._turn()
        prepare(self.participant)
        while not ready(self.participant):
            await self._turn()
        self.done, self.restarts = self._look(), self.participant.survey().restarts
        await self._turn()
        self.records = await self.participant.export(scope())
        gate = self.participant.gate
        gate.move(moved(gate.control, Input.COMMIT))
        while self._turns <= self._moment:
            await self._turn()
        assert self._look() == self.done or not still, "something happened between the readiness and the resume"
        self.done = self._look()
        resume(self.participant)
        await settle()

    async def _turn(self) -> None:
        if self._turns == self._moment:
            self._begin()
        self._turns += 1
        await asyncio.sleep(0)


async def turns() -> None:
    """A while in which something is half done."""
    for _ in range(3):
        await asyncio.sleep(0)


@MOMENTS
async def test_c8_an_episode_is_exported_or_begins_after_the_cut_or_is_refused(moment: int) -> None:
    participant, end = EnvironmentParticipant(Gate(clock=now)), asyncio.Event()
    start(participant)
    running: list[asyncio.Task[Any]] = []

    async def body(live: Live, _: Unclaimed | None) -> str:
        async def step() -> str:
            cut.log.append("stage")
            await end.wait()
            return "row"

        return await participant.stage(live, "only", replay=True, snapshot=dict, step=step)

    cut = Cut(participant, moment, lambda: running.append(asyncio.create_task(participant.run(R0, "d", body))))
    await cut.taken()
    end.set()
    try:
        assert await running[0] == "row"
    except ProtocolError as refusal:
        assert refusal.code == "admission_closed"
        assert (set(cut.records), cut.log) == (set(), [])
    else:
        assert cut.log == ["stage"]
        assert set(cut.records) == {"r"}  # also where it had not begun: it stands before its first stage


@MOMENTS
@pytest.mark.parametrize("kind", ["agent", "resources"])
async def test_c8_a_session_is_exported_or_begun_after_the_cut(moment: int, kind: str) -> None:
    async def begin(_: object) -> None:
        cut.log.append("begun")
        await turns()

    async def nothing(*_: Any) -> Any:
        return {}

    participant: Participant
    if kind == "agent":
        agent = participant = AgentParticipant(Gate(clock=now))
        cut = Cut(
            participant, moment, lambda: seeding.append(asyncio.create_task(agent.seed("s", R0, [], begin=begin)))
        )
    else:
        hooks = Hooks(nothing, nothing, nothing, nothing, nothing)
        tools = participant = ResourcesParticipant(Gate(clock=now), "stateless", hooks)
        cut = Cut(
            participant,
            moment,
            lambda: seeding.append(asyncio.create_task(tools.seed("s", R0, begin, digest="d", fresh_id="f"))),
        )
    start(participant)
    seeding: list[asyncio.Task[Any]] = []
    await cut.taken()
    await seeding[0]
    assert cut.log == ["begun"]
    assert bool(cut.done) == ("s" in cut.records)


@MOMENTS
async def test_c8_an_activation_is_exported_or_begins_after_the_cut(moment: int) -> None:
    participant = AgentParticipant(Gate(clock=now))
    start(participant)
    session = await participant.seed("s", R0, [])
    activating: list[asyncio.Task[Any]] = []

    async def turn(activation: Activation) -> dict[str, Any]:
        await participant.boundary(activation)
        await participant.model_call(activation, lambda: asyncio.sleep(0))
        cut.log.append("tool")
        await turns()
        activation.items = [{"tool": 1}]
        return {"items": activation.items}

    def begin() -> None:
        activating.append(asyncio.create_task(participant.activate(session, 1, "d", turn)))

    cut = Cut(participant, moment, begin)
    await cut.taken()
    assert await activating[0] == {"items": [{"tool": 1}]}
    record = json.loads(cut.records["s"])
    kept = (record["reply"] or {}).get("response", {}).get("items") or (record["activation"] or {}).get("items") or []
    assert (cut.log, len(kept)) == (["tool"], len(cut.done))
    # Continued from the cut, the tool is called once in its history, too.
    fresh = AgentParticipant(Gate(clock=now))
    restore(fresh, cut.records, "r")
    resume(fresh, "restore")
    again: list[str] = []

    async def continued(activation: Activation) -> dict[str, Any]:
        if not activation.items:
            again.append("tool")
        return {"items": [{"tool": 1}]}

    assert await fresh.activate(fresh.session("s", R1), 1, "d", continued) == {"items": [{"tool": 1}]}
    assert [*cut.done, *again] == ["tool"]


@MOMENTS
@pytest.mark.parametrize("row", [True, False])
async def test_c8_a_call_that_nothing_continues_is_a_restart_or_begins_after_the_cut(moment: int, row: bool) -> None:
    participant, end = AgentParticipant(Gate(clock=now)), asyncio.Event()
    start(participant)
    calling: list[asyncio.Task[Any]] = []

    async def work() -> str:
        cut.log.append("begun")
        await end.wait()
        return "row"

    def begin() -> None:
        call = participant.row(R0, "d", work, restart=True) if row else participant.direct(R0, work)
        calling.append(asyncio.create_task(call))

    cut = Cut(participant, moment, begin)
    await cut.taken(still=False)
    end.set()
    assert await calling[0] == "row"
    assert (cut.log, cut.records) == (["begun"], {})
    assert bool(cut.done) == (cut.restarts == {"r"})


@MOMENTS
async def test_c8_a_call_without_boundaries_on_a_session_is_a_restart_or_over_by_the_cut_or_begins_after_it(
    moment: int,
) -> None:
    participant = AgentParticipant(Gate(clock=now))
    start(participant)
    session = await participant.seed("s", R0, [])
    calling: list[asyncio.Task[Any]] = []

    async def work() -> dict[str, Any]:
        cut.log.append("begun")
        await turns()
        cut.log.append("done")
        return {"reply": 1}

    def begin() -> None:
        calling.append(asyncio.create_task(participant.exclusive(session, 1, "d", work)))

    cut = Cut(participant, moment, begin)
    await cut.taken(still=False)
    assert (await calling[0], cut.log) == ({"reply": 1}, ["begun", "done"])
    if cut.restarts:
        assert (cut.restarts, cut.records) == ({"r"}, {})
    else:
        reply = json.loads(cut.records["s"])["reply"]
        assert (cut.done, reply and reply["response"]) in [([], None), (["begun", "done"], {"reply": 1})]


@MOMENTS
async def test_c8_a_model_call_is_held_or_refused_and_never_delivered_within_the_cut(moment: int) -> None:
    participant = ModelParticipant(Gate(clock=now))
    start(participant)
    generated, calling = 0, list[asyncio.Task[Any]]()

    async def generate(_: Call) -> CallRecord:
        nonlocal generated
        generated += 1
        return CallRecord("1.1", "d", int32([1]), int32([2]), float32([0.5]), (Span("w", 0, 1),), {})

    async def call() -> None:
        while True:
            try:
                await participant.call(R0, Asked("1.1", "d"), generate)
                break
            except ProtocolError as refusal:
                assert refusal.code == "admission_closed"
                await participant.gate.wait_checkpoint_closed()

    def delivered() -> list[str]:
        return [kept.position for kept in participant._ledgers.calls("r")]

    cut = Cut(participant, moment, lambda: calling.append(asyncio.create_task(call())), delivered)
    await cut.taken()
    await calling[0]
    assert (generated, delivered()) == (1, ["1.1"])
    assert cut.done == (["1.1"] if "r" in cut.records else [])


class Rows:
    """An output in memory."""

    def __init__(self) -> None:
        self.kept: set[str] = set()

    async def done(self) -> set[str]:
        return set(self.kept)

    async def save(self, rollout: Rollout, episode: Episode, row: Mapping[str, Any]) -> None:
        self.kept.add(rollout.id)

    async def save_failure(self, rollout: Rollout, episode: Episode, failure: Mapping[str, Any]) -> None:
        raise AssertionError("nothing fails here")

    async def finish(self, complete: bool) -> None:
        return None


@MOMENTS
async def test_c8_a_rollout_is_durable_or_in_the_drivers_record_or_sent_after_the_cut(moment: int) -> None:
    """The answer that lets the driver send the next one comes at any time."""
    answer = asyncio.Event()
    rollouts: Sequence[Rollout] = [Rollout(f"{n}-0", {}, n, 0) for n in range(3)]

    async def run(episode: Episode, _: Rollout) -> RunResult:
        cut.log.append(episode.key)
        await answer.wait()
        return RunResult({"reward": 1.0})

    async def persist(_: int) -> None:
        return None

    async def find() -> Job:
        return Job(rollouts, rows)

    rows = Rows()
    driver = CollectionParticipant(Gate(clock=now), find, run, persist, concurrency=1, max_failures=1)
    start(driver)
    cut = Cut(driver, moment, answer.set)
    driving = asyncio.create_task(driver.drive())
    await settle()
    assert cut.log == ["0-0"]

    def scope() -> Scope:
        return Scope(frozenset(cut.log) - rows.kept)

    await cut.taken(scope)
    recorded = set(json.loads(cut.records["driver"])["attempts"])
    assert set(cut.done) <= recorded | rows.kept
    assert recorded <= set(cut.done)
    await driving
    assert (cut.log, rows.kept) == ([one.id for one in rollouts], {one.id for one in rollouts})
