"""Which finished checkpoints may go, and which never do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_operator.api import names
from gym_operator.api.schedule import Keep
from gym_operator.rules import retention as rules
from gym_operator.rules.cell_record import to_document
from gym_operator.rules.checkpoint_entries import Entry, Part, entry_of
from gym_servers.coordination.record import CellRecord, Choice, Chosen, Stage
from gym_servers.storage.cells import order_of

NOW = 1_800_000_000.0
STACK = "stack-uid"
NEEDS = rules.Needs(STACK)
NONE = rules.Held()


def entry(number: int, phase: str = "Succeeded", age: float = 0.0, **changes: Any) -> Entry:
    """The number-th checkpoint of the stack's first cell; `age` is in seconds since its end."""
    uri = f"s3://b/{STACK}/cell-0/checkpoints/000000-{number:06d}-c{number}"
    made = Entry(
        namespace="team",
        name=f"c{number}",
        uid=f"uid-{number}",
        version=number,
        stack="demo",
        stack_uid=STACK,
        schedule_uid="schedule-uid",
        phase=phase,
        ended=NOW - age,
        parts=(Part(0, uri, (0, number), phase == "Succeeded"),),
        ttl=None,
        deleting=False,
    )
    return replace(made, **changes)


def uids(entries: Any) -> set[str]:
    return {each.uid for each in entries}


def test_an_entry_says_what_counts_of_a_checkpoint() -> None:
    body = {
        "metadata": {
            "namespace": "team",
            "name": "one",
            "uid": "u",
            "resourceVersion": "17",
            "labels": {names.SCHEDULE_UID_LABEL: "s"},
            "deletionTimestamp": "2027-01-15T08:00:00Z",
        },
        "spec": {"stackRef": {"name": "demo"}, "ttl": "2d"},
        "status": {
            "phase": "Succeeded",
            "stackUID": STACK,
            "completionTime": "2027-01-15T08:00:00Z",
            "cells": [
                {"index": 0, "uri": "s3://b/x/checkpoints/000002-000007-one-u", "phase": "Succeeded"},
                {"index": 1},
            ],
        },
    }
    found = entry_of(body)
    assert (found.version, found.stack, found.schedule_uid, found.stack_uid) == (17, "demo", "s", STACK)
    assert (found.ended, found.ttl, found.final, found.deleting) == (NOW, 172_800, True, True)
    assert found.parts == (Part(0, "s3://b/x/checkpoints/000002-000007-one-u", (2, 7), True),)


@pytest.mark.parametrize("body", [{}, {"spec": None, "status": {}}, {"spec": {"ttl": "soon", "stackRef": None}}])
def test_an_entry_can_be_made_of_anything(body: dict[str, Any]) -> None:
    found = entry_of({"metadata": {"namespace": "team", "name": "one", "uid": "u"}, **body})
    assert (found.phase, found.ended, found.ttl, found.over) == ("Pending", None, None, False)


@pytest.mark.parametrize(
    ("uri", "order"),
    [
        ("s3://b/u/cell-0/checkpoints/000012-000003-name-1234", (12, 3)),
        ("/checkpoints/000012-000003-7-1234/", (12, 3)),
        ("s3://b/copied/by-hand", (0, 0)),
        ("s3://b", (0, 0)),
    ],
)
def test_a_place_says_its_order(uri: str, order: tuple[int, int]) -> None:
    assert order_of(uri) == order


def test_the_newest_ones_are_kept() -> None:
    good = [entry(n, age=100.0 - n) for n in range(6)]
    bad = [entry(n, "Failed", age=100.0 - n) for n in range(10, 15)]
    assert uids(rules.surplus([*good, *bad], Keep(last=2, failed=1), NOW)) == {
        *(f"uid-{n}" for n in range(4)),
        *(f"uid-{n}" for n in range(10, 14)),
    }
    assert rules.surplus([*good, *bad], Keep(), NOW) == [entry(11, "Failed", age=89.0), entry(10, "Failed", age=90.0)]


