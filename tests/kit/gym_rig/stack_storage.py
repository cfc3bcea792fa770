"""The storage of one stack on an S3 server, as its operator sees it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

from gym_kit.bucket import Credentials
from gym_operator.effects.kube import SECRETS
from gym_operator.effects.storage import StackStorage
from gym_operator.rules.observed import Storage
from gym_rig.fake_kube import FakeKube
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage.cells import PROPOSAL
from gym_servers.storage.manifest import CodeIdentity, Manifest, Member, PackEntry, Publication, RecordEntry
from gym_servers.storage.ownership import Owner
from gym_servers.storage.packs import pack_records, write_records
from gym_servers.storage.store import ObjectStore

NS = "team"
UID = "7d9c8f5e-0000-4000-8000-000000000001"
RECORDS = {"r": b"records" * 100}
CODE = CodeIdentity(image="", server="scripted", config_digest="", record_format=1)


class Stack:
    """The storage of one stack as its operator sees it."""

    def __init__(self, prefix: str, endpoint: str, credentials: Credentials | None, **s3: Any) -> None:
        self.kube = FakeKube(lambda: 0.0)
        self.now = 0.0
        document = {"bucket": "gym", "prefix": prefix, "endpoint": endpoint, "addressingStyle": "path", **s3}
        if credentials is not None:
            self.secret("keys", **keys(credentials))
            document["credentialsSecret"] = "keys"
        self.spec = StorageSpec.model_validate({"s3": document})
        self.root = f"s3://{document['bucket']}/{prefix}/{UID}"
        self.storage = StackStorage(self.kube, NS, lambda: self.now, owner("cluster-a"))

    def secret(self, name: str, **values: str) -> None:
        data = {key.replace("__", "."): base64.b64encode(value.encode()).decode() for key, value in values.items()}
        if (SECRETS, NS, name) in self.kube.objects:
            self.kube.set(SECRETS, NS, name, data=data)
        else:
            self.kube.put(SECRETS, NS, {"metadata": {"name": name}, "data": data})

    async def found(self) -> Storage:
        """What the next look finds."""
        self.now += 10_000
        await self.storage.tend(self.spec, self.root)
        async with asyncio.timeout(30):
            if self.storage._probe is not None:
                await self.storage._probe
        return self.storage.state

    def store(self, *below: str) -> ObjectStore:
        return self.storage.open("/".join([self.root, *below]))


def keys(credentials: Credentials) -> dict[str, str]:
    """As the Secret of a stack holds them."""
    return {"AWS_ACCESS_KEY_ID": credentials.access_key, "AWS_SECRET_ACCESS_KEY": credentials.secret_key}


def owner(cluster: str) -> Owner:
    """The stack in one of several clusters that have the same prefix."""
    return Owner(cluster=cluster, stack_uid=UID, namespace=NS, name="demo")


def written(
    store: ObjectStore, *, until: str = "proposal", name: str = "one", records: Mapping[str, bytes] = RECORDS
) -> Publication:
    """A whole checkpoint of one participant, but for its publication; `until` names the last thing written."""

    def manifest(packs: list[PackEntry], entries: list[RecordEntry]) -> Manifest:
        named = {"checkpoint_id": name, "kind": "model", "instance": "m", "session": "s"}
        return Manifest(**named, code=CODE, episodes=list(records), packs=packs, records=entries)

    packs = pack_records("model/m", records)
    if until == "packs":
        for pack in packs:
            store.create(pack.key, pack.data)
        digest = "0" * 64
    else:
        digest = write_records(store, "model/m", packs, manifest)
    size = sum(map(len, records.values()))
    counts = {"records": len(records), "bytes": size}
    member = Member(kind="model", instance="m", session="s", manifest_digest=digest, code=CODE, **counts)
    named = {"checkpoint_id": name, "name": name, "stack_uid": UID}
    full = Publication(state="published", **named, cell=0, cell_attempt=0, sequence=1, created=1.0, members=[member])
    if until == "proposal":
        store.create(PROPOSAL, full.to_bytes())
    return full
