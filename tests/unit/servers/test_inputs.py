"""What people hand in - settings, secrets, tasks, manifests - and what they are told when it cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rig.manifests import STACK
from gym_servers.collection.tasks import load_tasks, parse_tasks, rollouts
from gym_servers.coordination.cell_host import CellSettings
from gym_servers.coordination.client import ParticipantClient
from gym_servers.local.stack import local_stack, read_manifest
from gym_servers.participants.collection import TasksError
from gym_servers.registry import check_server, load_class
from gym_servers.stack.durations import parse_duration
from gym_servers.stack.settings import S3Settings, ServerSettings, SettingsError, load_settings, read_secret
from gym_servers.stack.spec import SpecError
from gym_servers.storage.s3 import S3Credentials
from gym_servers.storage.store import StorageError

ROW = {"responses_create_params": {"input": "x"}, "expected_count": 1}
SETTINGS = {
    "stack": {"namespace": "n", "name": "s", "uid": "u"},
    "name": "env",
    "kind": "environment",
    "server": "single-agent-turn",
}


# ---- tasks ------------------------------------------------------------------------------------------------


@given(st.integers(0, 8), st.sampled_from(["{", "[]", "3", "{}", '{"responses_create_params": 3}', "nul", "\x00"]))
def test_the_first_wrong_line_is_named_by_its_number(before: int, wrong: str) -> None:
    text = (json.dumps(ROW) + "\n\n") * before + wrong + "\n" + json.dumps(ROW) + "\nalso wrong"
    with pytest.raises(TasksError, match=rf"^tasks\.jsonl line {2 * before + 1} "):
        parse_tasks(text.encode(), "tasks.jsonl")


def test_blank_lines_are_skipped_and_none_at_all_is_an_error() -> None:
    assert parse_tasks(b"\n" + json.dumps(ROW).encode() + b"\n  \n", "t") == [ROW]
    with pytest.raises(TasksError, match="t has no rows"):
        parse_tasks(b"\n \n", "t")


def test_bytes_that_are_no_text_are_named_too() -> None:
    with pytest.raises(TasksError, match="line 2 is not JSON"):
        parse_tasks(json.dumps(ROW).encode() + b"\n\xff\xfe\x00", "t")


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", "1e999", r'"\ud800"', r'{"\udc00": 1}', "[" * 20_000])
@pytest.mark.parametrize("where", ["expected_count", "input"])
def test_a_row_that_no_request_can_carry_is_refused_with_its_line(where: str, odd: str) -> None:
    """Sent, it would end the collection, and again after each recovery."""
    row = json.dumps({**ROW, "responses_create_params": {"input": "INPUT"}, "expected_count": "EXPECTED_COUNT"})
    text = f"{json.dumps(ROW)}\n{row.replace(json.dumps(where.upper()), odd)}\n"
    with pytest.raises(TasksError, match=r"^tasks\.jsonl line 2 is not JSON: "):
        parse_tasks(text.encode(), "tasks.jsonl")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none\.jsonl does not exist"):
        load_tasks(str(tmp_path / "none.jsonl"), None)


def test_a_relative_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(json.dumps(ROW))
    assert load_tasks("tasks.jsonl", None) == [ROW]


def test_every_row_is_repeated_under_names_of_its_own() -> None:
    made = rollouts([ROW, ROW], 3)
    assert [(r.id, r.task_index, r.repeat) for r in made] == [
        (f"{task}-{repeat}", task, repeat) for task in range(2) for repeat in range(3)
    ]


# ---- settings and secrets ---------------------------------------------------------------------------------


def test_settings_are_read_and_the_cell_is_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    peer = {"kind": "agent", "url": "http://agent-{cell}:8000"}
    path.write_text(json.dumps({**SETTINGS, "peers": {"agent": peer}, "cell": 2}))
    assert load_settings(path).peers["agent"].url == "http://agent-2:8000"
    assert load_settings(path, cell=5).peers["agent"].url == "http://agent-5:8000"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid"),
        ("a: [", "not valid"),
        ("[]", "not valid"),
        ("just text", "not valid"),
        ("", "not valid"),
        ("{}", "stack: Field required"),
        (json.dumps({**SETTINGS, "typo": 1}), "typo: Extra inputs are not permitted"),
        (json.dumps({**SETTINGS, "kind": "unknown"}), "kind: Input should be"),
        (json.dumps({**SETTINGS, "cell": -1}), "cell: "),
    ],
)
def test_settings_that_cannot_be_used_say_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"s\.json") as refused:
        load_settings(path)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_settings_file_that_is_no_text_or_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    with pytest.raises(SettingsError, match="cannot read settings"):
        load_settings(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="settings"):
        load_settings(path)


def test_a_wrong_value_is_never_repeated(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({**SETTINGS, "data_port": "SECRET-VALUE"}))
    with pytest.raises(SettingsError) as refused:
        load_settings(path)
    assert "SECRET-VALUE" not in str(refused.value)


def test_secrets_come_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("X", raising=False)
    monkeypatch.delenv("X_FILE", raising=False)
    with pytest.raises(SettingsError, match="X_FILE to a file that holds it, or X"):
        read_secret("X")
    monkeypatch.setenv("X", " value ")
    assert read_secret("X") == "value"
    (tmp_path / "secret").write_text("from-file\n")
    monkeypatch.setenv("X_FILE", str(tmp_path / "secret"))
    assert read_secret("X") == "from-file"
    monkeypatch.setenv("X_FILE", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="cannot read X_FILE"):
        read_secret("X")


# ---- secrets in what is printed ---------------------------------------------------------------------------


def test_nothing_that_holds_a_secret_shows_it(tmp_path: Path) -> None:
    import httpx

    stack = local_stack(STACK, tmp_path)
    shown = [repr(stack), str(stack)]
    secrets = [*stack.environment.values(), "t0ken", "SECRET-KEY"]
    shown.append(repr(CellSettings(stack_uid="u", cell=0, token="t0ken", root="r")))
    shown.append(repr(ParticipantClient("n", "agent", "http://x", "t0ken", httpx.AsyncClient())))
    shown.append(repr(S3Credentials("t0ken", "SECRET-KEY")))
    shown += [repr(settings) for settings in stack.settings.values()]
    for text in shown:
        assert not [secret for secret in secrets if secret in text], text


def test_settings_have_no_place_for_secrets() -> None:
    """They are written to files and ConfigMaps: secrets come by files and variables of their own."""
    for model in (ServerSettings, S3Settings):
        assert not [
            n for n in model.model_fields if any(w in n for w in ("token", "secret", "password", "access_key"))
        ]


def test_files_with_secrets_are_the_owners_alone(tmp_path: Path) -> None:
    local_stack(STACK, tmp_path)
    for name in ("control-token", "cookie-secret"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


# ---- names, durations, manifests --------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "server"), [("agent", "nope"), ("environment", "mod:Class"), ("resources", "nope")])
def test_an_unknown_server_is_answered_with_the_known_ones(kind: str, server: str) -> None:
    with pytest.raises(SettingsError, match="is not a known"):
        check_server(kind, server)


@pytest.mark.parametrize(
    "server", ["no.such:Thing", "json:nothing", "json:", ":X", "json:dumps", "..:X", "json:JSONDecoder.x"]
)
def test_a_class_that_cannot_be_loaded_is_named(server: str) -> None:
    with pytest.raises(SettingsError, match=server.replace(".", r"\.")):
        load_class(server)


@pytest.mark.parametrize("text", ["", "5", "5x", "-1s", "0s", "1.5h", "25h", "999999s", "s", " 5s", "5s\n"])
def test_a_duration_of_another_form_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"60s|24h"):
        parse_duration(text)


@pytest.mark.parametrize(
    "text", ["{", "a: [", "kind: Other", "", "- 1", "kind: GymStack\n---\nkind: GymStack", "\x00", "just text"]
)
def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"stack\.yaml"):
        read_manifest(path)


def test_a_manifest_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match=r"stack\.yaml"):
        read_manifest(tmp_path / "stack.yaml")


@pytest.mark.parametrize("change", [{"spec": None}, {"spec": 3}, {"metadata": "x"}, {"metadata": {"name": "UPPER"}}])
def test_a_manifest_of_another_form_says_what_is_wrong(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises((SpecError, SettingsError)):
        local_stack({**STACK, **change}, tmp_path)


def test_an_engine_is_not_started_here_and_it_says_where_to_name_one(tmp_path: Path) -> None:
    servers = [
        {**server, "server": "vllm", "config": {}} if server["kind"] == "model" else server
        for server in STACK["spec"]["servers"]
    ]
    spec = {**STACK["spec"], "servers": servers, "inference": {"vllm": {"image": "vllm:1", "model": "m"}}}
    with pytest.raises(SettingsError, match=r"starts no engine: leave spec\.inference out, and set config\.base_url"):
        local_stack({**STACK, "spec": spec}, tmp_path)


def test_more_than_one_cell_is_refused_here_with_what_to_write(tmp_path: Path) -> None:
    spec = {**STACK["spec"], "cells": 2}
    with pytest.raises(SettingsError, match="the local runner runs one cell, not 2: set cells: 1"):
        local_stack({**STACK, "spec": spec}, tmp_path)


def test_a_second_run_in_a_folder_keeps_its_identity_and_secrets(tmp_path: Path) -> None:
    first, second = local_stack(STACK, tmp_path), local_stack(STACK, tmp_path)
    assert (first.identity, first.environment, first.root) == (second.identity, second.environment, second.root)
