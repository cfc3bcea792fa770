"""The operator as a process, against a real API server and real Gym servers: checkpoints, deaths, and its own death.

The pods are processes of this machine (gym_kit.hollow_node), so nothing here needs root, an image or a node.
"""

from __future__ import annotations

import base64
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_kit.hollow_node import NODE, OTHER_NODE
from gym_kit.operator_rig import NAMESPACE, OperatorRig
from gym_kit.progress import Progress
from gym_operator.api import names
from gym_operator.effects.kube import (
    CHECKPOINTS,
    CHILDREN,
    EVENTS,
    NODES,
    PODS,
    RESTORES,
    SCHEDULES,
    SECRETS,
    STACKS,
    NotFound,
    Resource,
)
from gym_servers.protocol.messages import PREFIX
from gym_servers.storage.manifest import CHECKPOINT, read_publication

pytestmark = pytest.mark.timeout(240)
START_SECONDS = 90.0
CHECKPOINT_SECONDS = 60.0
RECOVERY_SECONDS = 90.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorRig]:
    with OperatorRig(tmp_path_factory.mktemp("operator"), Progress.to_stderr()) as rig:
        yield rig


@pytest.fixture
def rig(shared: OperatorRig) -> Iterator[OperatorRig]:
    """With an operator at work, and without what a test left behind."""
    if not shared.operator_runs:
        shared.start_operator()
    yield shared
    for resource in (SCHEDULES, RESTORES, CHECKPOINTS, STACKS):
        for body in shared.run(shared.kube.list_all(resource, NAMESPACE)).items:
            shared.delete(resource, body["metadata"]["name"])
    shared.until("the pods are gone", lambda: not pods(shared), 60)


def pods(rig: OperatorRig) -> dict[str, dict[str, Any]]:
    listing = rig.run(rig.kube.list_all(PODS, NAMESPACE, names.STACK_LABEL))
    return {pod["metadata"]["name"]: pod for pod in listing.items}


def running(rig: OperatorRig, stack: str, attempt: int = 0, *, cell: int = 0) -> bool:
    found = rig.cell(stack, cell)
    return found.get("phase") == "Running" and found.get("attempt", 0) >= attempt


def under_way(rig: OperatorRig, stack: str, *, cell: int = 0) -> bool:
    found = rig.cell(stack, cell)
    return running(rig, stack, cell=cell) and bool((found.get("collection") or {}).get("expected"))


def finished(rig: OperatorRig, checkpoint: str) -> bool:
    return rig.status(CHECKPOINTS, checkpoint).get("phase") in ("Succeeded", "Failed")


def take(rig: OperatorRig, checkpoint: str, stack: str) -> dict[str, Any]:
    rig.checkpoint(checkpoint, stack)
    rig.until(f"{checkpoint} is final", lambda: finished(rig, checkpoint), CHECKPOINT_SECONDS)
    return rig.status(CHECKPOINTS, checkpoint)


def test_a_checkpoint_is_taken_and_a_deleted_pod_costs_no_rollout(rig: OperatorRig) -> None:
    rig.apply("first", rollouts=24)
    rig.until("rollouts are under way", lambda: under_way(rig, "first"), START_SECONDS)
    status = take(rig, "one", "first")
    assert status["phase"] == "Succeeded", status
    assert status["episodes"] == 24 - rig.rows("first") or status["episodes"] > 0
    (part,) = status["cells"]
    assert {each["name"] for each in part["participants"]} == {"env", "policy", "agent", "counter", "collection"}
    landed = read_publication(rig.store(status["uri"]).get(CHECKPOINT))
    assert landed.state == "published"
    assert len(landed.episodes) == status["episodes"]

    uid = pods(rig)["first-agent-0"]["metadata"]["uid"]
    rig.run(rig.kube.delete(PODS, NAMESPACE, "first-agent-0", uid, 0))
    rig.until("it recovers", lambda: running(rig, "first", 1), RECOVERY_SECONDS)
    recovery = rig.cell("first")["recoveries"][-1]
    assert recovery["checkpoint"] == status["checkpointID"]
    assert recovery["reason"].startswith("agent")
    assert pods(rig)["first-agent-0"]["metadata"]["uid"] != uid
    rig.until("all rows are there", lambda: rig.phase("first") == "Completed", 120)
    assert rig.cell("first")["collection"] == {"expected": 24, "rows": 24, "failed": 0, "complete": True}
    stack = rig.status(STACKS, "first")
    assert stack["lastCheckpoint"]["name"] == "one"
    assert rig.condition(STACKS, "first", "Ready")["reason"] == "CollectionComplete"


