"""The CRDs in a real API server: their rules compile, refuse what they should, and say what to write instead."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_kit import tools
from gym_kit.cluster.local.api_only import api_server_only
from gym_kit.progress import Progress
from gym_operator.api.names import INSTANCE_LABEL as INSTANCE
from gym_operator.api.stack import GymStack
from gym_operator.rules.workloads import StackContext, build_children, build_control_secret

ROOT = Path(__file__).parents[2]
Change = Callable[[dict[str, Any]], object]
Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]

STACK: dict[str, Any] = {
    "apiVersion": "gymops.dev/v1alpha1",
    "kind": "GymStack",
    "metadata": {"name": "demo", "namespace": "default"},
    "spec": {
        "image": "registry.example/gym:1",
        "servers": [
            {"name": "env", "kind": "environment", "server": "single-agent-turn"},
            {
                "name": "policy",
                "kind": "model",
                "server": "vllm",
                "config": {"base_url": "http://llm:8000", "any": {"depth": [1, 0.5]}},
            },
            {"name": "agent", "kind": "agent", "server": "simple-agent"},
            {"name": "counter", "kind": "resources", "server": "counter", "resources": {"limits": {"cpu": 1}}},
        ],
        "collection": {"tasks": "s3://bucket/tasks.jsonl", "output": "s3://bucket/rows"},
        "checkpoints": {"storage": {"s3": {"bucket": "bucket", "credentialsSecret": "keys"}}},
    },
}
SERVED: dict[str, Any] = {
    **STACK,
    "spec": {
        **STACK["spec"],
        "servers": [{**one, "config": {}} if one["kind"] == "model" else one for one in STACK["spec"]["servers"]],
        "inference": {
            "vllm": {
                "image": "vllm:1",
                "model": "Qwen/Qwen3-8B",
                "resources": {"limits": {"nvidia.com/gpu": 1}},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "claim": "models",
                "secret": "hub",
                "cutAtEngine": True,
            }
        },
    },
}
"""With an engine of its own."""
CHECKPOINT: dict[str, Any] = {
    "apiVersion": "gymops.dev/v1alpha1",
    "kind": "GymCheckpoint",
    "metadata": {"name": "first", "namespace": "default"},
    "spec": {"stackRef": {"name": "demo"}, "labels": {"step": "7"}},
}


SCHEDULE: dict[str, Any] = {
    "apiVersion": "gymops.dev/v1alpha1",
    "kind": "GymCheckpointSchedule",
    "metadata": {"name": "often", "namespace": "default"},
    "spec": {"every": "2m", "template": {"spec": {"stackRef": {"name": "demo"}}}},
}
RESTORE: dict[str, Any] = {
    "apiVersion": "gymops.dev/v1alpha1",
    "kind": "GymRestore",
    "metadata": {"name": "back", "namespace": "default"},
    "spec": {"stackRef": {"name": "demo"}, "checkpointRef": {"name": "first"}},
}
PLACE = {"uri": "s3://bucket/team/x", "digest": "0" * 64}


@pytest.fixture(scope="module")
def kubectl() -> Iterator[Kubectl]:
    """Runs kubectl against an API server that has the CRDs."""
    with api_server_only(Progress.to_stderr()) as server:

        def run(*arguments: str, given: Any = None) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [str(tools.kubectl()), f"--kubeconfig={server.kubeconfig}", *arguments],
                input=None if given is None else json.dumps(given),
                capture_output=True,
                text=True,
                timeout=60,
            )

        for arguments in (
            ("apply", "--server-side", f"--filename={ROOT / 'crds'}"),
            ("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s"),
        ):
            done = run(*arguments)
            assert done.returncode == 0, done.stderr
        yield run


def create(kubectl: Kubectl, body: dict[str, Any], output: str = "json") -> subprocess.CompletedProcess[str]:
    return kubectl("create", "--dry-run=server", f"--output={output}", "--filename=-", given=body)


def test_a_stack_gets_its_defaults_and_a_status_nobody_has_looked_at(kubectl: Kubectl) -> None:
    done = create(kubectl, STACK)
    assert done.returncode == 0, done.stderr
    stack = json.loads(done.stdout)
    assert stack["status"] == {"observedGeneration": -1}
    assert stack["spec"]["recovery"] == {"policy": "Restore", "backoffLimit": 5, "codeMismatch": "Refuse"}
    assert stack["spec"]["access"] == {"attemptFloor": True}
    assert stack["spec"]["scaleDown"] == {"drainTimeout": "5m"}
    assert stack["spec"]["servers"][1]["config"]["any"] == {"depth": [1, 0.5]}


def test_an_external_driver_s_access_is_accepted_as_people_write_it(kubectl: Kubectl, tmp_path: Path) -> None:
    """Also `off`, which is a boolean to kubectl; and what is made of it is a policy that the API server takes."""
    body = copy.deepcopy(STACK)
    body["spec"]["access"] = {
        "driverSelector": {"matchLabels": {"app": "trainer", "example.com/team": "rl"}},
        "attemptFloor": False,
    }
    file = tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(body).replace("attemptFloor: false", "attemptFloor: off"))
    done = kubectl("create", "--dry-run=server", "--output=json", f"--filename={file}")
    assert done.returncode == 0, done.stderr
    stack = GymStack.parse(json.loads(done.stdout))
    assert not stack.spec.access.attempt_floor
    children = build_children(StackContext(stack.identity, stack.spec, "gym-system"))
    (policy,) = [child for child in children if child["kind"] == "NetworkPolicy"]
    done = create(kubectl, policy)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("body", [STACK, SERVED], ids=["servers alone", "with an engine"])
def test_its_children_are_accepted_under_the_restricted_standard(kubectl: Kubectl, body: dict[str, Any]) -> None:
    label = "pod-security.kubernetes.io/warn=restricted"
    assert kubectl("label", "namespace", "default", "--overwrite", label).returncode == 0
    created = create(kubectl, body)
    assert created.returncode == 0, created.stderr
    stack = GymStack.parse(json.loads(created.stdout))
    context = StackContext(stack.identity, stack.spec, "gym-system")
    children = [*build_children(context), build_control_secret(context, "token", "cookie")]
    done = create(kubectl, {"apiVersion": "v1", "kind": "List", "items": children}, output="name")
    assert done.returncode == 0, done.stderr
    assert "PodSecurity" not in done.stderr
    assert len(done.stdout.splitlines()) == len(children)


REFUSALS: list[tuple[Change, str]] = [
    (lambda b: b["spec"].update(cells=65), "should be less than or equal to 64"),
    (lambda b: b["spec"]["checkpoints"].update(cellOrder="Any"), 'supported values: "OneByOne", "Together"'),
    (lambda b: b["spec"].pop("image"), "spec.image: Required value"),
    (lambda b: b["spec"].pop("checkpoints"), "spec.checkpoints: Required value"),
    (lambda b: b["spec"]["servers"].pop(0), "exactly one server of kind environment"),
    (lambda b: b["spec"]["servers"].pop(1), "exactly one server of kind model"),
    (lambda b: b["spec"]["servers"].pop(2), "exactly one server of kind agent"),
    (lambda b: b["spec"]["servers"].pop(3), "at least one server of kind resources"),
    (lambda b: b["spec"]["servers"][3].update(name="env"), "Duplicate value"),
    (lambda b: b["spec"]["servers"][3].update(name="collection"), "belongs to the driver"),
    (lambda b: b["spec"]["servers"][3].update(name="counter-0"), "cannot end in a dash and a number"),
    (lambda b: b["spec"]["servers"][3].update(name="0counter"), "beginning with a letter"),
    (lambda b: b["spec"]["servers"][3].update(server="a b"), "package.module:Class"),
    (lambda b: b["spec"]["servers"][3].update(replicas=2), 'unknown field "spec.servers[3].replicas"'),
    (lambda b: b["metadata"].update(name="a" * 42), "at most 52 characters"),
    (lambda b: b["spec"]["checkpoints"]["storage"]["s3"].update(caSecret="ca"), "begins with https://"),
    (
        lambda b: b["spec"]["checkpoints"]["storage"]["s3"].update(encryption={"type": "SSE-S3", "kmsKeyID": "k"}),
        "set type to SSE-KMS, or leave kmsKeyID out",
    ),
    (lambda b: b["metadata"].update(name="a.b"), "only lower-case letters, digits and dashes"),
    (lambda b: b["metadata"].update(name="1a"), "begins with a letter"),
    (lambda b: b["spec"]["checkpoints"].pop("storage"), "checkpoints need a place: set storage.s3.bucket"),
    (lambda b: b["spec"].update(checkpoints={"enabled": False}), "need checkpoints.storage.s3"),
    (lambda b: b["spec"]["checkpoints"].update(storage={}), "set storage.s3.bucket"),
    (lambda b: b["spec"]["checkpoints"].update(storage={"directory": "/x"}), "unknown field"),
    (lambda b: b["spec"]["checkpoints"]["storage"]["s3"].update(bucket="b/x"), "goes into prefix"),
    (lambda b: b["spec"]["checkpoints"].update(prepareTimeout="60"), "a whole number and a unit"),
    (lambda b: b["spec"]["checkpoints"].update(prepareTimeout="25h"), "a duration is at most 24h"),
    (lambda b: b["spec"].update(scaleDown={"drainTimeout": "5"}), "2m or 1h, or 0s for none"),
    (lambda b: b["spec"].update(scaleDown={"drainTimeout": "1441m"}), "a duration is at most 24h"),
    (lambda b: b["spec"]["collection"].update(output="/rows"), "output must be an s3:// URI"),
    (lambda b: b["spec"]["collection"].update(tasks="http://x/y"), "write s3://bucket/key, or a path"),
    (lambda b: b["spec"].update(access={"driverSelector": {}}), "matchLabels: Required value"),
    (lambda b: b["spec"].update(access={"driverSelector": {"matchLabels": {}}}), "should have at least 1 properties"),
    (lambda b: b["spec"].update(access={"driverSelector": {"matchLabels": {"app": "a b"}}}), "at both ends"),
    (lambda b: b["spec"].update(access={"attemptFloor": "maybe"}), "must be of type boolean"),
]


@pytest.mark.parametrize(("change", "says"), REFUSALS, ids=[says for _, says in REFUSALS])
def test_refusals_say_what_to_write(kubectl: Kubectl, change: Change, says: str) -> None:
    body = copy.deepcopy(STACK)
    change(body)
    done = create(kubectl, body)
    assert done.returncode != 0
    assert says in done.stderr


def vllm(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["spec"]["inference"]["vllm"]
    return found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b["spec"]["servers"][1].update(server="scripted"), "is for a model server with server: vllm"),
        (lambda b: b["spec"]["servers"][3].update(name="vllm"), "the name vllm belongs to the engine"),
        (lambda b: vllm(b).update(args=["--port=9"]), "leave --host, --port"),
        (lambda b: vllm(b).update(args=["--api_server_count", "2"]), "leave --host, --port"),
        (lambda b: vllm(b).update(args=["-asc", "2"]), "leave --host, --port"),
        (lambda b: vllm(b).update(args=["--port 9"]), "leave --host, --port"),
        (lambda b: vllm(b).update(args=["--seed=1", "--max-model-len 16384"]), "such as --max-model-len=16384"),
        (lambda b: vllm(b).update(model="--trust"), "write a model's name"),
        (lambda b: vllm(b).update(replicas=2), "cutAtEngine needs replicas: 1"),
        (lambda b: vllm(b).pop("image"), "image: Required value"),
        (
            lambda b: (b["spec"].pop("collection"), b["spec"].update(checkpoints={"enabled": False})),
            "cutAtEngine is for checkpoints",
        ),
    ],
)
def test_refusals_of_an_engine_say_what_to_write(kubectl: Kubectl, change: Change, says: str) -> None:
    body = copy.deepcopy(SERVED)
    change(body)
    done = create(kubectl, body)
    assert done.returncode != 0
    assert says in done.stderr


def test_applying_the_same_manifests_again_and_again_causes_no_drift(kubectl: Kubectl) -> None:
    """By defaults that the API server fills in, or rules that look at what was there."""
    for body in (STACK, CHECKPOINT, SCHEDULE, RESTORE):
        again = {**body, "metadata": {**body["metadata"], "name": "again"}}
        found = set()
        for _ in range(3):
            done = kubectl("apply", "--filename=-", "--output=json", given=again)
            assert done.returncode == 0, done.stderr
            metadata = json.loads(done.stdout)["metadata"]
            found.add((metadata["generation"], metadata["resourceVersion"], metadata["uid"]))
        assert len(found) == 1, body["kind"]


def test_k1_whatever_is_deleted_before_anybody_looked_is_gone_at_once(kubectl: Kubectl) -> None:
    for body in (STACK, CHECKPOINT, SCHEDULE, RESTORE):
        unseen = {**body, "metadata": {**body["metadata"], "name": "unseen"}}
        assert kubectl("create", "--filename=-", given=unseen).returncode == 0
        done = kubectl("delete", body["kind"], "unseen", "--timeout=10s")
        assert done.returncode == 0, done.stderr


def test_what_was_taken_before_is_adopted_as_it_is(kubectl: Kubectl) -> None:
    done = create(kubectl, {**CHECKPOINT, "spec": {"stackRef": {"name": "demo"}, "source": PLACE}})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["spec"]["stopAfter"] is False


def test_a_checkpoint_s_spec_never_changes_but_for_how_it_is_kept(kubectl: Kubectl) -> None:
    assert kubectl("apply", "--filename=-", given=CHECKPOINT).returncode == 0
    for change in (
        {"labels": {"step": "8"}},
        {"stackRef": {"name": "other"}},
        {"timeouts": {"prepare": "1m"}},
        {"source": PLACE},
        {"labels": None},
    ):
        spec = {key: value for key, value in {**CHECKPOINT["spec"], **change}.items() if value is not None}
        done = kubectl("apply", "--filename=-", given={**CHECKPOINT, "spec": spec})
        assert done.returncode != 0, change
        assert "create another GymCheckpoint instead" in done.stderr
    labelled = {**CHECKPOINT, "metadata": {**CHECKPOINT["metadata"], "labels": {"team": "a"}}}
    assert kubectl("apply", "--filename=-", given=labelled).returncode == 0
    for kept in ({"ttl": "7d"}, {"ttl": "1h", "deletionPolicy": "Delete"}, {"deletionPolicy": "Retain"}, {}):
        done = kubectl("apply", "--filename=-", given={**CHECKPOINT, "spec": {**CHECKPOINT["spec"], **kept}})
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"episodes": []}, "should have at least 1 items"),
        ({"episodes": ["a", "a"]}, "Duplicate value"),
        ({"episodes": ["a/b"]}, "name a rollout by its id"),
        ({"driverState": {}}, "as value, or as uri and digest"),
        ({"driverState": {"value": {}, "uri": "s3://b/k", "digest": "a" * 64}}, "as value, or as uri and digest"),
        ({"driverState": {"uri": "s3://b/k"}}, "uri needs digest beside it"),
        ({"driverState": {"uri": "s3://b/k", "digest": "md5"}}, "64 hex digits"),
    ],
)
def test_a_checkpoint_s_scope_and_driver_state(kubectl: Kubectl, change: dict[str, Any], says: str) -> None:
    done = create(kubectl, wished("wrong", **change))
    assert done.returncode != 0
    assert says in done.stderr


def test_a_schedule_gets_its_defaults(kubectl: Kubectl) -> None:
    done = create(kubectl, SCHEDULE)
    assert done.returncode == 0, done.stderr
    schedule = json.loads(done.stdout)
    assert schedule["status"] == {"observedGeneration": -1}
    assert schedule["spec"]["keep"] == {"last": 10, "failed": 3}
    assert (schedule["spec"]["suspend"], schedule["spec"]["concurrencyPolicy"]) == (False, "Forbid")
    assert schedule["spec"]["template"]["spec"]["deletionPolicy"] == "Retain"
    cron = {**SCHEDULE, "spec": {**SCHEDULE["spec"], "schedule": "0 3 * * *", "timeZone": "Europe/Berlin"}}
    del cron["spec"]["every"]
    assert create(kubectl, cron).returncode == 0


def test_a_schedule_can_be_changed(kubectl: Kubectl) -> None:
    assert kubectl("apply", "--filename=-", given=SCHEDULE).returncode == 0
    template = {"spec": {"stackRef": {"name": "other"}, "ttl": "1d"}}
    changed = {**SCHEDULE, "spec": {"schedule": "* * * * *", "suspend": True, "template": template}}
    done = kubectl("apply", "--filename=-", given=changed)
    assert done.returncode == 0, done.stderr


def test_a_restore_never_changes(kubectl: Kubectl) -> None:
    done = kubectl("apply", "--filename=-", given=RESTORE)
    assert done.returncode == 0, done.stderr
    assert json.loads(kubectl("get", "grst", "back", "--output=json").stdout)["spec"]["backoffLimit"] == 3
    done = kubectl("apply", "--filename=-", given={**RESTORE, "spec": {**RESTORE["spec"], "backoffLimit": 5}})
    assert done.returncode != 0
    assert "create another GymRestore instead" in done.stderr


OTHER_REFUSALS: list[tuple[dict[str, Any], Change, str]] = [
    (CHECKPOINT, lambda b: b["spec"].update(ttl="1 week"), "a unit: 90m, 12h or 7d"),
    (CHECKPOINT, lambda b: b["spec"].update(deletionPolicy="Keep"), "Unsupported value"),
    (CHECKPOINT, lambda b: b["spec"].update(source={**PLACE, "digest": "abc"}), "64 hex digits"),
    (CHECKPOINT, lambda b: b["spec"].update(source=PLACE, timeouts={"prepare": "1m"}), "leave timeouts out"),
    (CHECKPOINT, lambda b: b["spec"].update(source=PLACE, episodes=["12-0"]), "leave episodes out"),
    (CHECKPOINT, lambda b: b["spec"].update(source=PLACE, driverState={"value": {}}), "leave driverState out"),
    (
        CHECKPOINT,
        lambda b: b["spec"].update(source=PLACE, stopAfter=True),
        "leave stopAfter out, and set spec.suspend",
    ),
    (SCHEDULE, lambda b: b["spec"].pop("every"), "exactly one of schedule"),
    (SCHEDULE, lambda b: b["spec"].update(schedule="* * * * *"), "exactly one of schedule"),
    (SCHEDULE, lambda b: b["spec"].update(timeZone="UTC"), "timeZone belongs to schedule"),
    (SCHEDULE, lambda b: b["spec"].update(every="9s"), "every is at least 10s"),
    (SCHEDULE, lambda b: b["spec"].update(every="2"), "a whole number and a unit"),
    (SCHEDULE, lambda b: (b["spec"].pop("every"), b["spec"].update(schedule="@hourly")), "write five fields"),
    (SCHEDULE, lambda b: b["spec"].update(concurrencyPolicy="Allow"), "Unsupported value"),
    (SCHEDULE, lambda b: b["spec"].update(keep={"last": 0}), "greater than or equal to 1"),
    (SCHEDULE, lambda b: b["spec"]["template"].update(metadata={"labels": {INSTANCE: "x"}}), f"leave {INSTANCE} out"),
    (SCHEDULE, lambda b: b["spec"]["template"]["spec"].update(source=PLACE), "unknown field"),
    (SCHEDULE, lambda b: b["metadata"].update(name="a" * 64), "may not be more than 63"),
    (RESTORE, lambda b: b["spec"].pop("checkpointRef"), "exactly one of checkpointRef"),
    (RESTORE, lambda b: b["spec"].update(PLACE), "exactly one of checkpointRef"),
    (RESTORE, lambda b: b["spec"].update(digest="0" * 64), "uri needs digest"),
    (RESTORE, lambda b: b["spec"].update(labels={"step": "7"}), "exactly one of checkpointRef"),
]


@pytest.mark.parametrize(("whole", "change", "says"), OTHER_REFUSALS, ids=[says for _, _, says in OTHER_REFUSALS])
def test_refusals_of_the_other_kinds_say_what_to_write(
    kubectl: Kubectl, whole: dict[str, Any], change: Change, says: str
) -> None:
    body = copy.deepcopy(whole)
    change(body)
    done = create(kubectl, body)
    assert done.returncode != 0
    assert says in done.stderr


def wished(name: str, **spec: Any) -> dict[str, Any]:
    """A checkpoint with more to it."""
    metadata = {**CHECKPOINT["metadata"], "name": name}
    return {**CHECKPOINT, "metadata": metadata, "spec": {**CHECKPOINT["spec"], **spec}}


def test_what_a_checkpoint_asks_for_is_kept_and_never_changes_either(kubectl: Kubectl) -> None:
    """Also inside of the driver's own state, whose form nobody knows."""
    state = {"value": {"any": {"depth": [1, None]}}}
    spec = {"episodes": ["a", "b-a2"], "stopAfter": True, "driverState": state}
    done = kubectl("apply", "--filename=-", "--output=json", given=wished("wished", **spec))
    assert done.returncode == 0, done.stderr
    assert {name: json.loads(done.stdout)["spec"][name] for name in spec} == spec
    for change in ({"episodes": ["a"]}, {"driverState": {"value": {"any": {"depth": [2, None]}}}}):
        done = kubectl("apply", "--filename=-", given=wished("wished", **{**spec, **change}))
        assert done.returncode != 0, change
        assert "create another GymCheckpoint instead" in done.stderr


def test_all_kinds_are_in_the_category_and_have_short_names(kubectl: Kubectl) -> None:
    assert kubectl("apply", "--filename=-", given=STACK).returncode == 0
    everything = kubectl("get", "gym").stdout
    assert "gymstack.gymops.dev/demo" in everything
    for short in ("gstack", "gckpt", "gsched", "grst"):
        assert kubectl("get", short).stdout.splitlines()[0].split()[0] == "NAME"


def test_explain_reads_well(kubectl: Kubectl) -> None:
    said = kubectl("explain", "gymstack.spec.checkpoints.storage.s3.credentialsSecret").stdout
    assert "AWS_ACCESS_KEY_ID" in said
