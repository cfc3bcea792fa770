"""What the control plane asks of a participant, whatever its kind."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, highest, next_attempt, parse_key
from gym_servers.protocol.messages import Blocker, Origin, ProblemReason


@dataclass(frozen=True)
class Survey:
    """One look at what is live. `blockers` are (id, where, age in seconds); none means ready.

    `restarts`: capture keys that cannot be continued. `episodes` (environment only): those that can; `unclaimed`:
    those of them that were restored and wait for their replacement.
    """

    blockers: Sequence[Blocker] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    restarts: frozenset[str] = frozenset()
    episodes: frozenset[str] | None = None
    unclaimed: frozenset[str] | None = None

    @property
    def ready(self) -> bool:
        return not self.blockers


@dataclass(frozen=True)
class Scope:
    """The episodes a commit must continue. `keys` is None where a coordinator names none: then everything that
    can be exported is. `live`: running at the environment, yet not to be continued."""

    keys: frozenset[str] | None
    live: frozenset[str] = frozenset()

    def covers(self, key: str) -> bool:
        return self.keys is None or key in self.keys


@dataclass(frozen=True)
class RestorePlan:
    """Which recorded episodes are installed, and under which attempt each continues; `over`: rollout -> the highest
    attempt that was recorded and does not continue."""

    episodes: Mapping[str, Episode]  # capture key as recorded -> episode as restored
    over: Mapping[str, int] = field(default_factory=dict)

    def restored(self, key: str) -> Episode | None:
        return self.episodes.get(key)

    def marks(self) -> dict[str, int]:
        """The watermarks that the restore sets: no attempt that was recorded acts any more, whoever has a record of
        it."""
        return {**self.over, **highest(one.under(one.attempt - 1) for one in self.episodes.values())}

    def beyond(self, marks: Mapping[str, int]) -> RestorePlan:
        """The plan without what the process has retired under the attempt that it would continue under: a restore
        that was given up may come again under the same one, and what was retired in between stays so."""
        kept = {
            key: episode
            for key, episode in self.episodes.items()
            if episode.attempt > marks.get(episode.rollout_id, -1)
        }
        return RestorePlan(kept, self.over)

    def check(self, marks: Mapping[str, int]) -> None:
        """Raise `stale_attempt` where an episode would be stale at once: its watermark is restored with it."""
        for episode in self.episodes.values():
            if episode.attempt <= marks.get(episode.rollout_id, -1):
                raise ProtocolError("stale_attempt", f"{episode.key} was retired before the checkpoint")


def plan_restore(
    keys: Collection[str], cell_attempt: int, attempts: Mapping[str, int], restarts: Collection[str] = ()
) -> RestorePlan:
    """The plan of the attempt rule (protocol section 1); `restarts` are recorded too and do not continue. Raises
    `stale_attempt` for an entry of `attempts` that is below the floor or not above the recorded attempt,
    InvalidIdentity for a key that names no episode."""
    episodes, over = {}, highest(map(parse_key, restarts))
    for key in keys:
        recorded = parse_key(key)
        last = max(recorded.attempt, over.get(recorded.rollout_id, -1))
        wanted = attempts.get(recorded.rollout_id)
        if wanted is not None and (wanted < cell_attempt or wanted <= last):
            raise ProtocolError(
                "stale_attempt",
                f"{recorded.rollout_id} cannot continue as attempt {wanted}: recorded under {last}, "
                f"floor {cell_attempt}",
            )
        attempt = wanted if wanted is not None else next_attempt(last, cell_attempt)
        episodes[key] = recorded.under(attempt)
    return RestorePlan(episodes, over)


class Participant(abc.ABC):
    """One server process as the control plane sees it. All methods run on the event loop, `read` in a thread."""

    kind: str
    problem: str = ""  # what keeps this process from its work, for people; empty where nothing does
    problem_reason = ProblemReason.SERVER_PROBLEM
    origin: Origin | None = None  # what is restored here, where the coordinator said so
    lost: frozenset[str] = frozenset()  # capture keys that the last export found to be restarts, after all

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @abc.abstractmethod
    def survey(self) -> Survey:
        """What is live now. Cheap: it is asked after every change while a prepare waits."""

    @abc.abstractmethod
    async def export(self, scope: Scope) -> dict[str, bytes]:
        """The records in scope, frozen: nothing that happens later changes these bytes."""

    @abc.abstractmethod
    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> Any:
        """Validate every record and build what `install` needs, touching nothing live.

        Raises ProtocolError `invalid_checkpoint_state` where a record is not usable."""

    async def build(self, staged: Any) -> Any:
        """Build what takes time, out of reach of everything live; what `install` gets. Where it raises or is
        cancelled nothing is left. Raises ProtocolError."""
        return staged

    def discard(self, staged: Any) -> None:  # noqa: B027 - most kinds stage nothing
        """What was staged is not going to be installed."""

    @abc.abstractmethod
    def install(self, staged: Any) -> list[str]:
        """Make what was staged live, in one step that cannot fail; the capture keys that are now restored. The
        attempts before them are fenced already."""

    @abc.abstractmethod
    def uninstall(self) -> None:
        """Undo an install: its restore was given up."""

    @abc.abstractmethod
    async def retire(self, episodes: Sequence[Episode]) -> None:
        """Stop and free the work of these episodes and of their rollouts' earlier attempts, then return.
        Repeatable; the watermark is already set."""

    def closing(self, restarts: frozenset[str]) -> None:  # noqa: B027 - most kinds need no reaction
        """Admission has just closed for a checkpoint; `restarts` were reported by earlier stages."""

    def resumed(self) -> None:  # noqa: B027 - most kinds only wait at the gate
        """Admission is open again."""

    def forget(self, rollout_ids: Collection[str]) -> None:  # noqa: B027 - nothing kept per rollout
        """These rollouts are over for good: drop what was kept to answer their duplicates."""

    async def park(self) -> None:  # noqa: B027 - only tool sessions reach outside their process
        """The process is about to end after a commit with stop: give up what must not outlive it."""

    def unpark(self) -> None:  # noqa: B027 - as park
        """The process goes on after all: take back what was parked, before anything is admitted."""

    def to_retire(self) -> list[str]:
        return []

    def to_forget(self) -> list[str]:
        return []

    def progress(self) -> dict[str, int]:
        return {}

    def generations(self) -> dict[str, int]:
        """What became of model calls since the process began; none elsewhere than at a policy model."""
        return {}