def test_a_container_that_dies_in_place_is_seen_and_recovered(rig: OperatorRig) -> None:
    rig.apply("inplace", rollouts=24)
    rig.until("rollouts are under way", lambda: under_way(rig, "inplace"), START_SECONDS)
    assert take(rig, "before", "inplace")["phase"] == "Succeeded"
    rig.node.kill("env")
    rig.until("it recovers", lambda: running(rig, "inplace", 1), RECOVERY_SECONDS)
    assert rig.cell("inplace")["recoveries"][-1]["checkpoint"]
    rig.until("all rows are there", lambda: rig.phase("inplace") == "Completed", 120)
    assert rig.rows("inplace") == 24


@pytest.mark.parametrize("at", ["Preparing", "Committing"])
def test_an_operator_killed_during_a_checkpoint_leaves_nothing_parked(rig: OperatorRig, at: str) -> None:
    rig.apply("killed", rollouts=24)
    rig.until("rollouts are under way", lambda: under_way(rig, "killed"), START_SECONDS)
    rig.checkpoint("torn", "killed")
    passed = ("Preparing", "Committing", "Publishing", "Succeeded")
    wanted = passed[passed.index(at) :]
    rig.until(at, lambda: rig.status(CHECKPOINTS, "torn").get("phase") in wanted, CHECKPOINT_SECONDS, interval=0.0)
    rig.kill_operator(signal.SIGKILL)
    rig.start_operator()
    rig.until("the checkpoint is final", lambda: finished(rig, "torn"), CHECKPOINT_SECONDS)
    torn = rig.status(CHECKPOINTS, "torn")
    landed = read_publication(rig.store(torn["uri"]).get(CHECKPOINT))
    # What landed in storage is the truth, and the status says the same.
    assert (torn["phase"] == "Succeeded") == (landed.state == "published")
    if torn["phase"] == "Failed":
        assert torn["reason"] == "OperatorRestarted"
        assert rig.condition(CHECKPOINTS, "torn", "Stalled")["status"] == "True"
    assert take(rig, "next", "killed")["phase"] == "Succeeded"
    rig.until("nobody is parked", lambda: {p["phase"] for p in rig.cell("killed")["participants"]} == {"idle"}, 30)
    assert rig.cell("killed")["attempt"] == 0
    assert "open" not in rig.cell("killed")["record"]


def test_a_cell_dies_and_goes_while_the_other_works_on(rig: OperatorRig) -> None:
    rig.apply("twin", rollouts=24, cells=2)
    rig.until("both are under way", lambda: all(under_way(rig, "twin", cell=cell) for cell in (0, 1)), START_SECONDS)
    status = take(rig, "both", "twin")
    assert status["phase"] == "Succeeded", status
    for index, part in enumerate(status["cells"]):
        assert read_publication(rig.store(part["uri"]).get(CHECKPOINT)).cell == index
    before = rig.cell("twin", 0)["participants"]
    rig.node.kill("agent", cell=1)
    rig.until("it recovers", lambda: running(rig, "twin", 1, cell=1), RECOVERY_SECONDS)
    assert rig.cell("twin", 1)["recoveries"][-1]["checkpoint"] == status["checkpointID"]
    sessions = [(each["podUID"], each["session"]) for each in rig.cell("twin", 0)["participants"]]
    assert sessions == [(each["podUID"], each["session"]) for each in before]
    assert rig.cell("twin", 0)["attempt"] == 0
    rig.until("all rows are there", lambda: rig.phase("twin") == "Completed", 120)
    assert rig.status(STACKS, "twin")["collection"]["rows"] == 24
    rig.change("twin", lambda spec: spec.update(cells=1))
    rig.until("its pods are gone", lambda: not any(name.endswith("-1") for name in pods(rig)), 60)
    rig.until("it is told", lambda: rig.cell("twin", 1)["phase"] == "Stopped", 20)
    assert rig.cell("twin", 1)["lastCheckpoint"]["name"] == "scale-down"
    assert sorted(name for name in pods(rig)) == [
        f"twin-{s}-0" for s in ("agent", "collection", "counter", "env", "policy")
    ]


