"""Which records the processes of a cell can take, by what they and the records say of their code."""

from __future__ import annotations

from typing import Any

import pytest

from gym_servers.coordination.code import code_mismatch
from gym_servers.protocol.messages import Code, Report, Status
from gym_servers.storage.manifest import CodeIdentity, Member, Publication

KINDS = {"env": "environment", "agent": "agent", "collection": "collection"}


def written(**changes: Any) -> Publication:
    """By three processes; a change is to one's code, or None where it is not among them."""
    code = {"image": "gym:1", "server": "a", "config_digest": "c", "record_format": 1}
    kinds = {**KINDS, **{name: "resources" for name in changes if name not in KINDS}}
    members = [
        Member(
            kind=kind,
            instance=name,
            session="s",
            manifest_digest="d",
            records=0,
            bytes=0,
            code=CodeIdentity(**{**code, **(changes.get(name) or {})}),
        )
        for name, kind in kinds.items()
        if changes.get(name, {}) is not None
    ]
    return Publication(
        state="published",
        checkpoint_id="cp",
        name="cp",
        stack_uid="u",
        cell=0,
        cell_attempt=0,
        sequence=1,
        created=0.0,
        members=members,
    )


def said(**code: Any) -> dict[str, Status]:
    known = Code(**{"image": "gym:2", "server": "a", "record_format": 1, **code})
    return {
        name: Status(
            kind=kind,
            instance=name,
            session="s",
            phase="starting",
            cell_attempt=0,
            report=Report(ready=True),
            code=known,
        )
        for name, kind in KINDS.items()
    }


@pytest.mark.parametrize("changes", [{}, {"agent": {"image": "other"}}, {"env": {"config_digest": "other"}}])
def test_another_image_and_other_settings_are_what_continuing_is_for(changes: Any) -> None:
    assert code_mismatch(written(**changes), KINDS, said()) == ""


def test_a_newer_reader_takes_older_records_and_an_older_one_no_newer() -> None:
    assert code_mismatch(written(agent={"record_format": 1}), KINDS, said(record_format=2)) == ""
    wrong = code_mismatch(written(agent={"record_format": 2}), KINDS, said())
    assert wrong == "agent reads records up to format 1, and its records are of format 2 of image gym:1"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"agent": {"server": "b", "image": ""}}, "agent is a, and its records are of b"),
        ({"env": None}, "it has no records of env"),
        ({"tools": {}}, "there is no server for its records of tools"),
    ],
)
def test_what_nobody_can_take_is_named(changes: Any, wrong: str) -> None:
    assert code_mismatch(written(**changes), KINDS, said()) == wrong


def test_the_records_of_a_driver_may_be_left() -> None:
    others = {name: kind for name, kind in KINDS.items() if name != "collection"}
    assert code_mismatch(written(), others, said()) == ""


def test_a_process_that_does_not_say_what_it_reads_is_asked_by_the_restore() -> None:
    silent = {name: status.model_copy(update={"code": None}) for name, status in said().items()}
    assert code_mismatch(written(agent={"server": "b"}), KINDS, silent) == ""
    assert code_mismatch(written(agent={"server": "b"}), KINDS, {}) == ""
