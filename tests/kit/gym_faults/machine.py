"""Random sequences of everything that can happen to a cell, by hypothesis.

Reading a failure: hypothesis prints the shortest sequence of steps that it found, as a script - `state.crash(...)`,
`state.checkpoint(...)` and so on; each step is a method below, with its arguments. The error under it is a
`Violation` and begins with the number of the invariant (protocol, section 6) that does not hold; 0 stands for what
was seen while it happened, and names its own. To look closer, write the steps down as calls of `World` in a test
of your own: the same steps always do the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gym_faults.model import joined, split
from gym_faults.world import BEGIN_OR_END, FAST, GRACE, SERVERS, World
from gym_rig.network import Fault, Kind, Seen
from gym_rig.storage import WriteFault
from gym_servers.coordination.record import Stage
from gym_servers.protocol.identity import parse_key

LATE_SECONDS = 1.2  # an activation may end in this time
MOMENTS = st.sampled_from([0.0, 0.01, 0.02, 0.04, 0.1, 0.3, 1.0, 3.0])
VICTIMS = st.sampled_from([*((name,) for name in SERVERS), SERVERS, ("env", "agent"), ("counter", "policy")])
WHO = st.sampled_from([*SERVERS, "all"])
IDS = st.sampled_from(["f1", "f2", "current", "before"])
DEADLINES = st.sampled_from([-1.0, 0.05, 2.0, 25.0])
HOSTS = st.sampled_from(["*", *SERVERS[:4], "engine", *(f"{name}-control" for name in SERVERS)])
KEYS = st.sampled_from(["", "checkpoint.json", "manifest.json", "pack", "proposal", "attempts", "rows"])


class Faults(RuleBasedStateMachine):
    """A cell to which everything happens. `endings`: how often the cell dies once more when all is healed."""

    endings: ClassVar[tuple[int, ...]] = (0, 1, 1, 2)
    world: World

    @initialize(
        seed=st.integers(1, 4),
        crashes=st.sampled_from(endings),
        warm=st.sampled_from([0.5, 1.5, 2.5]),
        slow=st.booleans(),
        row=st.sampled_from([None, "before", "after"]),
        first=st.sampled_from(["nothing", "a checkpoint", "a publication's answer lost", "a checkpoint and a crash"]),
    )
    def begin(
        self,
        seed: int,
        crashes: int,
        warm: float,
        slow: bool,
        row: Literal["before", "after"] | None,
        first: str,
    ) -> None:
        """Most of what can go wrong needs something to go wrong with. `slow`: messages and effects take a while, so
        that more is under way at any moment. `row`: what becomes of the first write of a row."""
        self.broken = False
        self.crashes = crashes
        self.world = World(seed, latency=0.1 if slow else 0.003, journal_seconds=0.3 if slow else 0.02)
        if row is not None:
            self.world.bucket.faults.append(WriteFault(row, "rows"))
        self.passes(warm)
        if first == "a publication's answer lost":
            self.world.bucket.faults.append(WriteFault("after", "checkpoint.json"))
        if first != "nothing":
            self.world.until(self.world.checkpoint().done, 10.0)
            self.passes(0.3)
        if first == "a checkpoint and a crash":
            self.world.kill(*SERVERS)
            self.world.until(lambda: self.world.record.attempt and self.world.in_service(), 10.0)
            self.passes(0.3)

    def passes(self, seconds: float) -> None:
        """Time passes, then everything is looked at."""
        try:
            if seconds:
                self.world.run(seconds)
            self.world.check()
        except BaseException:
            self.broken = True
            raise

    # ---- time and checkpoints -----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.passes(seconds)

    @rule()
    def leases_run_out(self) -> None:
        self.passes(GRACE + 1.0)

    @precondition(lambda self: self.world.coordinated)
    @rule(
        timeout=st.sampled_from([1.0, 15.0]),
        hindered=st.sampled_from([False, False, True]),
        scoped=st.booleans(),
        then=MOMENTS,
    )
    def checkpoint(self, timeout: float, hindered: bool, scoped: bool, then: float) -> None:
        """`hindered`: who is asked last is held by another coordinator. `scoped`: of some rollouts only."""
        if hindered:
            self._verb("counter", "prepare", "f7", 2.0, 0.05)
        self.world.checkpoint(timeout, only=self._some_rollouts() if scoped else None)
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule(
        victims=VICTIMS,
        ends=st.booleans(),
        late=st.sampled_from([None, "policy", "policy", "agent", "counter"]),
        scoped=st.booleans(),
        between=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        then=MOMENTS,
    )
    def checkpoint_then_crash(
        self, victims: tuple[str, ...], ends: bool, late: str | None, scoped: bool, between: float, then: float
    ) -> None:
        """The way things go most often: a checkpoint is done, and a while after it something dies. `ends`: it comes
        while an episode ends. `late`: who hears of it when those before it have been closed for a while; work that
        they wait for goes on meanwhile."""
        self.world.until(self.world.in_service, 5.0)
        if ends:  # and takes so long for it that the checkpoint finds it there
            self.world.network.faults.insert(0, Fault("delay", "counter", "verify", 1, LATE_SECONDS))
            self.world.until(self.world.ends, 3.0, look_seconds=0.01)
        if late is not None:
            self.world.network.faults.insert(0, Fault("delay", f"{late}-control", "prepare", 1, LATE_SECONDS))
        taken = self.world.checkpoint(only=self._some_rollouts() if scoped else None)
        self.world.until(taken.done, 10.0)
        self.passes(between)
        self.world.kill(*victims)
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule(
        victims=st.sampled_from([(), ("agent",), SERVERS]),
        between=MOMENTS,
        asked=st.booleans(),
        then=st.sampled_from([0.0, 0.3, 3.0, GRACE + 1.0]),
    )
    def stop(self, victims: tuple[str, ...], between: float, asked: bool, then: float) -> None:
        """A checkpoint stops the cell; its processes may end, as they do then; perhaps it is asked to go on."""
        self.world.until(self.world.in_service, 5.0)
        taken = self.world.checkpoint(stop=True)
        self.passes(between)
        self.world.kill(*victims)
        self.world.until(taken.done, 10.0)
        self.passes(then)
        if asked:
            self.goes_on(0.3)

    @precondition(lambda self: self.world.coordinated)
    @rule(then=MOMENTS)
    def goes_on(self, then: float) -> None:
        self.world.release()
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule(
        kinds=st.lists(st.sampled_from(["before", "after"]), max_size=3),
        spoiled=st.booleans(),
        saved=st.sampled_from([None, "before", "after"]),
        dies=st.booleans(),
    )
    def publication_in_doubt(
        self,
        kinds: list[Literal["before", "after"]],
        spoiled: bool,
        saved: Literal["before", "after"] | None,
        dies: bool,
    ) -> None:
        """The one write that decides fails, and so does what tries to settle it; records are damaged on their way to
        storage; perhaps the coordinator dies of it."""
        self.world.until(self.world.in_service, 5.0)
        self.world.bucket.faults[:0] = [WriteFault(kind, "checkpoint.json") for kind in kinds]
        if spoiled:
            self.world.bucket.faults.append(WriteFault("spoil", "/pack"))
        taken = self.world.checkpoint()
        self.world.until(lambda: len(self.world.bucket.faults) < len(kinds) or taken.done(), 6.0)
        if saved is not None:
            self.world.coordinator.save_faults.append(saved)
        self.world.until(taken.done, 3.0)
        if dies:
            self.world.coordinator_dies()
            self.world.take_over()
        self.passes(1.0)

    @precondition(lambda self: self.world.coordinated)
    @rule()
    def death_was_seen(self) -> None:
        """The checkpoint that is being taken is cancelled, as where a participant is believed dead."""
        task = self.world.coordinator.controller._checkpoint
        if task is not None:
            task.cancel()
        self.passes(0.05)

    def _some_rollouts(self) -> frozenset[str]:
        """Every second one."""
        return frozenset(sorted(self.world.rows)[::2])

    # ---- deaths -------------------------------------------------------------------------------------------

    @rule(victims=VICTIMS, then=MOMENTS)
    def crash(self, victims: tuple[str, ...], then: float) -> None:
        self.world.kill(*victims)
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule(
        victims=VICTIMS,
        slow=st.booleans(),
        moment=st.sampled_from([None, None, 0.0, 0.01, 0.03, 0.15, 0.3]),
        by=st.sampled_from(
            [
                "a second death",
                "the coordinator's death",
                "a predecessor's resume",
                "a predecessor's resume",
                "a predecessor's restore",
                "old calls",
            ]
        ),
        second=VICTIMS,
        then=st.sampled_from([0.0, 0.3, 1.0, GRACE + 1.0]),
    )
    def recovery_is_disturbed(
        self,
        victims: tuple[str, ...],
        slow: bool,
        moment: float | None,
        by: str,
        second: tuple[str, ...],
        then: float,
    ) -> None:
        """`slow`: storage takes a while to give the records. `moment`: how long after the recovery has begun to put
        the cell into service; None for while somebody reads its records."""
        self.world.kill(*victims)
        if slow:
            self.world.loop.thread_seconds = 0.3
        self.world.until(lambda: self.world.record.stage is Stage.STARTING and self.world.record.pins, 8.0)
        if moment is None:
            self.world.until(self.world.reads, 3.0, look_seconds=0.01)
        self.passes(moment or 0.0)
        match by:
            case "a second death":
                self.world.kill(*second)
            case "the coordinator's death":
                self.world.coordinator_dies()
            case "a predecessor's resume":
                self.foreign_verb("resume", "all", "f1", 5.0, True, False, "all", 0.0)
            case "a predecessor's restore":
                self._foreign_restore("all", 0, 0.0)
                self.world.coordinator_dies()
            case _:
                for _ in range(5):  # whenever somebody opens, they are there
                    self._old_calls(0, 8)
                    self.passes(0.015)
        self.passes(then)
        self.world.loop.thread_seconds = FAST

    @precondition(lambda self: self.world.coordinated)
    @rule(then=MOMENTS)
    def coordinator_dies(self, then: float) -> None:
        self.world.coordinator_dies()
        self.passes(then)

    @precondition(lambda self: not self.world.coordinated)
    @rule(then=MOMENTS)
    def another_takes_over(self, then: float) -> None:
        self.world.take_over()
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule(opening=st.booleans(), then=MOMENTS)
    def another_comes_beside(self, opening: bool, then: float) -> None:
        """It believes the coordinator dead, which is not. `opening`: and had begun a checkpoint."""
        if opening:
            self.world.checkpoint()
            self.passes(0.1)
        self.world.take_over()
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule(when=st.sampled_from(["before", "after"]))
    def record_is_not_saved(self, when: Literal["before", "after"]) -> None:
        self.world.coordinator.save_faults.append(when)
        self.passes(0.0)

    # ---- verbs of somebody else ---------------------------------------------------------------------------

    @rule(
        verb=st.sampled_from(["prepare", "prepare", "commit", "commit", "resume", "resume", "renew"]),
        who=WHO,
        which=IDS,
        seconds=DEADLINES,
        numbered=st.booleans(),
        background=st.booleans(),
        scope=st.sampled_from(["all", "none", "one"]),
        then=MOMENTS,
    )
    def foreign_verb(
        self,
        verb: str,
        who: str,
        which: str,
        seconds: float,
        numbered: bool,
        background: bool,
        scope: str,
        then: float,
    ) -> None:
        """`numbered`: a resume under the cell's attempt, as of a predecessor that was putting these very processes
        into service, and names each. Nobody else has reserved a number for them."""
        more: dict[str, Any] = {}
        meant: dict[str, str] = {}
        if verb == "commit":
            live = sorted(self.world.rig.participant("env")._live)
            more = {
                "checkpoint_dir": f"{self.world.folder}/foreign/{self._id(which)}",
                "episode_ids": {"all": None, "none": [], "one": live[:1]}[scope],
                "background": background,
            }
        elif verb == "resume" and numbered and self._being_started(who):
            more, meant = {"cell_attempt": self.world.record.attempt}, self._pinned()
        self._verb(who, verb, which, seconds, then, meant, **more)

    @rule(who=st.sampled_from(["counter", "counter", "agent", "env"]), seconds=DEADLINES, then=MOMENTS)
    def foreign_prepare_meets_work(self, who: str, seconds: float, then: float) -> None:
        """A checkpoint of another coordinator closes one server alone, while that is at work."""
        self.world.until(lambda: self.world.works(who), 3.0, look_seconds=0.01)
        self._verb(who, "prepare", "f8", seconds, then)

    @rule(
        orderly=st.booleans(),
        between=st.sampled_from([0.02, 0.3, 1.0]),
        pause=st.sampled_from([0.05, 1.0, 3.0]),
        scope=st.sampled_from(["all", "one"]),
        background=st.booleans(),
        resumed=st.booleans(),
    )
    def foreign_checkpoint(
        self, orderly: bool, between: float, pause: float, scope: str, background: bool, resumed: bool
    ) -> None:
        """All of one, slowly, by another coordinator; nobody publishes it. `orderly`: callers before the called."""
        order = ("collection", "env", "policy", "agent", "counter")
        for name in order if orderly else order[::-1]:
            self._verb(name, "prepare", "f6", 25.0, between)
        self.passes(pause)
        self.foreign_verb("commit", "all", "f6", 25.0, False, background, scope, pause)
        if resumed:
            self._verb("all", "resume", "f6", 5.0, 0.05)
            self._verb("all", "renew", "f6", 2.0, 0.05)

    @rule(
        verb=st.sampled_from(["restore", "retire", "retire", "forget"]),
        who=WHO,
        which=st.integers(0, 5),
        then=MOMENTS,
    )
    def foreign_upkeep(self, verb: str, who: str, which: int, then: float) -> None:
        """Retiring and forgetting is done everywhere, as whoever does it has to; forgetting of what is over."""
        attempts = self.world.watch.attempts
        sent, over = sorted(attempts.sent), sorted(attempts.over)
        if verb == "restore":
            self._foreign_restore(who, which, then)
        elif verb == "retire" and sent:
            rollout, attempt = sent[which % len(sent)]
            self._verb("all", "retire", "f4", 10.0, 0.3, episode_ids=[joined(rollout, attempt)])
            for seen in [seen for seen in self.world.watch.calls if _episode(seen) == (rollout, attempt)][:12]:
                if self._may_come_again(seen):
                    self.world.repeat(seen)
            self.passes(then)
        elif verb == "forget" and over:
            self._verb("all", "forget", "f5", 10.0, then, rollout_ids=over)

    def _foreign_restore(self, who: str, which: int, then: float) -> None:
        """Of what is being restored, by a predecessor that is not quite dead; else of anything, by one that does not
        know of the last recovery."""
        record, known = self.world.record, sorted(self.world.watch.published)
        if not known:
            return
        being = record.restore if self._being_started(who) else None
        uri = being.uri if being is not None else known[which % len(known)]
        self._verb(
            who,
            "restore",
            "f3",
            5.0,
            then,
            self._pinned() if being is not None else None,
            checkpoint_dir=uri,
            episode_ids=json.loads(self.world.watch.published[uri])["episodes"],
            cell_attempt=record.attempt if being is not None else max(0, record.attempt - 1),
        )

    def _being_started(self, who: str) -> bool:
        record, processes = self.world.record, self.world.rig.processes_by_name
        return record.stage is Stage.STARTING and all(
            name in record.pins and record.pins[name].incarnation == processes[name].incarnation
            for name in (SERVERS if who == "all" else (who,))
        )

    def _pinned(self) -> dict[str, str]:
        """Which processes a coordinator of this record means: others may be there when a verb arrives."""
        return {name: pin.session for name, pin in self.world.record.pins.items()}

    def _verb(
        self,
        who: str,
        verb: str,
        which: str,
        seconds: float,
        then: float,
        meant: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        body = {"checkpoint_id": self._id(which), "deadline_ts": self.world.loop.time() + seconds, **more}
        for name in SERVERS if who == "all" else (who,):
            session = {"session": meant[name]} if meant and name in meant else {}
            self.world.verb(name, verb, {**body, **session})
        self.passes(then)

    def _id(self, which: str) -> str:
        if which == "current":
            return f"cp{self.world.taken}-id"
        return f"cp{self.world.taken - 1}-id" if which == "before" else which

    # ---- network and storage ------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(
            ["unreachable", "lose request", "lose reply", "break off", "cut reply", "delay", "duplicate"]
        ),
        host=HOSTS,
        path=st.sampled_from(["", "", "restore", "commit", "resume", "prepare", "status", "responses", "session"]),
        calls=st.sampled_from([1, 1, 2, 5, 40]),
        seconds=st.sampled_from([0.01, 0.2, 1.0, 6.0]),
        then=MOMENTS,
    )
    def network_fault(self, kind: Kind, host: str, path: str, calls: int, seconds: float, then: float) -> None:
        self.world.network.faults.append(Fault(kind, host, path, calls, seconds))
        self.passes(then)

    @rule(which=st.integers(0, 30), then=MOMENTS)
    def client_leaves(self, which: int, then: float) -> None:
        self.world.network.break_off(which)
        self.passes(then)

    @rule(
        kind=st.sampled_from(["before", "after", "spoil"]),
        key=KEYS,
        writes=st.sampled_from([1, 1, 2, 6]),
        then=MOMENTS,
    )
    def write_fault(self, kind: Literal["before", "after", "spoil"], key: str, writes: int, then: float) -> None:
        # What decides - publications, tombstones, attempts - is a single object, whole or not there.
        spoils = kind == "spoil"
        self.world.bucket.faults.append(WriteFault(kind, "/pack" if spoils else key, writes))
        self.passes(then)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def storage_is_away(self, seconds: float) -> None:
        self.world.bucket.away = True
        self.passes(seconds)
        self.world.bucket.away = False

    @rule(seconds=st.sampled_from([0.05, 1.0, 12.0]), then=st.sampled_from([0.1, 1.0, 3.0]))
    def storage_is_slow(self, seconds: float, then: float) -> None:
        """What is begun in the meantime takes so long."""
        self.world.loop.thread_seconds = seconds
        self.passes(then)
        self.world.loop.thread_seconds = FAST

    @rule(then=MOMENTS)
    def all_is_healed(self, then: float) -> None:
        self.world.heal()
        self.passes(then)

    # ---- clients that do not know what has happened --------------------------------------------------------

    @rule(which=st.integers(-20, 200), calls=st.sampled_from([1, 4, 12]), then=MOMENTS)
    def old_calls_again(self, which: int, calls: int, then: float) -> None:
        """Of replaced attempts, everything; of one that still runs, what may be repeated. Below 0: of the newest."""
        self._old_calls(which, calls)
        self.passes(then)

    @rule(which=st.integers(1, 20), calls=st.sampled_from([1, 4]), then=MOMENTS)
    def calls_of_a_wrong_attempt(self, which: int, calls: int, then: float) -> None:
        """Somebody takes the sessions of one attempt for those of another, which does not exist."""
        for seen in self.world.watch.calls[-which:][:calls]:
            self.world.mistake(seen)
        self.passes(then)

    def _old_calls(self, which: int, calls: int) -> None:
        repeatable = [seen for seen in self.world.watch.calls if self._may_come_again(seen)]
        for number in range(min(calls, len(repeatable))):
            self.world.repeat(repeatable[(which + number) % len(repeatable)])

    def _may_come_again(self, seen: Seen) -> bool:
        attempts = self.world.watch.attempts
        episode = _episode(seen)
        # A `/run` that is under way while its rollout is forgotten would begin it anew: no driver of ours leaves one.
        over = attempts.over | (attempts.ran if seen.path == "/run" else set())
        if episode is None or (episode[0] in over and episode[1] >= self.world.record.attempt):
            return False
        newest = max(attempt for rollout, attempt in attempts.sent if rollout == episode[0])
        repeatable = not seen.path.endswith(BEGIN_OR_END)
        return episode[1] < min(newest, self.world.record.attempt) or repeatable

    # ---- the end ------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if not self.broken:
                self.world.finish(self.crashes)
        finally:
            self.world.close()


def _episode(seen: Seen) -> tuple[str, int] | None:
    if seen.path == "/run":
        named = json.loads(seen.body)["episode_id"]
        return named["rollout_id"], named["attempt"]
    if seen.path.startswith("/ng-rollout/"):
        return split(parse_key(seen.path.split("/")[2]).key)
    return None
