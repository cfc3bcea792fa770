"""From a spec to the settings of each process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_servers.stack.render import Ports, checkpoint_root, render_settings
from gym_servers.stack.settings import S3Settings, ServerSettings, StackIdentity, load_settings
from gym_servers.stack.spec import StorageSpec, parse_spec


def rendered(identity: StackIdentity, document: dict[str, Any], **options: Any) -> dict[str, ServerSettings]:
    settings = render_settings(identity, parse_spec(document), "http://{}".format, **options)
    return {name: ServerSettings.model_validate(value) for name, value in settings.items()}


def test_every_participant_knows_all_others_but_the_driver(
    identity: StackIdentity, spec_document: dict[str, Any]
) -> None:
    settings = rendered(identity, spec_document)
    assert set(settings) == {"env", "policy", "agent", "counter", "collection"}
    assert set(settings["env"].peers) == {"policy", "agent", "counter"}
    assert set(settings["collection"].peers) == {"env", "policy", "agent", "counter"}
    assert settings["agent"].peers["policy"].url == "http://policy"
    assert list(settings["env"].peers_of("model")) == ["policy"]


def test_what_is_written_arrives(identity: StackIdentity, spec_document: dict[str, Any]) -> None:
    spec_document["checkpoints"]["storage"]["s3"] |= {"endpoint": "http://s3:9000", "addressingStyle": "path"}
    spec_document["collection"] |= {"repeats": 3, "maxFailures": 7}
    settings = rendered(identity, spec_document, image="gym:1")
    policy, driver = settings["policy"], settings["collection"]
    assert policy.config == {"base_url": "http://llm:8000"}
    assert (policy.stack, policy.kind, policy.server, policy.image) == (identity, "model", "vllm", "gym:1")
    assert policy.checkpoint.enabled and policy.checkpoint.coordinated
    assert policy.storage.s3 is not None
    assert (policy.storage.s3.endpoint, policy.storage.s3.addressing_style) == ("http://s3:9000", "path")
    assert policy.collection is None
    assert driver.collection is not None
    assert (driver.collection.repeats, driver.collection.max_failures) == (3, 7)


def test_s3_every_server_reaches_the_bucket_as_the_spec_says(
    identity: StackIdentity, spec_document: dict[str, Any]
) -> None:
    for reach in ({"endpoint": "http://s3:9000", "region": "RegionOne", "addressingStyle": "virtual"}, {}):
        spec_document["checkpoints"]["storage"]["s3"] = {"bucket": "bkt", "prefix": "a", **reach}
        for settings in rendered(identity, spec_document).values():
            assert settings.storage.s3 == S3Settings(
                bucket="bkt",
                prefix="a",
                endpoint=reach.get("endpoint"),
                region=reach.get("region", "us-east-1"),
                addressing_style="virtual" if reach else "auto",
            )


def test_without_checkpoints_only_the_driver_knows_the_storage(
    identity: StackIdentity, spec_document: dict[str, Any]
) -> None:
    spec_document["checkpoints"]["enabled"] = False
    settings = rendered(identity, spec_document)
    assert {name for name, value in settings.items() if value.storage.s3} == {"collection"}
    assert not any(value.checkpoint.enabled for value in settings.values())


def test_a_runner_on_one_host_gives_each_process_its_ports(
    identity: StackIdentity, spec_document: dict[str, Any]
) -> None:
    settings = rendered(
        identity,
        spec_document,
        host="127.0.0.1",
        ports_of=lambda name: Ports(data=9000 + len(name), control=9100 + len(name)),
    )
    assert settings["env"].host == "127.0.0.1"
    assert (settings["env"].data_port, settings["counter"].control_port) == (9003, 9107)


def test_defaults_are_left_out_so_that_a_later_version_changes_nothing(
    identity: StackIdentity, spec_document: dict[str, Any]
) -> None:
    document = render_settings(identity, parse_spec(spec_document), "http://{}".format)["env"]
    assert "data_port" not in document
    assert "lease_grace_seconds" not in document["checkpoint"]


@pytest.mark.parametrize(
    ("written", "floor"), [({}, True), ({"attemptFloor": True}, True), ({"attemptFloor": False}, False)]
)
def test_every_process_knows_whether_the_cell_s_attempt_is_a_floor(
    identity: StackIdentity, spec_document: dict[str, Any], written: dict[str, Any], floor: bool
) -> None:
    spec_document["access"] = written
    settings = rendered(identity, spec_document)
    assert {one.checkpoint.attempt_floor for one in settings.values()} == {floor}


@pytest.mark.parametrize("cell", [0, 3])
def test_a_process_puts_its_own_cell_into_the_addresses(
    identity: StackIdentity, spec_document: dict[str, Any], tmp_path: Path, cell: int
) -> None:
    settings = render_settings(identity, parse_spec(spec_document), lambda name: f"http://{name}-{{cell}}:8000")
    file = tmp_path / "env.json"
    file.write_text(json.dumps(settings["env"]))
    loaded = load_settings(file, cell)
    assert loaded.cell == cell
    assert loaded.peers["agent"].url == f"http://agent-{cell}:8000"


@pytest.mark.parametrize(
    ("storage", "root"),
    [
        ({"s3": {"bucket": "bkt", "prefix": "a/b"}}, "s3://bkt/a/b/{uid}/cell-2"),
        ({"s3": {"bucket": "bkt"}}, "s3://bkt/{uid}/cell-2"),
        ({"directory": "/data/"}, "/data/{uid}/cell-2"),
    ],
)
def test_checkpoints_lie_below_the_uid(identity: StackIdentity, storage: dict[str, Any], root: str) -> None:
    assert checkpoint_root(StorageSpec.model_validate(storage), identity, 2) == root.format(uid=identity.uid)