def test_a_pod_that_is_deleted_in_order_and_another_image_cost_no_work(rig: OperatorRig) -> None:
    """Each takes a last checkpoint, inside of the time that the pod has to end, or a cell at a time."""
    rig.apply("planned", rollouts=48, cells=2)
    rig.until("both are under way", lambda: all(under_way(rig, "planned", cell=c) for c in (0, 1)), START_SECONDS)
    before = {name: pod["metadata"]["uid"] for name, pod in pods(rig).items()}
    rig.delete(PODS, "planned-agent-1")
    rig.until("it goes on", lambda: running(rig, "planned", 1, cell=1), RECOVERY_SECONDS)
    assert continued_from(rig, "planned", 1) == ["roll-out"]
    assert rig.cell("planned", 1)["recoveries"][-1]["reason"] == "agent is being ended: its pod was deleted"
    after = {name: pod["metadata"]["uid"] for name, pod in pods(rig).items()}
    assert {name for name in after if after[name] == before.get(name)} == {n for n in after if n.endswith("-0")}

    rig.change("planned", lambda spec: spec.update(image="hollow:2"))
    rig.until("cell 0 goes on", lambda: running(rig, "planned", 1), RECOVERY_SECONDS)
    rig.until("cell 1 goes on", lambda: running(rig, "planned", 2, cell=1), RECOVERY_SECONDS)
    assert {pod["spec"]["containers"][0]["image"] for pod in pods(rig).values()} == {"hollow:2"}
    rig.until("it says so", lambda: rig.condition(STACKS, "planned", "UpToDate").get("status") == "True", 30)
    assert [continued_from(rig, "planned", cell) for cell in (0, 1)] == [["roll-out"], ["roll-out"] * 2]
    rig.until("all rows are there", lambda: rig.phase("planned") == "Completed", 120)
    assert rig.status(STACKS, "planned")["collection"] == {"expected": 48, "rows": 48, "failed": 0, "complete": True}


def test_kubectl_drains_a_node_whose_cell_goes_on_elsewhere(rig: OperatorRig) -> None:
    """Its evictions are refused until the cell has had its last checkpoint, then let through, and it ends."""
    rig.apply("moved", rollouts=24)
    rig.until("rollouts are under way", lambda: under_way(rig, "moved"), START_SECONDS)
    rig.until("it is guarded", lambda: budget(rig, "moved") == 0, 30)
    drain = rig.kubectl("drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s")
    try:
        rig.until("it is moved", lambda: running(rig, "moved", 1), RECOVERY_SECONDS)
        assert {pod["spec"]["nodeName"] for pod in pods(rig).values()} == {OTHER_NODE}
        said, _ = drain.communicate(timeout=60)
        assert drain.returncode == 0, said
    finally:
        drain.kill()
        drain.communicate()
        rig.kubectl("uncordon", NODE).communicate(timeout=60)
    assert continued_from(rig, "moved", 0) == ["roll-out"]
    (recovery,) = rig.cell("moved")["recoveries"]
    assert "is cordoned" in recovery["reason"]
    rig.until("all rows are there", lambda: rig.phase("moved") == "Completed", 120)
    assert rig.rows("moved") == 24


def budget(rig: OperatorRig, stack: str) -> int | None:
    """How many pods others may take away."""
    try:
        body = rig.run(rig.kube.get(CHILDREN["PodDisruptionBudget"], NAMESPACE, names.disruption_budget(stack)))
    except NotFound:
        return None
    return int(body["spec"]["maxUnavailable"])


def continued_from(rig: OperatorRig, stack: str, cell: int) -> list[str]:
    """The names of the checkpoints that its recoveries continued from."""
    return [one["checkpoint"]["name"] for one in rig.cell(stack, cell)["record"]["recoveries"]]


