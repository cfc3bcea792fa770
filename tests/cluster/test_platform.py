"""What a platform does with the charts on a real cluster, while rollouts run: it tests, applies again, upgrades,
rolls back, restores, uninstalls in any order, and deletes namespaces. Pods are restricted throughout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gym_kit.cluster.client import ask
from gym_kit.demo.kube import Object
from gym_kit.demo.report import checkpoint_folder
from gym_kit.demo.site import Site, site
from gym_kit.demo.stage import OPERATOR, OPERATOR_NAMESPACE, Grounds
from gym_kit.errors import KitError
from gym_servers.protocol.identity import parse_key

pytestmark = pytest.mark.timeout(600)
ROLLOUTS = 4
START_SECONDS = 120.0
REPLACE_SECONDS = 120.0
CHECKPOINT_SECONDS = 60.0
COMPLETE_SECONDS = 90.0
GONE_SECONDS = 90.0
LEASE_SECONDS = 90.0
"""Longer than a lease: what nobody coordinates any more has gone on by then."""
ENDED = ("Succeeded", "Failed")
QUICK = {"prepareTimeout": "5s", "commitTimeout": "5s"}
"""Kubernetes looks again at a namespace that goes after half of the time that its pods have to end."""
NEVER = {"enabled": True, "every": "24h"}
"""A schedule without a time in any test."""
OFTEN = {"enabled": True, "every": "10s", "keep": {"last": 1}, "checkpoint": {"deletionPolicy": "Delete"}}
HOMELESS = {"nodeSelector": {"no": "node"}, "crds": {"create": False}, "rbac": {"aggregateClusterRoles": False}}
"""An operator that never starts, and has nothing outside of its namespace."""
GIVEN_UP = {"spec": {"deletionPolicy": "Retain"}, "metadata": {"finalizers": None}}
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
PASSED = "Phase:          Succeeded"


@pytest.fixture
def place(whole_cluster: Grounds, tmp_path: Path) -> Iterator[Site]:
    with site(whole_cluster, tmp_path, rollouts=ROLLOUTS) as place:
        yield place


# ---- upgrades -----------------------------------------------------------------------------------------------


def test_a_stack_that_is_applied_again_upgraded_and_rolled_back_continues_every_rollout(place: Site) -> None:
    """Also where the upgrade comes in the middle of a checkpoint, and where its image does not exist."""
    with pytest.raises(KitError, match="violates PodSecurity"):
        place.kubectl("run", "unrestricted", "--image=any", "--dry-run=server")
    first = place.values("team", schedule=NEVER)
    place.install("team", first)
    place.wait("rollouts are under way", lambda: place.at_work("team"), START_SECONDS)
    tested = place.helm("test", "team")
    assert (tested.returncode, PASSED in tested.stdout) == (0, True), tested

    before = standing(place)
    for _ in range(3):
        place.install("team", first)
    for _ in range(2):
        apply_again(place, "team")
    with place.in_tool_calls():
        place.kube.take_checkpoint("middle", "team")
        place.wait("it is open", lambda: place.phase("GymCheckpoint", "middle") == "Preparing", CHECKPOINT_SECONDS)
        # All that was applied is seen by now: this came after it.
        assert standing(place) == before
        place.install("team", {**first, "serverResources": {"requests": {"memory": "65Mi"}}})
        assert place.phase("GymCheckpoint", "middle") == "Preparing"
    place.wait("it ends", lambda: ended(place, "middle"), CHECKPOINT_SECONDS)
    middle = place.kube.checkpoint("middle")["status"]
    assert (middle["phase"], middle["episodes"]) == ("Succeeded", ROLLOUTS), middle
    assert {each["podUID"] for each in middle["cells"][0]["participants"]} == set(before["pods"].values())
    place.wait("it is upgraded and goes on", lambda: place.at_work("team", 1), REPLACE_SECONDS)

    place.rollback("team", 1)
    place.wait("it is as before and goes on", lambda: place.at_work("team", 2), REPLACE_SECONDS)

    repository, _, _ = place.grounds.image.rpartition(":")
    place.install("team", {**first, "image": {"repository": repository, "tag": "does-not-exist"}})
    place.wait("it says so", lambda: place.condition("team", "UpToDate").get("reason") == "PodsNotStarting", 60)
    assert place.condition("team", "Ready")["status"] == "False"
    place.rollback("team", 1)
    place.wait("it is healed and goes on", lambda: place.at_work("team", 3), REPLACE_SECONDS)

    place.install("team", place.values("team", engine=place.fast, schedule=NEVER))
    place.wait("every row", lambda: place.complete("team"), REPLACE_SECONDS + COMPLETE_SECONDS)
    counted = place.account("team")
    assert counted.problems == []
    assert (counted.continued, counted.attempts) == (ROLLOUTS, {"4": ROLLOUTS})
    recoveries = place.cell("team")["record"]["recoveries"]
    assert [(each["attempt"], each["checkpoint"]["name"]) for each in recoveries] == [
        (attempt, "roll-out") for attempt in (1, 2, 3, 4)
    ]
    assert list(place.kube.all_of("GymCheckpoint")) == ["middle"]


def standing(place: Site) -> dict[str, Any]:
    """What would show that the same manifests, applied again, had changed something."""
    kinds = "gymstack,gymcheckpointschedule,statefulset,service,networkpolicy,poddisruptionbudget"
    objects = json.loads(place.kubectl("get", kinds, "--output=json"))["items"]
    return {
        "objects": {
            f"{each['kind']}/{each['metadata']['name']}": (each["metadata"].get("generation"), each["spec"])
            for each in objects
        },
        "pods": place.pods("team"),
        "schedule": place.kube.get("GymCheckpointSchedule", "team")["status"],
    }


def apply_again(place: Site, release: str) -> None:
    """As a GitOps tool does."""
    manifest = place.folder / "manifest.yaml"
    manifest.write_text(place.helm("get", "manifest", release).stdout)
    place.kubectl("apply", "--filename", str(manifest))


def ended(place: Site, *checkpoints: str) -> bool:
    return all(place.phase("GymCheckpoint", name) in ENDED for name in checkpoints)


# ---- a namespace --------------------------------------------------------------------------------------------


def test_a_namespace_goes_with_all_that_is_in_it_and_only_what_is_to_stay_stays_in_the_bucket(place: Site) -> None:
    """A stack, checkpoints of both kinds, a schedule, which prunes, and a restore under way. What does not serve in
    it says so before."""
    place.install("team", place.values("team", schedule=OFTEN, checkpoints=QUICK))
    nowhere = {**place.grounds.s3_values(place.kube.namespace), "endpoint": "http://127.0.0.1:9"}
    place.install("blind", place.values("blind", s3=nowhere, checkpoints=QUICK))
    place.install("homeless", {"watchNamespaces": [place.kube.namespace], **HOMELESS}, "gym-operator")
    place.wait("rollouts are under way", lambda: place.at_work("team"), START_SECONDS)
    with ThreadPoolExecutor() as threads:
        tests = [
            threads.submit(place.helm, "test", name, "--logs", "--timeout=10s") for name in ("blind", "homeless")
        ]
        place.kube.take_checkpoint("kept", "team", labels={"step": "1"})
        place.kube.take_checkpoint("tied", "team", deletionPolicy="Delete")
        place.wait("they end", lambda: ended(place, "kept", "tied"), CHECKPOINT_SECONDS)
        blind, homeless = (test.result() for test in tests)
    assert (blind.returncode, homeless.returncode) == (1, 1)
    assert re.search(r"s3://.*: .*the endpoint \S+ cannot be reached.*, trying again", blind.stdout), blind
    assert re.search(r"http://homeless:8080: .*, trying again", homeless.stdout), homeless
    for release in ("blind", "homeless"):
        place.grounds.uninstall(release, place.kube.namespace)

    first, pruned = min(place.wait("one at its time", lambda: at_times(place), CHECKPOINT_SECONDS).items())
    place.wait("the first is let go", lambda: first not in place.kube.all_of("GymCheckpoint"), CHECKPOINT_SECONDS)
    assert not objects(place, pruned)
    _, newest = max(place.wait("there is a newer one", lambda: at_times(place), CHECKPOINT_SECONDS).items())
    kept, tied = (place.kube.checkpoint(name)["status"] for name in ("kept", "tied"))
    assert (kept["phase"], tied["phase"]) == ("Succeeded", "Succeeded")
    assert all(objects(place, uri) for uri in (kept["uri"], tied["uri"], newest))

    place.kube.create("GymRestore", "back", {"stackRef": {"name": "team"}, "labels": {"step": "1"}})
    place.wait("it is under way", lambda: place.phase("GymRestore", "back") == "Restoring", CHECKPOINT_SECONDS)
    place.kube.delete_namespace()
    place.wait("it is gone", place.kube.namespace_is_gone, GONE_SECONDS)
    assert not [uri for uri in (tied["uri"], newest) if objects(place, uri)]
    assert objects(place, kept["uri"])


def at_times(place: Site) -> dict[str, str]:
    """The checkpoints that the schedule has made and that succeeded: where they are, by name."""
    found = place.kube.all_of("GymCheckpoint")
    made = {name: each.get("status") or {} for name, each in found.items() if name.startswith("team-")}
    return {name: status["uri"] for name, status in made.items() if status.get("phase") == "Succeeded"}


def objects(place: Site, uri: str) -> list[str]:
    """What the bucket has at a place."""
    return list(place.store(uri.split("/", 3)[3]).list(""))


# ---- an operator that goes and comes back -------------------------------------------------------------------


def test_an_operator_that_is_uninstalled_first_wedges_nothing_and_another_restores_from_the_bucket_alone(
    place: Site, whole_cluster: Grounds, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place.install("team", place.values("team", checkpoints=QUICK))
    place.wait("rollouts are under way", lambda: place.at_work("team"), START_SECONDS)
    place.kube.take_checkpoint("kept", "team")
    place.kube.take_checkpoint("tied", "team", deletionPolicy="Delete")
    place.wait("they end", lambda: ended(place, "kept", "tied"), CHECKPOINT_SECONDS)
    folder, kept = checkpoint_folder(place.kube.stack("team")), place.kube.checkpoint("kept")["status"]
    assert (kept["phase"], kept["episodes"]) == ("Succeeded", ROLLOUTS)
    with place.in_tool_calls():
        place.kube.take_checkpoint("open", "team")
        place.wait("it is open", lambda: place.phase("GymCheckpoint", "open") == "Preparing", CHECKPOINT_SECONDS)
        whole_cluster.uninstall_operator()
    try:
        done = effects(place.entries())
        place.wait("rollouts go on without it", lambda: effects(place.entries()) > done + ROLLOUTS, LEASE_SECONDS)
        whole_cluster.uninstall("team", place.kube.namespace)
        place.kube.delete_namespace()
        # As docs/operations.md says: nobody is there to remove its data.
        place.kubectl("patch", "gckpt", "tied", "--type=merge", f"--patch={json.dumps(GIVEN_UP)}")
        place.wait("it is gone", place.kube.namespace_is_gone, GONE_SECONDS)
    finally:
        ask(whole_cluster.cluster.kubeconfig, "label", "--overwrite", "namespace", OPERATOR_NAMESPACE, RESTRICTED)
        whole_cluster.install_operator()
    assert PASSED in whole_cluster.helm("test", OPERATOR, "--namespace", OPERATOR_NAMESPACE)

    with site(whole_cluster, tmp_path_factory.mktemp("back"), rollouts=ROLLOUTS) as back:
        with back.calls.held():  # nothing that the stack may begin by itself comes to its end
            back.install("back", back.values("back", engine=back.fast))
            source = {"uri": kept["uri"], "digest": kept["digest"]}
            back.kube.create("GymRestore", "from-bucket", {"stackRef": {"name": "back"}, **source})
            back.wait("it ends", lambda: back.phase("GymRestore", "from-bucket") in ENDED, START_SECONDS)
        restored = back.kube.get("GymRestore", "from-bucket")["status"]
        assert (restored["phase"], restored["continuedCount"]) == ("Succeeded", ROLLOUTS), restored
        back.wait("every row", lambda: back.complete("back"), COMPLETE_SECONDS)
        attempt = back.cell("back")["attempt"]
        counted = back.account("back", [*place.entries(), *of_attempts(back.entries(), attempt)], [folder])
        assert counted.problems == []
        assert (counted.continued, counted.attempts) == (ROLLOUTS, {str(attempt): ROLLOUTS})


def effects(entries: Sequence[Object]) -> int:
    return sum(entry["kind"] == "effect" for entry in entries)


def of_attempts(entries: Sequence[Object], lowest: int) -> list[Object]:
    """Without what a stack had begun by itself before something was restored into it."""

    def attempt(entry: Object) -> int:
        if entry["kind"] == "tokens":
            return parse_key(str(entry["request"]).partition("/")[0]).attempt
        return int(entry["attempt"])

    return [entry for entry in entries if attempt(entry) >= lowest]
