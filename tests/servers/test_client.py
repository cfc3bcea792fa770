"""A driver outside of the stack that uses the client: whatever dies, each rollout gets one answer, as if nothing had
died; numbers are used once, and nothing is waited for without an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_rig.cell import Rig, cell
from gym_rig.network import Fault
from gym_rig.virtual import now
from gym_servers.client import Answer, NotInService, RolloutClient, RunFailed
from gym_servers.coordination.checkpoint import Progress
from gym_servers.engine.rows import counter_rows
from gym_servers.environment.single_agent_turn import SingleAgentTurn
from gym_servers.http.peers import PeerFailed
from gym_servers.participants.environment import Live
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import InvalidIdentity
from gym_servers.protocol.routing import cell_of

ROLLOUTS = 3
NAMES = ("env", "policy", "agent", "counter")


def task_of(row: dict[str, Any]) -> dict[str, Any]:
    data = {name: value for name, value in row.items() if name != "responses_create_params"}
    return {"task_input": {"responses_create_params": row["responses_create_params"], "task_data": data}}


TASKS = {f"{number}-0": task_of(row) for number, row in enumerate(counter_rows(ROLLOUTS, 2))}


@dataclass
class Driver:
    rig: Rig
    client: RolloutClient
    tasks: list[asyncio.Task[Answer]] = field(default_factory=list)

    def begin(self, *rollouts: str) -> None:
        for rollout in rollouts or TASKS:
            self.tasks.append(asyncio.create_task(self.client.run(rollout, TASKS[rollout])))

    async def answers(self) -> list[Answer]:
        """Every rollout's answer, while the coordinator looks on; each is right, and done once."""
        await self.rig.until(lambda: all(task.done() for task in self.tasks))
        answers = [task.result() for task in self.tasks]
        rows = [
            {**(one.result or {}), "_ng_rollout_id": one.rollout_id, "_ng_attempt_index": one.attempt}
            for one in answers
        ]
        output = self.rig.folder / "output"
        output.mkdir(exist_ok=True)
        (output / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.account = self.rig.account(len(answers))
        assert self.account.problems == []
        return answers


@asynccontextmanager
async def driven(folder: Path, patience: float = 900.0, **spec: Any) -> AsyncIterator[Driver]:
    async with cell(folder, counter_rows(1, 1), collection=None, **spec) as rig, rig.network.client() as http:
        driver = Driver(rig, RolloutClient(["http://env"], http, patience_seconds=patience))
        await rig.until(rig.running)
        yield driver
        for task in driver.tasks:
            task.cancel()
        await asyncio.gather(*driver.tasks, return_exceptions=True)


async def under_way(driver: Driver) -> None:
    driver.begin()
    await driver.rig.until(lambda: driver.rig.effects() >= ROLLOUTS)


async def quiet(_: Progress) -> None:
    return None


def seeds(rig: Rig, rollout: str) -> list[int]:
    """The attempts under which a rollout has begun."""
    found = [entry for entry in rig.journal() if entry["kind"] == "seed" and entry["rollout"] == rollout]
    return sorted(int(entry["attempt"]) for entry in found)


async def test_without_a_death_every_rollout_is_sent_once(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        driver.begin()
        answers = await driver.answers()
        assert [(one.rollout_id, one.attempt, one.cell) for one in answers] == [(name, 0, 0) for name in TASKS]
        assert {one.failure for one in answers} == {None}


@pytest.mark.parametrize("floor", [True, False])
@pytest.mark.parametrize("victim", [*NAMES, "all"])
async def test_a_driver_lives_through_the_death_of_anything(tmp_path: Path, victim: str, floor: bool) -> None:
    async with driven(tmp_path, access={"attemptFloor": floor}) as driver:
        rig = driver.rig
        await under_way(driver)
        await rig.checkpoint("one")
        await rig.until(lambda: rig.effects() >= ROLLOUTS + 2)
        rig.kill(*(NAMES if victim == "all" else (victim,)))
        answers = await driver.answers()
        assert {one.attempt for one in answers} == {1}
        assert (driver.account.continued, driver.account.restarted) == (ROLLOUTS, 0)


async def test_a_second_death_during_the_recovery_and_a_third_later(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        rig = driver.rig
        await under_way(driver)
        await rig.checkpoint("one")
        rig.kill("counter")
        await rig.until(lambda: rig.controller.record.pins == {})
        await rig.until(lambda: rig.controller.record.pins and not rig.running())
        rig.kill("env")
        await rig.until(lambda: rig.running(2))
        await rig.until(lambda: len(rig.participant("env")._live) == ROLLOUTS)
        rig.kill("agent")
        await driver.answers()
        assert driver.account.continued == ROLLOUTS


@pytest.mark.parametrize("floor", [True, False])
async def test_without_a_checkpoint_all_start_over_under_fresh_numbers(tmp_path: Path, floor: bool) -> None:
    async with driven(tmp_path, access={"attemptFloor": floor}) as driver:
        await under_way(driver)
        driver.rig.kill("policy")
        answers = await driver.answers()
        assert {one.attempt for one in answers} == {1}
        assert driver.account.restarted == ROLLOUTS
        assert [seeds(driver.rig, name) for name in TASKS] == [[0, 1]] * ROLLOUTS


async def test_a_rollout_that_began_after_the_checkpoint_starts_over_and_the_others_continue(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        rig = driver.rig
        first, *others = TASKS
        driver.begin(*others)
        await rig.until(lambda: rig.effects() >= len(others))
        await rig.checkpoint("one")
        driver.begin(first)
        await rig.until(lambda: first in rig.participant("env")._live)
        rig.kill("env")
        await driver.answers()
        assert (driver.account.continued, driver.account.restarted) == (len(others), 1)


@pytest.mark.parametrize("kind", ["unreachable", "lose request", "lose reply", "break off", "cut reply"])
async def test_a_connection_that_breaks_costs_nothing(tmp_path: Path, kind: Any) -> None:
    """What runs is joined, what has ended is answered again, what never arrived is sent."""
    async with driven(tmp_path) as driver:
        driver.rig.network.faults.append(Fault(kind, "env", "/run", calls=1))
        driver.begin("0-0")
        (answer,) = await driver.answers()
        assert len(seeds(driver.rig, "0-0")) == 1
        assert answer.attempt == (1 if kind == "lose request" else 0)


async def test_a_driver_that_was_started_again_joins_what_runs_and_is_answered_what_has_ended(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        rig = driver.rig
        await under_way(driver)
        await rig.checkpoint("one")
        rig.kill("agent")
        await rig.until(lambda: rig.running(1) and len(rig.participant("env")._live) == ROLLOUTS)
        for task in driver.tasks:
            task.cancel()
        await asyncio.gather(*driver.tasks, return_exceptions=True)
        driver.tasks.clear()
        driver.client = RolloutClient(["http://env"], rig.network.client())
        pages = [page async for page in driver.client.pages(0, limit=2)]
        assert [len(page.rollouts) for page in pages] == [2, 1]
        assert {(one.state, one.attempt) for page in pages for one in page.rollouts} == {("running", 1)}
        driver.begin()
        answers = await driver.answers()
        assert {one.attempt for one in answers} == {1}
        assert await driver.client.run("0-0", TASKS["0-0"]) == answers[0]


async def test_a_failure_is_given_back_and_tried_again_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the connection breaks meanwhile: the failure is not taken for the answer again."""
    verify = SingleAgentTurn._verify

    async def fails(self: SingleAgentTurn, live: Live, *arguments: Any) -> Any:
        if live.episode.attempt == 0:
            raise PeerFailed("the verifier is ill", 500)
        return await verify(self, live, *arguments)

    monkeypatch.setattr(SingleAgentTurn, "_verify", fails)
    async with driven(tmp_path) as driver:
        failed = await driver.client.run("0-0", TASKS["0-0"])
        assert (failed.result, failed.attempt) == (None, 0)
        assert failed.failure is not None
        assert failed.failure["failure_kind"] == "verifier_error"
        driver.rig.network.faults.append(Fault("lose request", "env", "/run", calls=1))
        answer = await driver.client.run("0-0", TASKS["0-0"], done=failed.attempt)
        assert (answer.attempt, (answer.result or {})["reward"]) == (2, 1.0)
        assert seeds(driver.rig, "0-0") == [0, 2]


async def test_a_rollout_that_is_restarted_because_it_blocks_checkpoints_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = SingleAgentTurn._verify

    async def hangs(self: SingleAgentTurn, live: Live, *arguments: Any) -> Any:
        if live.episode.attempt == 0:
            await asyncio.Event().wait()
        return await verify(self, live, *arguments)

    monkeypatch.setattr(SingleAgentTurn, "_verify", hangs)
    async with driven(tmp_path) as driver:
        rig = driver.rig
        rig.controller.settings = rig.cell_settings(prepare_timeout=2.0, restart_blockers_after=1)
        driver.begin("0-0")
        await rig.until(lambda: any(one.where == "verify" for one in rig.participant("env")._live.values()))
        taken = asyncio.ensure_future(rig.controller.take("cp-id", "cp", quiet))
        await rig.until(taken.done)
        assert taken.exception() is not None
        (answer,) = await driver.answers()
        assert (answer.attempt, seeds(rig, "0-0")) == (1, [0, 1])


async def test_a_checkpoint_that_is_open_when_a_rollout_is_sent_only_delays_it(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        rig = driver.rig
        taken = asyncio.ensure_future(rig.controller.take("halt-id", "halt", quiet, stop=True))
        await rig.until(taken.done)
        driver.begin()
        began = now()
        await rig.until(lambda: now() - began > 30)
        assert not any(task.done() for task in driver.tasks)
        await rig.controller.release()
        assert {one.attempt for one in await driver.answers()} == {0}


# ---- ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", "gone"])
async def test_c21_a_cell_that_stays_out_of_service_is_given_up_and_named(tmp_path: Path, how: str) -> None:
    async with driven(tmp_path, patience=120.0) as driver:
        rig = driver.rig
        if how == "stopped":
            taken = asyncio.ensure_future(rig.controller.take("halt-id", "halt", quiet, stop=True))
            await rig.until(taken.done)
        else:
            rig.kill("env")
        began = now()
        running = asyncio.create_task(driver.client.run("0-0", TASKS["0-0"]))
        if how == "stopped":
            await rig.until(running.done)
        else:
            await asyncio.wait([running])
        with pytest.raises(NotInService, match=r"cell 0 for 0-0, after 120 s: ") as given_up:
            running.result()
        assert 120 <= now() - began < 140
        assert ("admission_closed" if how == "stopped" else "ConnectError") in str(given_up.value)


async def test_a_request_that_is_wrong_is_refused_at_once(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        await driver.client.run("0-0", TASKS["0-0"])
        with pytest.raises(ProtocolError, match="checkpoint_conflict"):
            await driver.client.run("0-0", TASKS["1-0"])
        with pytest.raises(ProtocolError, match="invalid_request"):
            await driver.client.run("new", {"task_input": 1})
        with pytest.raises(InvalidIdentity):
            await driver.client.run("a/b", TASKS["0-0"])
        assert (await driver.client.state("0-0")).rollout.state == "answered"


def answering(*responses: httpx.Response) -> tuple[httpx.AsyncClient, list[httpx.Request]]:
    """A client of something that answers so, one after the other."""
    asked: list[httpx.Request] = []
    left = list(responses)

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return left.pop(0)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle)), asked


DONE = {"episode_id": {"rollout_id": "x", "attempt": 0}, "task_id": None, "result": {"reward": 1.0}}
UNKNOWN = {
    "cell": 0,
    "in_service": True,
    "cell_attempt": 4,
    "attempt_floor": True,
    "rollout": {"rollout_id": "x", "state": "unknown", "next_attempt": 4},
}


ENVIRONMENTS = [f"http://env-{cell}:8000/" for cell in range(3)]
ROLLOUTS_OF_CELLS = [f"{number}-0" for number in range(30)]


@dataclass
class Cells:
    """Three cells, of which those from `wanted` on are to go, and those from `present` on do not answer; `begun` are
    known in their own cell. `sent` is which cells `/run` was sent to."""

    wanted: int = 3
    present: int = 3
    begun: tuple[str, ...] = ()
    plain: bool = False  # without checkpoints
    sent: list[int] = field(default_factory=list)

    def client(self) -> RolloutClient:
        return RolloutClient(ENVIRONMENTS, httpx.AsyncClient(transport=httpx.MockTransport(self._answer)))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        cell = int(request.url.host.removeprefix("env-"))
        if cell >= self.present:
            raise httpx.ConnectError("no such host")
        if request.url.path == "/run":
            self.sent.append(cell)
            return httpx.Response(200, json=DONE)
        if self.plain:
            return httpx.Response(404, json={"detail": "Not Found"})
        rollout = request.url.path.rsplit("/", 1)[1]
        standing = {"rollout_id": rollout, "state": "unknown", "next_attempt": 0}
        if rollout in self.begun:
            standing = {**standing, "state": "running", "attempt": 0, "next_attempt": 1}
        state = {**UNKNOWN, "cell": cell, "cell_attempt": 0, "leaving": cell >= self.wanted, "rollout": standing}
        return httpx.Response(200, json=state)


@pytest.mark.parametrize("plain", [False, True])
async def test_each_rollout_goes_to_its_own_cell_and_only_there(plain: bool) -> None:
    cells = Cells(plain=plain)
    client = cells.client()
    answers = [await client.run(rollout, {}) for rollout in ROLLOUTS_OF_CELLS]
    assert [one.cell for one in answers] == [cell_of(rollout, 3) for rollout in ROLLOUTS_OF_CELLS] == cells.sent
    assert {one.cell for one in answers} == {0, 1, 2}


@pytest.mark.parametrize("wanted", [1, 2])
async def test_what_has_not_begun_in_a_cell_that_is_to_go_begins_as_if_that_were_gone(wanted: int) -> None:
    cells = Cells(wanted=wanted, begun=tuple(ROLLOUTS_OF_CELLS[:10]))
    client = cells.client()
    for rollout in ROLLOUTS_OF_CELLS:
        await client.run(rollout, {})
    assert cells.sent[:10] == [cell_of(rollout, 3) for rollout in ROLLOUTS_OF_CELLS[:10]], "it has begun there"
    assert max(cells.sent[:10]) == 2
    assert cells.sent[10:] == [cell_of(rollout, wanted) for rollout in ROLLOUTS_OF_CELLS[10:]]


async def test_a_cell_that_was_to_go_and_does_not_answer_is_gone_until_it_does() -> None:
    cells = Cells(wanted=2)
    client = cells.client()
    rollout = next(one for one in ROLLOUTS_OF_CELLS if cell_of(one, 3) == 2)
    assert await client.place(rollout) == cell_of(rollout, 2)
    cells.present = 2
    assert await client.place(rollout) == cell_of(rollout, 2)
    cells.wanted = cells.present = 3
    assert await client.place(rollout) == 2
    cells.present = 2
    assert await client.place(rollout) == 2, "it is being recovered, as far as is known"


async def test_a_rollout_that_began_when_there_were_other_cells_stays_where_it_is() -> None:
    rollout = next(f"{number}-0" for number in range(99) if cell_of(f"{number}-0", 3) == 2)
    before = cell_of(rollout, 2)
    http, asked = answering(httpx.Response(200, json=DONE))
    async with http:
        client = RolloutClient([f"http://env-{cell}" for cell in range(3)], http)
        assert (await client.run(rollout, {}, cell=before)).cell == before
    assert asked[0].url.host == f"env-{before}"


async def test_what_the_cell_s_attempt_is_is_learned_once() -> None:
    stale = ProtocolError("stale_attempt", "x")
    http, asked = answering(
        httpx.Response(stale.status, json=stale.body()),
        httpx.Response(200, json=UNKNOWN),
        httpx.Response(200, json=DONE),
        httpx.Response(200, json=DONE),
    )
    async with http:
        client = RolloutClient(["http://env"], http)
        assert (await client.run("x", {})).attempt == 4
        assert (await client.run("y", {})).attempt == 4
    assert len(asked) == 4


@pytest.mark.parametrize(
    "between",
    [
        httpx.Response(503, text="no endpoints"),
        httpx.Response(502, json={"error": "bad gateway"}),
        httpx.Response(200, content=b'{"result": {"rew'),
    ],
)
async def test_what_something_between_answers_is_no_answer(between: httpx.Response) -> None:
    http, asked = answering(between, httpx.Response(200, json=UNKNOWN), httpx.Response(200, json=DONE))
    async with http:
        answer = await RolloutClient(["http://env"], http).run("x", {})
    assert (answer.attempt, [request.url.path for request in asked]) == (4, ["/run", "/ng-rollout-state/x", "/run"])


@pytest.mark.parametrize(
    "answer", [httpx.Response(500, json={"error": {"code": "internal"}}), httpx.Response(200, json={"other": 1})]
)
async def test_an_error_that_a_repeat_does_not_mend_is_told(answer: httpx.Response) -> None:
    http, asked = answering(answer)
    async with http:
        with pytest.raises(RunFailed):
            await RolloutClient(["http://env"], http).run("x", {})
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("said", "says"),
    [(httpx.Response(404, json={}), "without checkpoints"), (httpx.Response(200, json={}), "another form")],
)
async def test_an_environment_that_cannot_be_asked_is_named(said: httpx.Response, says: str) -> None:
    closed = ProtocolError("admission_closed", "x")
    http, _ = answering(httpx.Response(closed.status, json=closed.body()), said)
    async with http:
        with pytest.raises(RunFailed, match=says):
            await RolloutClient(["http://env"], http).run("x", {})


async def test_a_client_without_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one environment"):
        RolloutClient([])


# ---- what is over -----------------------------------------------------------------------------------------


def kept(rig: Rig) -> set[str]:
    """Rollouts of which any server keeps anything: an episode, an answer, a mark."""
    found: set[str] = set()
    for name in NAMES:
        participant = rig.participant(name)
        found |= set(participant.gate.fence.marks)
        if (answered := getattr(participant, "_answered", None)) is not None:
            found |= set(answered._attempts)
    return found | rig.participant("env").rollouts()


async def test_what_a_driver_is_done_with_is_forgotten_everywhere(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        rig = driver.rig
        driver.begin()
        await driver.answers()
        assert kept(rig) == set(TASKS)
        first, *others = TASKS
        await driver.client.forget([first, "never-sent"])
        await rig.until(lambda: kept(rig) == set(others))
        await driver.client.forget(TASKS)
        await rig.until(lambda: kept(rig) == set() and not rig.participant("env")._over)
        answer = await driver.client.run(first, TASKS[first])
        assert answer.result is not None, "sent again it begins anew"


@pytest.mark.parametrize("name", ["policy", "agent", "counter"])
async def test_where_one_cannot_be_told_it_is_asked_for_again(tmp_path: Path, name: str) -> None:
    """The environment is the last one: whoever it calls has done it before."""
    async with driven(tmp_path) as driver:
        rig = driver.rig
        driver.begin("0-0")
        await driver.answers()
        rig.network.faults.append(Fault("unreachable", f"{name}-control", "forget", calls=10_000))
        await driver.client.forget(["0-0"])
        began = now()
        await rig.until(lambda: now() - began > 100)
        assert rig.participant("env").to_forget() == ["0-0"]
        rig.network.faults.clear()
        await rig.until(lambda: kept(rig) == set())


async def test_what_a_recovery_brings_back_of_a_rollout_that_is_over_is_ended(tmp_path: Path) -> None:
    """Its driver has the answer: it would wait for a replacement that never comes, in every checkpoint again."""
    async with driven(tmp_path) as driver:
        rig = driver.rig
        await under_way(driver)
        await rig.checkpoint("one")
        answers = await driver.answers()
        await driver.client.forget(TASKS)
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        assert {one.attempt for one in answers} == {0}
        assert len(rig.participant("env").survey().unclaimed or ()) == ROLLOUTS
        await driver.client.forget(TASKS)
        await rig.until(lambda: kept(rig) == set())
        assert rig.participant("counter").survey().counts["sessions"] == 0
        outcome = await rig.checkpoint("two")
        assert outcome.publication.episodes == []


async def test_what_nobody_wants_any_more_is_ended_while_it_runs(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        rig = driver.rig
        await under_way(driver)
        first = next(iter(TASKS))
        unwanted = driver.tasks.pop(0)
        unwanted.cancel()
        await asyncio.gather(unwanted, return_exceptions=True)
        await driver.client.forget([first])
        await rig.until(lambda: first not in kept(rig))
        await driver.answers()


async def test_a_rollout_that_is_sent_after_all_is_wanted_again(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        rig = driver.rig
        await driver.client.forget(["0-0"])
        driver.begin("0-0")
        (answer,) = await driver.answers()
        assert answer.attempt == 0
        assert len(seeds(rig, "0-0")) == 1


async def test_what_cannot_be_forgotten_is_said(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        with pytest.raises(ProtocolError, match="invalid_request"):
            await driver.client.forget(["a/b"])
        driver.rig.network.faults.append(Fault("unreachable", "env", "forget", calls=1))
        with pytest.raises(NotInService, match="does not answer"):
            await driver.client.forget(["0-0"])
    async with cell(tmp_path / "own", counter_rows(1, 1)) as rig, rig.network.client() as http:
        await rig.until(rig.running)
        with pytest.raises(RunFailed, match="with a collection, needs none"):
            await RolloutClient(["http://env"], http).forget(["0-0"])