def test_a_restarted_operator_disturbs_nobody(rig: OperatorRig) -> None:
    rig.apply("calm", rollouts=24)
    rig.until("rollouts are under way", lambda: under_way(rig, "calm"), START_SECONDS)
    before = {name: pod["metadata"]["uid"] for name, pod in pods(rig).items()}
    generations = child_versions(rig)
    rig.kill_operator()
    rig.start_operator()
    rows = rig.rows("calm")
    rig.until("it goes on", lambda: rig.rows("calm") > rows, 60)
    assert {name: pod["metadata"]["uid"] for name, pod in pods(rig).items()} == before
    assert rig.cell("calm")["attempt"] == 0
    assert child_versions(rig) == generations, "children were written again without need"


def child_versions(rig: OperatorRig) -> dict[str, int]:
    """Generations of the children: they move when a spec is written anew."""
    found = {}
    for kind in ("StatefulSet", "ConfigMap", "NetworkPolicy"):
        for body in rig.run(rig.kube.list_all(CHILDREN[kind], NAMESPACE, names.STACK_LABEL)).items:
            metadata = body["metadata"]
            found[f"{kind}/{metadata['name']}"] = metadata.get("generation") or int(metadata["resourceVersion"])
    return found


def test_checkpoints_wait_for_each_other_in_order(rig: OperatorRig) -> None:
    rig.apply("queue", rollouts=32)
    rig.until("rollouts are under way", lambda: under_way(rig, "queue"), START_SECONDS)
    for name in ("a1", "a2", "a3"):
        rig.checkpoint(name, "queue")
    rig.until("all are final", lambda: all(finished(rig, name) for name in ("a1", "a2", "a3")), 120)
    statuses = [rig.status(CHECKPOINTS, name) for name in ("a1", "a2", "a3")]
    assert [status["phase"] for status in statuses] == ["Succeeded"] * 3, statuses
    # The sequence is part of the place: it says in which order they were taken.
    assert [status["uri"].rsplit("/", 1)[1][7:13] for status in statuses] == ["000001", "000002", "000003"]
    rig.until("the newest is shown", lambda: rig.status(STACKS, "queue")["lastCheckpoint"]["name"] == "a3", 10)


def test_a_suspended_stack_continues_from_its_checkpoint(rig: OperatorRig) -> None:
    rig.apply("pause", rollouts=32)
    rig.until("rollouts are under way", lambda: under_way(rig, "pause"), START_SECONDS)
    kept = take(rig, "kept", "pause")
    assert kept["phase"] == "Succeeded"
    rig.change("pause", lambda spec: spec.update(suspend=True))
    rig.until("no pods are left", lambda: not pods(rig), 60)
    rig.until("it says so", lambda: rig.phase("pause") == "Suspended", 20)
    rig.change("pause", lambda spec: spec.update(suspend=False))
    rig.until("it runs again", lambda: running(rig, "pause", 1), RECOVERY_SECONDS)
    assert rig.cell("pause")["recoveries"][-1]["checkpoint"] == kept["checkpointID"]


