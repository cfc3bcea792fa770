"""What a GymStack.spec may say, and what the refusals tell the user to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from gym_operator.structural import structural_schema
from gym_servers.stack.durations import parse_age, parse_duration, parse_duration_or_zero
from gym_servers.stack.render import s3_settings
from gym_servers.stack.spec import SpecError, StackSpec, check_stack_name, parse_spec

Change = Callable[[dict[str, Any]], object]


def test_defaults_are_filled_in(spec_document: dict[str, Any]) -> None:
    spec = parse_spec(spec_document)
    assert spec.cells == 1
    assert spec.checkpoints.enabled
    assert (spec.checkpoints.prepare_timeout, spec.checkpoints.commit_timeout) == ("60s", "120s")
    assert spec.checkpoints.cell_order == "OneByOne"
    assert spec.checkpoints.restart_blockers_after == 3
    assert (spec.recovery.policy, spec.recovery.backoff_limit) == ("Restore", 5)
    assert spec.collection is not None
    assert (spec.collection.repeats, spec.collection.concurrency, spec.collection.max_failures) == (1, 64, 3)


def test_collection_takes_part_under_its_reserved_name(spec_document: dict[str, Any]) -> None:
    participants = parse_spec(spec_document).participants()
    assert [(p.name, p.kind) for p in participants][-1] == ("collection", "collection")
    assert len(participants) == 5


def test_checkpoints_can_be_off_without_a_place(spec_document: dict[str, Any]) -> None:
    del spec_document["collection"]
    spec_document["checkpoints"] = {"enabled": False}
    assert parse_spec(spec_document).s3 is None


def test_the_local_runner_needs_no_image_and_no_bucket(spec_document: dict[str, Any]) -> None:
    del spec_document["image"]
    spec_document["checkpoints"]["storage"] = {"directory": "/tmp/checkpoints"}
    spec_document["collection"] = {"tasks": "tasks.jsonl", "output": "rows"}
    assert parse_spec(spec_document).s3 is None


def test_on_and_off_are_what_they_say_in_yaml(spec_document: dict[str, Any]) -> None:
    for text, floor in (("on", True), ("off", False)):
        spec_document["access"] = yaml.safe_load(f"attemptFloor: {text}")
        assert parse_spec(spec_document).access.attempt_floor is floor
    del spec_document["access"]
    assert parse_spec(spec_document).access.attempt_floor
    assert parse_spec(spec_document).access.driver_selector is None


REFUSALS: list[tuple[Change, str]] = [
    (lambda s: s.update(cells=0), "greater than or equal to 1"),
    (lambda s: s.update(cells=65), "less than or equal to 64"),
    (lambda s: s["checkpoints"].update(cellOrder="Random"), "'OneByOne' or 'Together'"),
    (lambda s: s["servers"].pop(0), "exactly one server of kind environment"),
    (lambda s: s["servers"].pop(1), "exactly one server of kind model"),
    (lambda s: s["servers"].pop(2), "exactly one server of kind agent"),
    (lambda s: s["servers"].pop(3), "at least one server of kind resources"),
    (
        lambda s: s["servers"].append({"name": "b", "kind": "agent", "server": "simple-agent"}),
        "exactly one server of kind agent",
    ),
    (
        lambda s: s["servers"].append({"name": "counter", "kind": "resources", "server": "counter"}),
        "two servers are named counter",
    ),
    (lambda s: s["servers"][3].update(name="collection"), "belongs to the driver"),
    (lambda s: s["servers"][3].update(name="counter-0"), "cannot end in a dash and a number"),
    (lambda s: s["servers"][3].update(name="0counter"), "beginning with a letter"),
    (lambda s: s["servers"][3].update(name="c" * 31), "at most 30 characters"),
    (lambda s: s["servers"][3].update(server="a b"), "package.module:Class"),
    (lambda s: s["servers"][3].update(replicas=2), "Extra inputs are not permitted"),
    (lambda s: s.update(image_pull_policy="Always"), "Extra inputs are not permitted"),
    (lambda s: s.pop("checkpoints"), "checkpoints: Field required"),
    (lambda s: s["checkpoints"].pop("storage"), "checkpoints need a place"),
    (lambda s: s["checkpoints"]["storage"].update(directory="/x"), "exactly one of s3 and directory"),
    (lambda s: s["checkpoints"]["storage"]["s3"].update(bucket="b/prefix"), "goes into prefix"),
    (lambda s: s["checkpoints"]["storage"]["s3"].update(prefix="/a"), "none at the ends"),
    (lambda s: s["checkpoints"]["storage"]["s3"].update(endpoint="minio:9000"), "http:// or https://"),
    (lambda s: s["checkpoints"]["storage"]["s3"].update(caSecret="ca"), "begins with https://"),
    (
        lambda s: s["checkpoints"]["storage"]["s3"].update(caSecret="ca", endpoint="http://minio:9000"),
        "caSecret is for an endpoint of your own",
    ),
    (
        lambda s: s["checkpoints"]["storage"]["s3"].update(encryption={"type": "SSE-S3", "kmsKeyID": "k"}),
        "set type to SSE-KMS, or leave kmsKeyID out",
    ),
    (
        lambda s: s["checkpoints"]["storage"]["s3"].update(encryption={"type": "AES"}),
        "Input should be 'SSE-S3' or 'SSE-KMS'",
    ),
    (lambda s: s["checkpoints"].update(prepareTimeout="60"), "a whole number and a unit"),
    (lambda s: s["checkpoints"].update(commitTimeout="25h"), "at most 24h"),
    (lambda s: s["checkpoints"].update(restartBlockersAfter=-1), "greater than or equal to 0"),
    (lambda s: s["collection"].update(tasks="http://x/y"), "write s3://bucket/key, or a path"),
    (lambda s: s["collection"].update(concurrency=0), "greater than or equal to 1"),
    (lambda s: s.update(checkpoints={"enabled": False}), "need checkpoints.storage.s3"),
    (lambda s: s.update(access={"driverSelector": {}}), "matchLabels: Field required"),
    (lambda s: s.update(access={"driverSelector": {"matchLabels": {}}}), "at least 1 item"),
    (lambda s: s.update(access={"driverSelector": {"matchLabels": {"a/b/c": "x"}}}), "such as example.com/app"),
    (lambda s: s.update(access={"driverSelector": {"matchLabels": {"-a": "x"}}}), "such as example.com/app"),
    (lambda s: s.update(access={"driverSelector": {"matchLabels": {"app": "a b"}}}), "letter or digit at both ends"),
    (lambda s: s.update(access={"attemptFloor": "maybe"}), "valid boolean"),
]


@pytest.mark.parametrize(("change", "says"), REFUSALS, ids=[says for _, says in REFUSALS])
def test_refusals_say_what_to_write(spec_document: dict[str, Any], change: Change, says: str) -> None:
    change(spec_document)
    with pytest.raises(SpecError, match=says.replace("(", r"\(")):
        parse_spec(spec_document)


@pytest.mark.parametrize(
    "bucket", ["bucket/", "bucket/team/run", "/bucket", "s3://bucket", "Bucket/x", "bucket/" + "run/" * 100]
)
def test_s5_a_bucket_with_a_slash_is_refused_with_the_fix(spec_document: dict[str, Any], bucket: str) -> None:
    spec_document["checkpoints"]["storage"]["s3"]["bucket"] = bucket
    with pytest.raises(SpecError, match="write the bucket's name alone; what follows it goes into prefix"):
        parse_spec(spec_document)
    crd = structural_schema(StackSpec)["properties"]["checkpoints"]["properties"]["storage"]["properties"]["s3"]
    field = crd["properties"]["bucket"]
    assert len(bucket) <= field["maxLength"], "a text that is too long is refused before any rule can say why"
    rule = field["x-kubernetes-validations"][0]
    assert rule["message"] == "write the bucket's name alone; what follows it goes into prefix"
    (pattern,) = re.findall(r"^self\.matches\(r'(.*)'\)$", rule["rule"])
    assert not re.search(pattern, bucket) and re.search(pattern, "bucket")


@pytest.mark.parametrize("region", ["eu-west-1", "us-gov-east-1", "auto", "RegionOne", "GRA", "nl-ams", "1"])
def test_s3_a_region_is_called_as_its_server_calls_it(spec_document: dict[str, Any], region: str) -> None:
    spec_document["checkpoints"]["storage"]["s3"]["region"] = region
    spec = parse_spec(spec_document).s3
    assert spec is not None and s3_settings(spec).region == region


@pytest.mark.parametrize("region", ["", "eu west", "eu_west", "-eu", "eu-", "eu.west"])
def test_s3_what_no_request_can_be_signed_for_is_refused(spec_document: dict[str, Any], region: str) -> None:
    spec_document["checkpoints"]["storage"]["s3"]["region"] = region
    with pytest.raises(SpecError, match="write a region's name, such as eu-west-1 or RegionOne"):
        parse_spec(spec_document)


def test_a_bucket_s_name_has_a_length(spec_document: dict[str, Any]) -> None:
    spec_document["checkpoints"]["storage"]["s3"]["bucket"] = "b" * 63
    assert parse_spec(spec_document).s3
    spec_document["checkpoints"]["storage"]["s3"]["bucket"] = "b" * 64
    with pytest.raises(SpecError, match="a bucket's name has at most 63 characters"):
        parse_spec(spec_document)


def test_encryption_and_authorities_reach_the_settings(spec_document: dict[str, Any]) -> None:
    encryption = {"type": "SSE-KMS", "kmsKeyID": "alias/gym"}
    s3 = {"endpoint": "https://minio:9000", "caSecret": "ca", "encryption": encryption}
    spec_document["checkpoints"]["storage"]["s3"].update(s3)
    spec = parse_spec(spec_document).s3
    assert spec is not None and spec.document()["encryption"] == encryption
    settings = s3_settings(spec).encryption
    assert settings is not None and (settings.type, settings.kms_key_id) == ("SSE-KMS", "alias/gym")


def test_a_refusal_never_repeats_the_value(spec_document: dict[str, Any]) -> None:
    spec_document["checkpoints"]["storage"]["s3"]["endpoint"] = "user:hunter2@host"
    with pytest.raises(SpecError) as refusal:
        parse_spec(spec_document)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "fits"), [("a" * 41, True), ("a" * 42, False), ("1a", False), ("a.b", False), ("a-", False)]
)
def test_a_stack_name_must_leave_room_for_its_servers(spec_document: dict[str, Any], name: str, fits: bool) -> None:
    spec = parse_spec(spec_document)  # its longest server is `collection`: 41 + 1 + 10 = 52
    if fits:
        check_stack_name(name, spec)
    else:
        with pytest.raises(SpecError):
            check_stack_name(name, spec)


@pytest.mark.parametrize(("text", "seconds"), [("1s", 1), ("90s", 90), ("2m", 120), ("24h", 86400)])
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "1", "1m30s", "1.5h", "-1s", "1s\n", "25h"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|whole number"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "seconds"), [("0s", 0), ("0h", 0), ("1s", 1), ("24h", 86400)])
def test_durations_or_none(text: str, seconds: int) -> None:
    assert parse_duration_or_zero(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "00s", "-1s", "1m30s", "0s\n", "25h"])
def test_neither_a_duration_nor_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"a duration is at most|or 0s for none"):
        parse_duration_or_zero(text)


def test_cells_have_some_minutes_to_drain_unless_somebody_says_otherwise(spec_document: dict[str, Any]) -> None:
    assert parse_spec(spec_document).scale_down.drain_timeout == "5m"
    assert parse_spec({**spec_document, "scaleDown": {"drainTimeout": "0s"}}).scale_down.drain_timeout == "0s"
    with pytest.raises(SpecError, match=r"scaleDown.drainTimeout: .*0s for none"):
        parse_spec({**spec_document, "scaleDown": {"drainTimeout": "5"}})


@pytest.mark.parametrize(("text", "seconds"), [("1s", 1), ("90m", 5400), ("12h", 43_200), ("9999d", 863_913_600)])
def test_ages(text: str, seconds: int) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "0d", "7", "1d12h", "1w", "10000d", "1d\n"])
def test_no_ages(text: str) -> None:
    with pytest.raises(ValueError, match="at most four digits"):
        parse_age(text)