def test_k7_a_schedule_that_is_turned_to_another_stack_keeps_what_it_took_before() -> None:
    before = [entry(n, age=100.0 - n) for n in range(4)]
    since = [entry(n, age=100.0 - n, stack="another") for n in range(4, 9)]
    failed = [entry(n, "Failed", age=100.0 - n, stack="another") for n in range(10, 13)]
    keep = Keep(last=3, failed=1)
    assert uids(rules.surplus([*failed, *since, *before], keep, NOW)) == {
        "uid-0",
        *(f"uid-{n}" for n in (4, 5)),
        *(f"uid-{n}" for n in (10, 11)),
    }


def test_those_that_are_too_old_go() -> None:
    found = [entry(1, age=7200), entry(2, age=3599), entry(3, "Failed", age=3600)]
    assert uids(rules.surplus(found, Keep(max_age="1h"), NOW)) == {"uid-1", "uid-3"}
    assert rules.surplus(found, Keep(), NOW) == []


def test_k4_what_is_not_final_or_already_goes_is_left_alone() -> None:
    for phase in ("Pending", "Preparing", "Committing", "Publishing", "Deleting"):
        old = entry(1, phase, age=1e9, ttl=1)
        assert rules.expired([old], NOW) == rules.surplus([old], Keep(max_age="1s"), NOW) == []
    going = entry(1, age=1e9, ttl=1, deleting=True)
    assert rules.expired([going], NOW) == rules.surplus([going], Keep(max_age="1s"), NOW) == []


def test_a_ttl_counts_from_the_end() -> None:
    assert rules.expired([entry(1, age=59, ttl=60), entry(2, age=1e9)], NOW) == []
    assert uids(rules.expired([entry(1, age=60, ttl=60), entry(2, "Failed", age=61, ttl=60)], NOW)) == {
        "uid-1",
        "uid-2",
    }


def test_k4_the_newest_good_one_of_each_cell_stays() -> None:
    second = Part(1, "s3://b/cell-1", (0, 1), True)
    both = entry(1, parts=(*entry(1).parts, second))
    newer = entry(2)
    failed = entry(3, "Failed")
    everything = [both, newer, failed]
    assert uids(rules.expendable(everything, everything, NEEDS, NONE)) == {"uid-3"}
    alone = [entry(1), newer, failed]
    assert uids(rules.expendable(alone, alone, NEEDS, NONE)) == {"uid-1", "uid-3"}


def test_k4_a_checkpoint_that_the_servers_refused_is_not_the_last_good_one() -> None:
    found = [entry(1), entry(2)]
    needs = replace(NEEDS, refused=frozenset(part.uri for part in found[1].parts))
    assert uids(rules.expendable(found, found, needs, NONE)) == {"uid-2"}


def test_k4_what_something_is_restored_from_stays() -> None:
    found = [entry(n) for n in (1, 2, 3, 4)]
    uris = [each.parts[0].uri for each in found]
    needs = replace(NEEDS, restoring=frozenset({uris[0]}))
    held = rules.Held(uris={uris[1]})
    assert uids(rules.expendable(found, found, needs, held)) == {"uid-3"}
    named = rules.Held(names={("team", "c3"), ("other", "c2")})
    assert uids(rules.expendable(found, found, needs, named)) == {"uid-2"}


def test_k18_the_checkpoints_of_a_stack_that_is_gone_can_go() -> None:
    found = [entry(1), entry(2)]
    assert uids(rules.expendable(found, found, None, NONE)) == {"uid-1", "uid-2"}
    made_again = replace(NEEDS, uid="another")
    assert uids(rules.expendable(found, found, made_again, NONE)) == {"uid-1", "uid-2"}


def test_k4_a_part_that_is_published_stays_although_the_whole_failed() -> None:
    """Another cell's part was lost: what this cell would continue from is this all the same."""
    lost = entry(
        2, "Failed", parts=(replace(entry(2).parts[0], published=True), Part(1, "s3://b/cell-1", (0, 2), False))
    )
    found = [entry(1), lost]
    assert uids(rules.expendable(found, found, NEEDS, NONE)) == {"uid-1"}