def test_k18_checkpoints_at_their_times_are_let_go_with_their_data_and_the_newest_outlives_its_stack(
    rig: OperatorRig,
) -> None:
    rig.apply("timed", rollouts=200)  # more than get done meanwhile
    rig.until("rollouts are under way", lambda: under_way(rig, "timed"), START_SECONDS)
    template = {"spec": {"stackRef": {"name": "timed"}, "deletionPolicy": "Delete", "labels": {"step": "7"}}}
    spec = {"every": "10s", "keep": {"last": 1}, "template": template}
    rig.run(rig.kube.create(SCHEDULES, NAMESPACE, object_of(names.SCHEDULE_KIND, "often", spec)))

    def made() -> dict[str, dict[str, Any]]:
        found = rig.run(rig.kube.list_all(CHECKPOINTS, NAMESPACE, f"{names.SCHEDULE_LABEL}=often"))
        return {body["metadata"]["name"]: body for body in found.items}

    rig.until("the first is there", lambda: any(finished(rig, name) for name in made()), 90)
    (first,) = [name for name in made() if finished(rig, name)]
    uri = rig.status(CHECKPOINTS, first)["uri"]
    assert rig.store(uri).list("")
    rig.until("it is let go", lambda: first not in made(), 120)
    assert rig.store(uri).list("") == {}
    rig.run(rig.kube.replace(SCHEDULES, NAMESPACE, suspended(rig, "often")))
    rig.until("nothing is under way", lambda: all(finished(rig, name) for name in made()), 60)
    assert made(), "the newest stays"

    source = {"stackRef": {"name": "timed"}, "labels": {"step": "7"}}
    rig.run(rig.kube.create(RESTORES, NAMESPACE, object_of(names.RESTORE_KIND, "back", source)))
    rig.until("it is restored", lambda: rig.status(RESTORES, "back").get("phase") == "Succeeded", RECOVERY_SECONDS)
    restored = rig.status(RESTORES, "back")
    assert restored["checkpoint"]["name"] in made()
    assert rig.cell("timed")["recoveries"][-1]["checkpoint"] == restored["checkpoint"]["id"]
    rows = rig.rows("timed")
    rig.until("it goes on", lambda: rig.rows("timed") > rows, 60)

    left = {name: rig.status(CHECKPOINTS, name)["uri"] for name in made()}
    newest = restored["checkpoint"]["name"]
    rig.delete(STACKS, "timed")
    rig.until("the stack is gone", lambda: rig.status(STACKS, "timed") == {}, 30)
    rig.until("its pods are gone", lambda: not pods(rig), 60)
    assert rig.status(CHECKPOINTS, newest)["phase"] == "Succeeded", "it outlives its stack"
    assert read_publication(rig.store(left[newest]).get(CHECKPOINT)).state == "published"
    for name in made():
        rig.delete(CHECKPOINTS, name)
    rig.until("they are gone without their stack", lambda: not made(), 60)
    assert all(rig.store(uri).list("") == {} for uri in left.values())


def object_of(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }


def suspended(rig: OperatorRig, schedule: str) -> dict[str, Any]:
    body = rig.run(rig.kube.get(SCHEDULES, NAMESPACE, schedule))
    return {**body, "spec": {**body["spec"], "suspend": True}}


def test_a_stack_deleted_during_a_checkpoint_goes_at_once(rig: OperatorRig) -> None:
    rig.apply("gone", rollouts=24)
    rig.until("rollouts are under way", lambda: under_way(rig, "gone"), START_SECONDS)
    rig.checkpoint("lost", "gone")
    rig.until("it has begun", lambda: rig.status(CHECKPOINTS, "lost").get("phase") not in (None, "Pending"), 60, 0.0)
    rig.delete(STACKS, "gone")
    rig.until("the stack is gone", lambda: rig.status(STACKS, "gone") == {}, 10)
    rig.until("its pods are gone", lambda: not pods(rig), 60)
    rig.until("the checkpoint is final", lambda: finished(rig, "lost"), 90)


def test_what_is_wrong_is_said_with_what_to_do(rig: OperatorRig) -> None:
    rig.apply("nokeys", **storage_of(rig, credentialsSecret="absent"))
    rig.apply("nobucket", **storage_of(rig, bucket="not-there"))
    wrong = rig.manifest("nomodel")
    wrong["spec"]["servers"][1]["server"] = "unheard-of"
    rig.run(rig.kube.create(STACKS, NAMESPACE, wrong))

    def says(stack: str, kind: str, reason: str, words: str) -> bool:
        condition = rig.condition(STACKS, stack, kind)
        return condition.get("reason") == reason and words in condition["message"]

    rig.until("keys", lambda: says("nokeys", "StorageReady", "CredentialsMissing", "create it with the keys"), 30)
    rig.until("bucket", lambda: says("nobucket", "StorageReady", "BucketMissing", "create it or correct"), 60)
    rig.until("model", lambda: says("nomodel", "Stalled", "InvalidSpec", "policy: 'unheard-of' is not a known"), 30)
    assert rig.s3.credentials.secret_key not in rig.log.read_text()
    rig.secret("absent", rig.s3.credentials.access_key, rig.s3.credentials.secret_key)
    rig.until("keys are found", lambda: rig.condition(STACKS, "nokeys", "StorageReady").get("status") == "True", 60)


