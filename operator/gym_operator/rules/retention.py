"""Which finished GymCheckpoints may go: those that a schedule does not keep any more, and those whose time is over.

Whatever the limits say, some stay: what a stack would continue from, and what something is being restored from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gym_operator.api.schedule import Keep
from gym_operator.rules.cell_record import from_document
from gym_operator.rules.checkpoint_entries import Entry, Part
from gym_servers.coordination.record import Stage
from gym_servers.stack.durations import parse_age


@dataclass(frozen=True)
class Needs:
    """What a stack cannot do without: `uid` is its own, `restoring` is what it is being restored from, `last` what it
    would continue from as its status says, or was told to continue from; `refused` are checkpoints that its servers
    did not take."""

    uid: str
    restoring: frozenset[str] = frozenset()
    last: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()


def needs_of(stack: Mapping[str, Any]) -> Needs:
    """What the stack needs, by its status. Raises ValueError for a record that this version cannot read: nothing is
    known then."""
    status = stack.get("status") or {}
    cells = status.get("cells") or ()
    newest = [each.get("lastCheckpoint") or {} for each in (status, *cells)]
    restoring, chosen, refused = set(), set(), set()
    for cell in cells:
        record = from_document(cell.get("record"))
        if record is None:
            continue
        refused |= set(record.refused)
        if record.restore is not None and record.stage is not Stage.RUNNING:
            restoring.add(record.restore.uri)
        if record.chosen is not None:
            chosen.add(record.chosen.choice.uri)  # a death before its next checkpoint leads back to it
    return Needs(
        stack["metadata"]["uid"],
        restoring=frozenset(restoring),
        last=frozenset(chosen | {each["uri"] for each in newest if each.get("uri")}),
        refused=frozenset(refused),
    )


def surplus(entries: Iterable[Entry], keep: Keep, now: float) -> list[Entry]:
    """The finished checkpoints of one schedule that it does not keep: beyond the newest ones of a stack, or too old.

    Each stack counts by itself: a schedule that is turned to another one goes on to keep what it took before.
    """
    of_stack: defaultdict[str, list[Entry]] = defaultdict(list)
    for each in entries:
        if each.final and not each.deleting:
            of_stack[each.stack].append(each)
    return [gone for taken in of_stack.values() for gone in _surplus_of(taken, keep, now)]


def _surplus_of(entries: Iterable[Entry], keep: Keep, now: float) -> list[Entry]:
    newest_first = sorted(entries, key=_age_order, reverse=True)
    good = [each for each in newest_first if each.phase == "Succeeded"]
    bad = [each for each in newest_first if each.phase == "Failed"]
    gone = [*good[keep.last :], *bad[keep.failed :]]
    kept = [*good[: keep.last], *bad[: keep.failed]]
    if keep.max_age is not None:
        gone += [each for each in kept if _older(each, parse_age(keep.max_age), now)]
    return gone


def expired(entries: Iterable[Entry], now: float) -> list[Entry]:
    """The finished checkpoints whose own `ttl` is over."""
    return [
        each
        for each in entries
        if each.final and not each.deleting and each.ttl is not None and _older(each, each.ttl, now)
    ]


@dataclass(frozen=True)
class Held:
    """What restores work from, or are about to: URIs, and GymCheckpoints by namespace and name."""

    uris: Collection[str] = ()
    names: Collection[tuple[str, str]] = ()

    def has(self, entry: Entry) -> bool:
        return (entry.namespace, entry.name) in self.names or any(part.uri in self.uris for part in entry.parts)


def expendable(candidates: Sequence[Entry], entries: Iterable[Entry], needs: Needs | None, held: Held) -> list[Entry]:
    """Those of the candidates, all of one stack, that nothing needs. `entries` are all that refer to the stack by
    name; `needs` is None where there is no stack."""
    uris: set[str] = set()
    if needs is not None:
        uris |= needs.restoring | needs.last | {part.uri for part in newest_good(entries, needs)}
    return [each for each in candidates if not held.has(each) and not uris & {part.uri for part in each.parts}]


def newest_good(entries: Iterable[Entry], needs: Needs) -> list[Part]:
    """For each cell the newest published part that its servers have not refused: the last thing to lose."""
    newest: dict[int, Part] = {}
    for entry in entries:
        if not entry.final or entry.stack_uid != needs.uid:
            continue
        for part in entry.parts:
            known, usable = newest.get(part.cell), part.published and part.uri not in needs.refused
            if usable and (known is None or part.order > known.order):
                newest[part.cell] = part
    return list(newest.values())


def _age_order(entry: Entry) -> tuple[float, tuple[tuple[int, int], ...], str]:
    return entry.ended or 0.0, tuple(part.order for part in entry.parts), entry.name


def _older(entry: Entry, seconds: int, now: float) -> bool:
    return entry.ended is not None and now - entry.ended >= seconds
