"""What `kubectl gym` reads of a stack with an operator at work - checkpoints, Secrets, logs - and its rights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gym_kit.documented import plugin_role
from gym_operator.effects.kube import PODS, SECRETS, STACKS, KubeError, Resource
from gym_operator.plugin.cluster import Cluster, UserKube
from gym_operator.plugin.exits import NotDone, OutOfReach, Unusable
from gym_operator.plugin.screen import Output
from gym_operator.plugin.sources import by_name, by_place, opened
from gym_operator.plugin.verbs.checkpoint import checkpoint
from gym_operator.plugin.verbs.checkpoints import checkpoints
from gym_operator.plugin.verbs.drill import drill
from gym_operator.plugin.verbs.inspect import inspect
from gym_operator.plugin.verbs.logs import Wanted, logs
from gym_operator.plugin.verbs.restore import restore
from gym_operator.plugin.verbs.status import status
from gym_operator.plugin.verbs.verify import verify
from gym_rig.beside import beside
from gym_rig.cell import IDENTITY
from gym_rig.collecting import SLOWLY, rows
from gym_rig.fake_kube import FakeKube
from gym_rig.operated import OperatedRig, operated
from gym_rig.rights import Rights
from gym_rig.user import STACK, Page, at_work, cluster_of, taken
from gym_rig.virtual import now
from gym_servers.protocol.digests import canonical, sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage.manifest import CHECKPOINT
from gym_servers.storage.s3_access import KEYS, S3Credentials
from gym_servers.storage.store import StorageError

# ---- inspect, verify ---------------------------------------------------------------------------------------


async def test_a_checkpoint_is_inspected_by_name_and_by_place_with_the_same_result(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        one = await taken(rig, "one", labels={"step": "7"})
        named, placed = Page(), Page()
        await inspect(named, "one", await by_name(cluster_of(rig), "one"), Output.JSON, now)
        await inspect(placed, one["uri"], by_place(f"{one['uri']}/checkpoint.json", None, None), Output.JSON, now)
        (part,), (same,) = (json.loads(page.out.getvalue())["parts"] for page in (named, placed))
        assert part == same
        assert (part["uri"], part["digest"], part["name"]) == (one["uri"], one["digest"], "one")
        assert part["labels"] == {"step": "7"}
        assert len(part["episodes"]) == one["episodes"] > 0
        assert {each["stage"] for each in part["episodes"]} == {"invoke_agent"}
        assert all(each["boundaryBytes"] > 0 for each in part["episodes"])
        assert {each["name"] for each in part["participants"]} == {"env", "policy", "agent", "counter", "collection"}
        assert part["bytes"] == one["bytes"]
        table = Page()
        await inspect(table, "one", await by_name(cluster_of(rig), "one"), Output.WIDE, now)
        assert [one["uri"], one["digest"]] in table.lines
        assert ["agent", "agent", "simple-agent"] in [line[:3] for line in table.lines]


async def test_each_cell_has_its_part(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await at_work(rig)
        one = await taken(rig, "one")
        page = Page()
        await verify(page, "one", await by_name(cluster_of(rig), "one"), Output.JSON)
        told = json.loads(page.out.getvalue())
        assert [place["uri"] for place in told["places"]] == [cell["uri"] for cell in one["cells"]]
        assert {(each["cell"], each["result"]) for each in told["participants"]} == {(0, "good"), (1, "good")}
        assert told["verified"] is True


def swap_records(place: Path) -> None:
    """A pack whose digest is right, and whose records are not: only their own digests tell."""
    manifest = next(place.glob("environment/env/manifest.json"))
    document = json.loads(manifest.read_text())
    document["records"][0]["sha256"] = "0" * 64
    manifest.write_bytes(canonical(document))
    publication = json.loads((place / CHECKPOINT).read_text())
    for member in publication["members"]:
        if member["kind"] == "environment":
            member["manifest_digest"] = sha256(manifest.read_bytes())
    (place / CHECKPOINT).write_bytes(canonical(publication))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda place: next(place.glob("agent/**/manifest.json")).unlink(), "agent of cell 0: .* has no manifest"),
        (lambda place: next(place.glob("environment/**/pack*")).write_bytes(b"x"), "env of cell 0: pack .* digest"),
        (lambda place: next(place.glob("environment/**/pack*")).unlink(), "env of cell 0: pack .* is missing"),
        (swap_records, "env of cell 0: record .* does not match its digest"),
    ],
)
async def test_what_does_not_verify_is_named_and_all_else_is_read_too(
    tmp_path: Path, harm: Callable[[Path], object], says: str
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        uri = (await taken(rig, "one"))["uri"]
        harm(Path(uri))
        page = Page()
        with pytest.raises(NotDone, match=says):
            await verify(page, uri, by_place(uri, None, None), Output.JSON)
        told = json.loads(page.out.getvalue())
        assert told["verified"] is False
        assert [each["result"] == "good" for each in told["participants"]].count(False) == 1
        assert len(told["participants"]) == 5


async def test_another_document_than_the_one_that_was_published_is_refused(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        one = await taken(rig, "one")
        (Path(one["uri"]) / CHECKPOINT).write_text("{}")
        with pytest.raises(ProtocolError, match="not the one with this digest"):
            await inspect(Page(), "one", await by_name(cluster_of(rig), "one"), Output.TABLE, now)
        with pytest.raises(ProtocolError, match="not the one with this digest"):
            await verify(Page(), "one", await by_name(cluster_of(rig), "one"), Output.TABLE)


async def test_where_nothing_is_published_that_is_said(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        rig.checkpoint("failed", timeouts={"prepare": "never"})
        await rig.until(lambda: rig.final("failed"), "failed")
        with pytest.raises(Unusable, match=r"GymCheckpoint failed has nothing in storage: it failed: InvalidSpec"):
            await by_name(cluster_of(rig), "failed")
        with pytest.raises(Unusable, match=r"no checkpoint.json in .*: give the folder that holds it"):
            await verify(Page(), str(tmp_path), by_place(str(tmp_path), None, None), Output.TABLE)


async def test_a_checkpoint_outlives_its_stack(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        await taken(rig, "one")
        rig.kube.remove(STACKS, IDENTITY.namespace, STACK)
        await verify(Page(), "one", await by_name(cluster_of(rig), "one"), Output.TABLE)


# ---- secrets -----------------------------------------------------------------------------------------------


S3 = {"bucket": "bucket", "credentialsSecret": "keys"}
KEY, SECRET = "AKIDKEY", "s3cr3t-of-the-stack"


async def test_the_secrets_of_the_stack_are_read_with_the_users_own_rights_and_shown_to_nobody() -> None:
    kube = FakeKube(now)
    kube.put(
        SECRETS, "team", {"metadata": {"name": "keys"}, "stringData": dict(zip(KEYS, (KEY, SECRET), strict=True))}
    )
    cluster = Cluster(cast("UserKube", kube), "team", now)
    storage = await opened(cluster, StorageSpec.parse({"s3": S3}))
    assert storage._access.current().credentials == S3Credentials(KEY, SECRET)
    assert SECRET not in repr(storage._access.current()) and KEY not in repr(storage._access.current())
    kube.permitted = lambda verb, resource, name: resource != SECRETS
    with pytest.raises(
        OutOfReach, match=r"you may not get secrets in namespace team: .* AWS_ACCESS_KEY_ID"
    ) as refused:
        await opened(cluster, StorageSpec.parse({"s3": S3}))
    assert SECRET not in str(refused.value)


async def test_a_secret_that_is_not_there_is_named() -> None:
    storage = await opened(Cluster(cast("UserKube", FakeKube(now)), "team", now), StorageSpec.parse({"s3": S3}))
    with pytest.raises(StorageError, match="there is no Secret keys in this namespace"):
        storage.open("s3://bucket/x")


# ---- logs --------------------------------------------------------------------------------------------------


def say(rig: OperatedRig, pod: str, *lines: str) -> None:
    rig.kube.logs.setdefault(pod, []).extend(line.encode() for line in lines)


async def test_logs_of_all_servers_are_told_apart_and_cut_to_their_last_lines(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        for pod in rig.pods():
            say(rig, pod, *(f"line {number}" for number in range(12)))
        page = Page()
        await logs(cluster_of(rig), page, STACK, Wanted(), follow=False)
        lines = page.out.getvalue().splitlines()
        assert len(lines) == 10 * len(rig.pods())
        assert {line.partition(": ")[0] for line in lines} == set(rig.pods())
        assert "rig-agent-0: line 11" in lines and "rig-agent-0: line 1" not in lines


async def test_logs_of_one_server_are_whole_and_bare(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await at_work(rig)
        say(rig, "rig-agent-1", *(str(number) for number in range(12)))
        page = Page()
        await logs(cluster_of(rig), page, STACK, Wanted("agent", 1), follow=False)
        assert page.out.getvalue().split() == [str(number) for number in range(12)]
        page = Page()
        await logs(cluster_of(rig), page, STACK, Wanted("agent", 1, tail=2), follow=False)
        assert page.out.getvalue().split() == ["10", "11"]
        with pytest.raises(Unusable, match=r"no server agnet in this stack has a pod: there are agent, collection, "):
            await logs(cluster_of(rig), Page(), STACK, Wanted("agnet"), follow=False)


async def test_logs_are_followed_over_the_replacement_of_a_pod(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        for pod in rig.pods():
            say(rig, pod)
        say(rig, "rig-agent-0", "before")
        page = Page()
        following = asyncio.create_task(logs(cluster_of(rig), page, STACK, Wanted("agent"), follow=True))
        await rig.until(lambda: "before" in page.out.getvalue(), "it is shown")
        say(rig, "rig-agent-0", "now")
        await rig.until(lambda: "now" in page.out.getvalue(), "what is added is shown")
        rig.kube.dead = True
        await rig.until(lambda: "it is asked again" in page.told, "an API server that is away is asked again")
        rig.kube.dead = False
        rig.kube.logs["rig-agent-0"] = [b"of the next one"]
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: "of the next one" in page.out.getvalue(), "the next one's is shown")
        assert page.out.getvalue().splitlines() == ["before", "now", "of the next one"]
        rig.kube.remove(STACKS, IDENTITY.namespace, STACK)
        rig.pods_may_start = False
        for pod in rig.pods():
            rig.kube.remove(PODS, IDENTITY.namespace, pod)
        await following


async def test_a_container_that_has_not_begun_keeps_no_others_log_back(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        say(rig, "rig-policy-0", "here")
        page = Page()
        await logs(cluster_of(rig), page, STACK, Wanted(), follow=False)
        assert page.out.getvalue() == "rig-policy-0: here\n"
        assert 'rig-agent-0: container "server" in pod "rig-agent-0" is waiting to start' in page.told


async def test_a_right_that_is_missing_ends_logs_at_once(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        rig.kube.permitted = lambda verb, resource, name: resource.plural != "pods/log"
        for follow in (False, True):
            with pytest.raises(OutOfReach, match="you may not get pods/log in namespace local"):
                await logs(cluster_of(rig), Page(), STACK, Wanted(), follow=follow)


async def test_a_stack_without_pods_has_no_logs(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, suspend=True) as rig:
        await rig.until(lambda: rig.status().get("phase") == "Suspended", "suspended")
        with pytest.raises(Unusable, match="stack rig has no pods: kubectl gym status rig says why"):
            await logs(cluster_of(rig), Page(), STACK, Wanted(), follow=False)


# ---- rights ------------------------------------------------------------------------------------------------


class AsUser:
    """The API server as somebody with a role sees it; the operator has its own way."""

    def __init__(self, rig: OperatedRig, rights: Rights) -> None:
        self._kube, self._rights = rig.kube, rights

    def _permit(self, verb: str, resource: Resource, name: str = "") -> None:
        if not self._rights(verb, resource, name):
            raise KubeError(403, f"may not {verb} {resource.plural}")

    async def get(self, resource: Resource, namespace: str, name: str) -> Any:
        self._permit("get", resource, name)
        return await self._kube.get(resource, namespace, name)

    async def list_all(self, resource: Resource, namespace: str, selector: str = "") -> Any:
        self._permit("list", resource)
        return await self._kube.list_all(resource, namespace, selector)

    async def changes(self, resource: Resource, namespace: str, since: int) -> Any:
        self._permit("watch", resource)
        return await self._kube.changes(resource, namespace, since)

    async def create(self, resource: Resource, namespace: str, body: Any) -> Any:
        self._permit("create", resource, body["metadata"]["name"])
        return await self._kube.create(resource, namespace, body)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        self._permit("delete", resource, name)
        await self._kube.delete(resource, namespace, name, uid)

    async def log(self, namespace: str, pod: str, *arguments: Any, **options: Any) -> AsyncIterator[bytes]:
        self._permit("get", PODS._replace(plural="pods/log"), pod)
        async for line in self._kube.log(namespace, pod, *arguments, **options):
            yield line


async def test_the_documented_role_is_enough_for_every_verb_and_holds_nothing_else(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, "rig-drill"):
        await at_work(rig)
        rights = Rights(plugin_role()["rules"])
        cluster = Cluster(cast("UserKube", AsUser(rig, rights)), IDENTITY.namespace, now)
        page = Page()
        asked: dict[str, Any] = {"name": "one", "labels": [], "stop_after": False, "wait": 300.0}
        await checkpoint(cluster, page, STACK, **asked)
        watch = asyncio.create_task(status(cluster, Page(), STACK, Output.TABLE, watch=True))
        await checkpoints(cluster, page, STACK, Output.TABLE)
        await verify(page, "one", await by_name(cluster, "one"), Output.TABLE)
        say(rig, "rig-agent-0", "here")
        await logs(cluster, page, STACK, Wanted("agent"), follow=False)
        await drill(cluster, page, STACK, wanted=None, name=None, own_classes=False, seconds=120.0)
        await restore(cluster, page, STACK, "one", digest=None, name="back", wait=300.0)
        with pytest.raises(Unusable):
            await cluster.stack("nobody")
        rig.kube.put(SECRETS, IDENTITY.namespace, {"metadata": {"name": "gym-s3"}})
        await opened(cluster, StorageSpec.parse({"s3": {**S3, "credentialsSecret": "gym-s3"}}))
        watch.cancel()
        await asyncio.wait([watch])
        assert rights.refused == set()
        assert rights.used == rights.granted