def test_a_control_token_is_rotated_as_the_operations_page_says(rig: OperatorRig) -> None:
    rig.apply("rotated", rollouts=24)
    rig.until("rollouts are under way", lambda: under_way(rig, "rotated"), START_SECONDS)
    old = control_secret(rig, "rotated")["control-token"]
    new = base64.b64encode(b"new-token").decode()
    control_secret(rig, "rotated", {"control-token": new, "control-token-previous": old})
    assert take(rig, "operator-does-not-know", "rotated")["phase"] == "Succeeded"
    rig.kill_operator()
    rig.start_operator()  # which knows, and the pods do not
    assert take(rig, "pods-do-not-know", "rotated")["phase"] == "Succeeded"
    rig.run(rig.node.refresh_secrets())
    rig.until("the new one is good", lambda: answers(rig, new) == {200}, 30)
    assert answers(rig, old) == {200}
    control_secret(rig, "rotated", {"control-token": new})
    rig.run(rig.node.refresh_secrets())
    rig.until("the old one is good nowhere", lambda: answers(rig, old) == {401}, 30)
    assert take(rig, "all-know", "rotated")["phase"] == "Succeeded"
    assert rig.cell("rotated")["attempt"] == 0, "nothing was started again"
    secret = control_secret(rig, "rotated")
    keys = [rig.s3.credentials.access_key, rig.s3.credentials.secret_key]
    tell_nobody(rig, *map(decoded, (old, new, secret[names.COOKIE_SECRET_KEY])), *keys)


def decoded(value: str) -> str:
    return base64.b64decode(value).decode()


def tell_nobody(rig: OperatorRig, *secrets: str) -> None:
    """None of them is in a log, an Event or a status, neither as it is nor as a Secret holds it."""
    logs = [rig.log, *(rig.folder / "pods").glob("*/log")]
    assert len(logs) > 5
    told = {str(path): path.read_text() for path in logs}
    for resource in (STACKS, CHECKPOINTS, SCHEDULES, RESTORES, PODS, EVENTS, *CHILDREN.values()):
        if resource != SECRETS:
            for body in rig.run(rig.kube.list_all(resource, NAMESPACE)).items:
                said = body if resource == EVENTS else body.get("status")
                told[f"{resource.plural} {body['metadata']['name']}"] = json.dumps(said)
    for secret in secrets:
        for form in (secret, base64.b64encode(secret.encode()).decode()):
            assert [place for place, text in told.items() if form in text] == []


def control_secret(rig: OperatorRig, stack: str, tokens: dict[str, str] | None = None) -> dict[str, str]:
    """What the Secret holds, as it is there; with `tokens` in place of those that are there."""
    secret = rig.run(rig.kube.get(SECRETS, NAMESPACE, names.control_secret(stack)))
    if tokens is not None:
        kept = {key: value for key, value in secret["data"].items() if not key.startswith("control-token")}
        secret = rig.run(rig.kube.replace(SECRETS, NAMESPACE, {**secret, "data": {**kept, **tokens}}))
    return dict(secret["data"])


def answers(rig: OperatorRig, token: str) -> set[int]:
    """With which statuses the pods' control ports answer to a token, given as a Secret holds it."""
    headers = {"authorization": f"Bearer {decoded(token)}"}
    urls = [f"http://{pod['status']['podIP']}:{names.CONTROL_PORT}{PREFIX}/status" for pod in pods(rig).values()]
    return {httpx.get(url, headers=headers, trust_env=False, timeout=5).status_code for url in urls}


def storage_of(rig: OperatorRig, **changes: Any) -> dict[str, Any]:
    s3 = rig.manifest("any")["spec"]["checkpoints"]["storage"]["s3"]
    return {"checkpoints": {"storage": {"s3": {**s3, **changes}}}}