def choice(uri: str) -> Choice:
    return Choice(uri=uri, digest="d", checkpoint_id="c", name="n")


def stack(record: CellRecord | None, last: str | None = None) -> dict[str, Any]:
    cells = [{"index": 0, "record": to_document(record)}] if record else []
    status: dict[str, Any] = {"cells": cells}
    if last:
        status["lastCheckpoint"] = {"uri": last}
    return {"metadata": {"uid": STACK}, "status": status}


def test_k4_a_stack_needs_what_it_is_being_restored_from() -> None:
    for stage in (Stage.REPLACING, Stage.STARTING, Stage.STALLED):
        record = CellRecord(stage=stage, restore=choice("s3://b/old"), refused=["s3://b/bad"])
        assert rules.needs_of(stack(record, "s3://b/new")) == rules.Needs(
            STACK,
            restoring=frozenset({"s3://b/old"}),
            last=frozenset({"s3://b/new"}),
            refused=frozenset({"s3://b/bad"}),
        )
    running = CellRecord(stage=Stage.RUNNING, restore=choice("s3://b/old"))
    assert rules.needs_of(stack(running)) == NEEDS
    chosen = Chosen(choice=choice("s3://b/old"), by="grst-uid", attempt=1)
    led_back = CellRecord(stage=Stage.RUNNING, chosen=chosen)
    assert rules.needs_of(stack(led_back)) == replace(NEEDS, last=frozenset({"s3://b/old"}))
    assert rules.needs_of(stack(None)) == rules.needs_of({"metadata": {"uid": STACK}}) == NEEDS


def test_k4_where_a_record_cannot_be_read_nothing_is_known() -> None:
    body = stack(None)
    body["status"]["cells"] = [{"index": 0, "record": {"stage": "of a newer operator"}}]
    with pytest.raises(ValueError, match="not of a form"):
        rules.needs_of(body)


ENTRIES = st.lists(
    st.builds(
        entry,
        st.integers(0, 20),
        st.sampled_from(["Succeeded", "Succeeded", "Failed", "Pending", "Publishing", "Deleting"]),
        st.floats(0, 1e6),
        ttl=st.none() | st.integers(1, 10**6),
        deleting=st.booleans(),
        stack_uid=st.sampled_from([STACK, STACK, "older"]),
    ),
    max_size=15,
    unique_by=lambda each: each.uid,
)
KEEPS = st.builds(
    Keep, last=st.integers(1, 5), failed=st.integers(0, 3), max_age=st.none() | st.sampled_from(["1s", "1h", "5d"])
)


@given(entries=ENTRIES, keep=KEEPS, refused=st.sets(st.integers(0, 20)), held=st.sets(st.integers(0, 20)))
def test_k4_whatever_the_limits_the_last_good_the_active_and_the_held_stay(
    entries: list[Entry], keep: Keep, refused: set[int], held: set[int]
) -> None:
    def uris(numbers: set[int]) -> frozenset[str]:
        return frozenset(part.uri for number in numbers for part in entry(number).parts)

    needs = replace(NEEDS, refused=uris(refused))
    candidates = [*rules.surplus(entries, keep, NOW), *rules.expired(entries, NOW)]
    holds = rules.Held(uris=uris(held))
    gone = uids(rules.expendable(candidates, entries, needs, holds))
    left = [each for each in entries if each.uid not in gone]
    usable = [
        e for e in entries if e.phase == "Succeeded" and e.stack_uid == STACK and e.parts[0].uri not in needs.refused
    ]
    if usable:
        assert max(usable, key=lambda each: each.parts[0].order) in left
    assert all(each in left for each in entries if each.deleting or not each.final)
    assert all(each in left for each in entries if each.parts[0].uri in uris(held))
    # What is kept by nothing else obeys the limits, and a second look finds nothing more.
    kept = [each for each in left if each.final and not each.deleting]
    assert len([e for e in kept if e.phase == "Failed" and e.parts[0].uri not in uris(held)]) <= keep.failed
    again = [*rules.surplus(left, keep, NOW), *rules.expired(left, NOW)]
    assert not uids(rules.expendable(again, left, needs, holds))
