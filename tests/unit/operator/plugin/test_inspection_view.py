"""What is shown of the inside of a checkpoint, and of a check of it."""

from __future__ import annotations

import re
from typing import Any

from gym_operator.plugin.views import inspection, verification
from gym_operator.plugin.views.inspection import Part
from gym_operator.plugin.views.table import rendered
from gym_operator.plugin.views.verification import Checked
from gym_servers.storage.manifest import CodeIdentity, Manifest, Member, Publication, RecordEntry

NOW = 1_800_000_000.0
CODE = CodeIdentity(image="gym:1", server="simple-agent", config_digest="c", record_format=2)


def record(id: str, length: int) -> RecordEntry:
    return RecordEntry(id=id, pack="p", offset=0, length=length, sha256="s")


def manifest(kind: str, *records: RecordEntry) -> Manifest:
    return Manifest(
        checkpoint_id="one-1",
        kind=kind,
        instance=kind,
        session="s",
        code=CODE,
        episodes=[],
        packs=[],
        records=list(records),
    )


def part(**changes: Any) -> Part:
    member = Member(
        kind="agent", instance="agent", session="s", manifest_digest="m", records=3, bytes=2048, code=CODE
    )
    whole: dict[str, Any] = {
        "state": "published",
        "checkpoint_id": "one-1",
        "name": "one",
        "stack_uid": "uid",
        "cell": 1,
        "cell_attempt": 2,
        "sequence": 1,
        "created": NOW - 60,
        "members": [member],
        "episodes": ["7-0-a2", "3-0"],
        **changes,
    }
    manifests = [
        manifest("environment", record("7-0-a2", 100), record("3-0", 50)),
        manifest("model", record("7-0-a2", 4096)),
        manifest("agent", record("3-0", 999)),
    ]
    stages = {"7-0-a2": "verify", "3-0": "invoke_agent"}
    return Part("s3://b/one", "d" * 64, Publication(**whole), {each.kind: each for each in manifests}, stages)


def lines(part: Part, *, wide: bool = False) -> list[list[str]]:
    text = rendered(inspection.tables_of(inspection.document_of("one", [part]), NOW, wide=wide))
    return [re.split(" {3,}", line) for line in text.splitlines()]


def test_a_page_has_place_participants_and_episodes_with_their_stages_and_sizes() -> None:
    told = lines(part(labels={"step": "7"}))
    assert ["s3://b/one", "d" * 64] in told
    assert ["one", "1", "2", "60s", "2", "0", "2.0 KiB", "step=7"] in told
    assert ["agent", "agent", "simple-agent", "3", "2.0 KiB"] in told
    assert told[-2:] == [["3-0", "invoke_agent", "50 B", "0 B"], ["7-0-a2", "verify", "100 B", "4.0 KiB"]]
    assert ["agent", "agent", "simple-agent", "3", "2.0 KiB", "2", "gym:1"] in lines(part(), wide=True)


def test_what_starts_over_is_named_with_the_reason() -> None:
    told = lines(part(restarts=["1-0"], not_started=["2-0"], left_out=["4-0"]))
    assert told[-3:] == [["1-0", "cannot be continued"], ["2-0", "had not begun"], ["4-0", "left out"]]


def test_an_empty_checkpoint_has_no_table_of_episodes() -> None:
    assert not [line for line in lines(part(episodes=[])) if line[0] == "EPISODE"]


def checked(participant: str, problem: str = "") -> Checked:
    return Checked("s3://b/one", 0, participant, 3, 2048, problem)


def test_a_check_says_of_each_participant_what_came_of_it() -> None:
    document = verification.document_of("one", {"s3://b/one": "d"}, [checked("env"), checked("agent", "it is torn")])
    text = rendered(verification.tables_of(document, wide=False))
    told = [re.split(" {3,}", line) for line in text.splitlines()]
    assert told[1] == ["s3://b/one", "d"]
    assert told[-2:] == [["0", "env", "3", "2.0 KiB", "good"], ["0", "agent", "3", "2.0 KiB", "it is torn"]]
    assert document["verified"] is False
    assert verification.failure_of(document).startswith("one does not verify: agent of cell 0: it is torn; it cannot")


def test_the_failure_counts_the_others() -> None:
    bad = [checked("env", "gone"), checked("agent", "torn"), checked("policy", "torn")]
    failure = verification.failure_of(verification.document_of("one", {}, bad))
    assert "env of cell 0: gone, and 2 more participants;" in failure
    assert verification.failure_of(verification.document_of("one", {}, [checked("env")])) == ""