def test_k16_the_framework_keeps_nothing_in_the_objects_that_it_watches(rig: OperatorRig) -> None:
    """It would keep the whole spec in an annotation, which has room for 256 KiB: no write to such a stack would
    succeed. Nor does it hold an object by a finalizer."""
    servers = rig.manifest("large")["spec"]["servers"]
    own = {"server": "gym_servers.agent.simple_agent:SimpleAgent", "config": {"prompt": "long " * 80_000}}
    servers[2].update(own)  # a class says by itself what its config may be
    rig.apply("large", rollouts=200, servers=servers)  # more than get done meanwhile
    rig.until("rollouts are under way", lambda: under_way(rig, "large"), START_SECONDS)
    assert take(rig, "one", "large")["phase"] == "Succeeded"
    template = {"spec": {"stackRef": {"name": "large"}}}
    schedule = object_of(names.SCHEDULE_KIND, "rarely", {"every": "24h", "template": template})
    rig.run(rig.kube.create(SCHEDULES, NAMESPACE, schedule))
    source = {"stackRef": {"name": "large"}, "checkpointRef": {"name": "one"}}
    rig.run(rig.kube.create(RESTORES, NAMESPACE, object_of(names.RESTORE_KIND, "back", source)))
    rig.until("it is restored", lambda: rig.status(RESTORES, "back").get("phase") == "Succeeded", RECOVERY_SECONDS)
    rig.until("it is looked at", lambda: rig.status(SCHEDULES, "rarely").get("observedGeneration") == 1, 30)

    def written(resource: Resource) -> list[dict[str, Any]]:
        return [body["metadata"] for body in rig.run(rig.kube.list_all(resource, NAMESPACE)).items]

    for resource in (STACKS, CHECKPOINTS, SCHEDULES, RESTORES):
        found = written(resource)
        assert found, resource.plural
        for metadata in found:
            kept = {key: metadata.get(key) or [] for key in ("annotations", "finalizers")}
            assert kept == {"annotations": [], "finalizers": []}, (resource.plural, metadata["name"])
    ours = {names.CONFIG_DIGEST, names.TEMPLATE_DIGEST}
    found = [pod["metadata"] for pod in pods(rig).values()]
    assert [(set(each["annotations"]), each.get("finalizers")) for each in found] == [(ours, None)] * 5
    for node in rig.run(rig.kube.list_all(NODES, None)).items:
        assert not any(names.GROUP in key or "kopf" in key for key in node["metadata"].get("annotations") or ())


def test_two_operators_do_not_use_an_attempt_twice(rig: OperatorRig) -> None:
    """A second operator is a mistake, or the first one behind a broken network: records are fenced all the same."""
    second = OperatorHandle(rig)
    try:
        rig.apply("twice", rollouts=32)
        rig.until("rollouts are under way", lambda: under_way(rig, "twice"), START_SECONDS)
        assert take(rig, "both", "twice")["phase"] in ("Succeeded", "Failed")
        rig.node.kill("agent")
        rig.until("it recovers", lambda: running(rig, "twice", 1), RECOVERY_SECONDS)
    finally:
        second.end()
    rig.until("all rows are there", lambda: rig.phase("twice") == "Completed", 180)
    attempts = [recovery["attempt"] for recovery in rig.cell("twice")["recoveries"]]
    assert attempts == sorted(set(attempts))
    assert rig.rows("twice") == 32


class OperatorHandle:
    """A second operator beside the rig's own."""

    def __init__(self, rig: OperatorRig) -> None:
        from gym_kit.ports import free_ports

        own = rig._operator
        self._process = rig.start_operator(health_port=free_ports(1)[0])
        rig._operator = own

    def end(self) -> None:
        self._process.kill()
        self._process.wait(30)


def test_health_tells_of_the_work(rig: OperatorRig) -> None:
    def health() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{rig.health_port}/healthz", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.URLError:
            return {}

    # Here it watches one namespace only, as it does where it has no rights for the whole cluster.
    rig.kill_operator(signal.SIGTERM)
    rig.start_operator("--namespace", NAMESPACE)
    rig.until("it answers", lambda: health().get("ok"), 30)
    rig.apply("healthy")
    rig.until("it has a worker", lambda: health().get("stacks") == 1, 30)
    rig.kill_operator(signal.SIGTERM)


def test_an_operator_without_crds_or_cluster_says_so(tmp_path: Path) -> None:
    import subprocess
    import sys

    config = tmp_path / "config"
    config.write_text("not: a kubeconfig")
    done = subprocess.run(
        [sys.executable, "-m", "gym_operator", "run", "--kubeconfig", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no cluster is configured" in done.stderr
    assert "Traceback" not in done.stderr
