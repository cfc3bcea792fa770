"""A real operator whose way to a real API server fails, and heals: as networks, load balancers, control planes do."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gym_kit.api_proxy import ApiProxy, Fault
from gym_kit.operator_rig import NAMESPACE, OperatorRig
from gym_kit.progress import Progress
from gym_operator.effects.kube import CHECKPOINTS, STACKS
from gym_operator.effects.resync import WATCHED
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import ObjectMissing

pytestmark = pytest.mark.timeout(300)
START_SECONDS = 120.0
CHECKPOINT_SECONDS = 120.0
AWAY_SECONDS = 20.0
REOPENED_SECONDS = 100.0
"""Two looks beside the watches, and the time it takes to open them."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorRig]:
    with OperatorRig(tmp_path_factory.mktemp("faults"), Progress.to_stderr()) as rig:
        yield rig


@pytest.fixture
def way(cluster: OperatorRig, tmp_path: Path) -> Iterator[ApiProxy]:
    """An operator that goes by a proxy."""
    with ApiProxy(cluster.kubeconfig, tmp_path) as proxy:
        cluster.start_operator(kubeconfig=proxy.kubeconfig)
        yield proxy
        cluster.kill_operator()
    for resource in (CHECKPOINTS, STACKS):
        for body in cluster.run(cluster.kube.list_all(resource, NAMESPACE)).items:
            cluster.delete(resource, body["metadata"]["name"])


def health(rig: OperatorRig) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{rig.health_port}/healthz", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def at_work(rig: OperatorRig, stack: str) -> bool:
    cell = rig.cell(stack)
    return cell.get("phase") == "Running" and bool((cell.get("collection") or {}).get("expected"))


def is_final(rig: OperatorRig, checkpoint: str) -> bool:
    return rig.status(CHECKPOINTS, checkpoint).get("phase") in ("Succeeded", "Failed")


def has_begun(rig: OperatorRig, checkpoint: str) -> bool:
    return rig.status(CHECKPOINTS, checkpoint).get("phase") not in (None, "Pending")


def is_published(rig: OperatorRig, uri: str) -> bool:
    """Nothing at all may have landed, where it was given up before anybody was asked to write."""
    with suppress(ObjectMissing):
        return read_publication(rig.store(uri).get(CHECKPOINT)).state == "published"
    return False


def phases(rig: OperatorRig, stack: str) -> set[str]:
    return {one["phase"] for one in rig.cell(stack)["participants"]}


def is_observed(rig: OperatorRig, stack: str) -> bool:
    body = rig.run(rig.kube.get(STACKS, NAMESPACE, stack))
    return bool(body["status"]["observedGeneration"] == body["metadata"]["generation"])


def has_said(rig: OperatorRig, words: str, since: int) -> bool:
    return words in rig.log.read_text()[since:]


def stay_well_for(rig: OperatorRig, seconds: float) -> None:
    """As its liveness probe sees it: a restart would not help."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert rig.operator_runs, rig.log.read_text()[-2000:]
        assert health(rig)["ok"]
        time.sleep(1)


def test_an_api_server_that_is_away_for_a_minute_costs_nothing(cluster: OperatorRig, way: ApiProxy) -> None:
    """Three ways to be away, each in the middle of a checkpoint."""
    cluster.apply("away", rollouts=200)
    cluster.until("rollouts are under way", lambda: at_work(cluster, "away"), START_SECONDS)
    for number, fault in enumerate(Fault):
        name = f"torn-{number}"
        cluster.checkpoint(name, "away")
        cluster.until(f"{name} has begun", partial(has_begun, cluster, name), CHECKPOINT_SECONDS, interval=0.0)
        way.fault = fault
        stay_well_for(cluster, AWAY_SECONDS)
        way.fault = None
        cluster.until(f"{name} is final", partial(is_final, cluster, name), CHECKPOINT_SECONDS)
        status = cluster.status(CHECKPOINTS, name)
        assert (status["phase"] == "Succeeded") == is_published(cluster, status["uri"]), status
        after = f"next-{number}"
        cluster.checkpoint(after, "away")
        cluster.until("the next one is final", partial(is_final, cluster, after), CHECKPOINT_SECONDS)
        assert cluster.status(CHECKPOINTS, after)["phase"] == "Succeeded"
        assert "open" not in cluster.cell("away")["record"]
    assert cluster.cell("away")["attempt"] == 0, "nothing was replaced"
    cluster.until("nobody is parked", lambda: phases(cluster, "away") == {"idle"}, 30)
    rows = cluster.rows("away")
    cluster.until("it goes on", lambda: cluster.rows("away") > rows, 60)


def test_k17_watches_that_are_silent_are_noticed_and_opened_anew(cluster: OperatorRig, way: ApiProxy) -> None:
    cluster.apply("unheard", suspend=True)
    cluster.until("it is seen", lambda: cluster.phase("unheard") == "Suspended", START_SECONDS)
    before = cluster.log.stat().st_size
    assert way.silence() >= len(WATCHED)
    cluster.change("unheard", lambda spec: spec.update(image="hollow:2"))

    cluster.until("it is found beside the watches", partial(is_observed, cluster, "unheard"), REOPENED_SECONDS)
    said = partial(has_said, cluster, "no news from the watches", before)
    cluster.until("the watches are opened anew", said, REOPENED_SECONDS)
    stay_well_for(cluster, 5.0)
    cluster.change("unheard", lambda spec: spec.update(image="hollow:3"))
    cluster.until("the watches tell again", partial(is_observed, cluster, "unheard"), 20)


def test_an_error_inside_of_a_watch_ends_nothing(cluster: OperatorRig, way: ApiProxy) -> None:
    """The framework ends on those; what is under way for a stack does not."""
    cluster.apply("erring", suspend=True)
    cluster.until("it is seen", lambda: cluster.phase("erring") == "Suspended", START_SECONDS)
    before = cluster.log.stat().st_size
    assert way.tell({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "no leader"}})
    cluster.until("the framework has ended", partial(has_said, cluster, "the watches have ended", before), 30)
    stay_well_for(cluster, 5.0)
    cluster.change("erring", lambda spec: spec.update(image="hollow:2"))

    cluster.until("the watches tell again", partial(is_observed, cluster, "erring"), 20)
