"""Random sequences of everything that can happen to a cell, by hypothesis.

Reading a failure: hypothesis prints the shortest sequence of steps that it found, as a script - `state.crash(...)`,
`state.checkpoint(...)` and so on; each step is a method below, with its arguments. The error under it is a
`Violation` and begins with the number of the invariant (protocol, section 6) that does not hold; 0 stands for what
was seen while it happened, and names its own. To look closer, write the steps down as calls of `World` in a test
of your own: the same steps always do the same.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gym_faults.model import split
from gym_faults.world import GRACE, SERVERS, World
from gym_rig.network import Fault, Kind, Seen
from gym_rig.storage import WriteFault
from gym_servers.coordination.record import Stage
from gym_servers.protocol.identity import parse_key

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

    @initialize(seed=st.integers(1, 4), crashes=st.sampled_from(endings), warm=st.sampled_from([0.5, 1.5, 2.5]))
    def begin(self, seed: int, crashes: int, warm: float) -> None:
        self.broken = False
        self.crashes = crashes
        self.world = World(seed)
        self.passes(warm)

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
    @rule(timeout=st.sampled_from([1.0, 15.0]), then=MOMENTS)
    def checkpoint(self, timeout: float, then: float) -> None:
        self.world.checkpoint(timeout)
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule(victims=VICTIMS, between=st.sampled_from([0.0, 0.3, 1.0, 2.0]), then=MOMENTS)
    def checkpoint_then_crash(self, victims: tuple[str, ...], between: float, then: float) -> None:
        """The way things go most often: a checkpoint is done, and a while after it something dies."""
        self.world.until(self.world.in_service, 5.0)
        taken = self.world.checkpoint()
        self.world.until(taken.done, 10.0)
        self.passes(between)
        self.world.kill(*victims)
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule()
    def death_was_seen(self) -> None:
        """The checkpoint that is being taken is cancelled, as where a participant is believed dead."""
        task = self.world.coordinator.controller._checkpoint
        if task is not None:
            task.cancel()
        self.passes(0.05)

    # ---- deaths -------------------------------------------------------------------------------------------

    @rule(victims=VICTIMS, then=MOMENTS)
    def crash(self, victims: tuple[str, ...], then: float) -> None:
        self.world.kill(*victims)
        self.passes(then)

    @precondition(lambda self: self.world.coordinated)
    @rule(first=VICTIMS, second=VICTIMS, moment=st.sampled_from([0.0, 0.02, 0.05, 0.2]))
    def crash_in_the_recovery(self, first: tuple[str, ...], second: tuple[str, ...], moment: float) -> None:
        self.world.kill(*first)
        self.world.until(lambda: self.world.record.stage is Stage.STARTING and self.world.record.pins, 8.0)
        self.passes(moment)
        self.world.kill(*second)
        self.passes(0.3)

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
    @rule(when=st.sampled_from(["before", "after"]))
    def record_is_not_saved(self, when: Literal["before", "after"]) -> None:
        self.world.coordinator.save_faults.append(when)
        self.passes(0.0)

    # ---- verbs of somebody else ---------------------------------------------------------------------------

    @rule(who=WHO, which=IDS, seconds=DEADLINES, then=MOMENTS)
    def foreign_prepare(self, who: str, which: str, seconds: float, then: float) -> None:
        self._verb(who, "prepare", which, seconds, then)

    @rule(
        who=WHO,
        which=IDS,
        seconds=DEADLINES,
        then=MOMENTS,
        background=st.booleans(),
        scope=st.sampled_from(["all", "none", "one"]),
    )
    def foreign_commit(self, who: str, which: str, seconds: float, then: float, background: bool, scope: str) -> None:
        live = sorted(self.world.rig.participant("env")._live)
        keys = {"all": None, "none": [], "one": live[:1]}[scope]
        where = f"{self.world.folder}/foreign/{self._id(which)}"
        self._verb(who, "commit", which, seconds, then, checkpoint_dir=where, episode_ids=keys, background=background)

    @rule(who=WHO, which=IDS, then=MOMENTS, attempt=st.sampled_from([None, 0, 1, "current"]))
    def foreign_resume(self, who: str, which: str, then: float, attempt: int | Literal["current"] | None) -> None:
        known = self.world.record.attempt
        # Not above the cell's own: nobody has reserved such a number.
        number = None if attempt is None else known if attempt == "current" else min(attempt, known)
        self._verb(who, "resume", which, 2.0, then, cell_attempt=number)

    @rule(who=WHO, which=IDS)
    def foreign_renew(self, who: str, which: str) -> None:
        self._verb(who, "renew", which, 2.0, 0.05)

    @rule(who=WHO, then=MOMENTS, published=st.integers(0, 3))
    def foreign_restore(self, who: str, then: float, published: int) -> None:
        """By whoever believes that it is still his turn: of a published checkpoint, under its cell's attempt."""
        known = sorted(self.world.watch.published)
        if known:
            uri = known[published % len(known)]
            self._verb(
                who,
                "restore",
                "f3",
                5.0,
                then,
                checkpoint_dir=uri,
                episode_ids=_episodes(self.world.watch.published[uri]),
                cell_attempt=self.world.record.attempt,
            )

    @rule(which=st.integers(0, 5), then=MOMENTS)
    def foreign_retire(self, which: int, then: float) -> None:
        """Of an episode that has been sent; everywhere, as whoever retires has to."""
        sent = sorted(self.world.watch.attempts.sent)
        if sent:
            rollout, attempt = sent[which % len(sent)]
            key = f"{rollout}-a{attempt}" if attempt else rollout
            self._verb("all", "retire", "f4", 10.0, then, episode_ids=[key])

    @rule(then=MOMENTS)
    def foreign_forget(self, then: float) -> None:
        """Of what is over."""
        over = sorted(self.world.watch.attempts.over)
        if over:
            self._verb("all", "forget", "f5", 10.0, then, rollout_ids=over)

    def _verb(self, who: str, verb: str, which: str, seconds: float, then: float, **more: Any) -> None:
        body = {"checkpoint_id": self._id(which), "deadline_ts": self.world.loop.time() + seconds, **more}
        for name in SERVERS if who == "all" else (who,):
            self.world.verb(name, verb, body)
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

    @rule(then=MOMENTS)
    def storage_goes_away(self, then: float) -> None:
        self.world.bucket.away = True
        self.passes(then)

    @rule(seconds=st.sampled_from([0.05, 1.0, 12.0]), then=MOMENTS)
    def storage_is_slow(self, seconds: float, then: float) -> None:
        self.world.loop.thread_seconds = seconds
        self.passes(then)

    @rule(then=MOMENTS)
    def all_is_healed(self, then: float) -> None:
        self.world.heal()
        self.passes(then)

    # ---- clients that do not know what has happened --------------------------------------------------------

    @rule(which=st.integers(0, 200), calls=st.sampled_from([1, 4, 12]), then=MOMENTS)
    def old_calls_again(self, which: int, calls: int, then: float) -> None:
        """Of replaced attempts, everything; of one that still runs, what may be repeated."""
        repeatable = [seen for seen in self.world.watch.calls if self._may_come_again(seen)]
        for number in range(min(calls, len(repeatable))):
            self.world.repeat(repeatable[(which + number) % len(repeatable)])
        self.passes(then)

    def _may_come_again(self, seen: Seen) -> bool:
        attempts = self.world.watch.attempts
        episode = _episode(seen)
        if episode is None or (episode[0] in attempts.over and episode[1] >= self.world.record.attempt):
            return False
        newest = max(attempt for rollout, attempt in attempts.sent if rollout == episode[0])
        repeatable = not seen.path.endswith(("/seed_session", "/agent_sessions", "close", "close_session"))
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
    import json

    if seen.path == "/run":
        named = json.loads(seen.body)["episode_id"]
        return named["rollout_id"], named["attempt"]
    if seen.path.startswith("/ng-rollout/"):
        return split(parse_key(seen.path.split("/")[2]).key)
    return None


def _episodes(publication: bytes) -> list[str]:
    import json

    found: list[str] = json.loads(publication)["episodes"]
    return found
