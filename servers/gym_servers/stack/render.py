"""From a stack's spec to the settings of each of its processes, and to the place of its checkpoints.

The operator and the local runner both call this, so that a stack means the same in a cluster and on a laptop.
Only addresses and ports differ, and those the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gym_servers.stack.settings import (
    CONTROL_PORT,
    DATA_PORT,
    CheckpointSettings,
    CollectionSettings,
    Peer,
    S3Encryption,
    S3Settings,
    ServerSettings,
    StackIdentity,
    StorageSettings,
)
from gym_servers.stack.spec import Participant, S3Spec, StackSpec, StorageSpec


@dataclass(frozen=True)
class Ports:
    """Where a process listens: its peers' calls, and the coordinator's."""

    data: int = DATA_PORT
    control: int = CONTROL_PORT


def render_settings(
    identity: StackIdentity,
    spec: StackSpec,
    address_of: Callable[[str], str],
    *,
    host: str = "0.0.0.0",
    ports_of: Callable[[str], Ports] = lambda name: Ports(),
    image: str = "",
    cells_file: str | None = None,
    engine: str = "",
) -> dict[str, dict[str, Any]]:
    """The settings of every process of one cell, by server name, as plain JSON.

    `address_of` gives the data URL of a server; it may contain `{cell}`, which each process replaces with its
    own cell. `cells_file` is where a process reads which there are: they may change while it runs. `engine` is the
    address of the inference block's. Values that equal the default are left out, so that a new setting in a later
    version does not look like a change to stacks that do not use it.
    """
    participants = spec.participants()
    # Nobody calls the driver, so it is nobody's peer.
    peers = {p.name: Peer(kind=p.kind, url=address_of(p.name)) for p in participants if p.kind != "collection"}
    return {
        participant.name: ServerSettings(
            stack=identity,
            name=participant.name,
            kind=participant.kind,
            server=participant.server,
            config={**_engine_config(participant, spec, engine), **participant.config},
            peers={name: peer for name, peer in peers.items() if name != participant.name},
            host=host,
            data_port=ports_of(participant.name).data,
            control_port=ports_of(participant.name).control,
            checkpoint=CheckpointSettings(
                enabled=spec.checkpoints.enabled,
                attempt_floor=spec.access.attempt_floor,
                external_driver=_is_driven_from_outside(participant, spec),
            ),
            storage=_storage(spec) if uses_storage(participant, spec) else StorageSettings(),
            collection=_collection(spec) if participant.kind == "collection" else None,
            cells_file=cells_file if follows_cells(participant, spec) else None,
            image=image,
        ).model_dump(mode="json", exclude_defaults=True)
        for participant in participants
    }


def _is_driven_from_outside(participant: Participant, spec: StackSpec) -> bool:
    return participant.kind == "environment" and spec.collection is None


def follows_cells(participant: Participant, spec: StackSpec) -> bool:
    """Whether this process has to know which cells there are: who drives, or answers the driver outside."""
    return participant.kind == "collection" or _is_driven_from_outside(participant, spec)


def uses_engine(participant: Participant, spec: StackSpec) -> bool:
    """Whether this process is the model server of the inference block."""
    return spec.inference is not None and (participant.kind, participant.server) == ("model", "vllm")


def _engine_config(participant: Participant, spec: StackSpec, address: str) -> dict[str, Any]:
    """What the model server's config need not say of the inference block's engine."""
    if spec.inference is None or not uses_engine(participant, spec):
        return {}
    vllm = spec.inference.vllm
    return {"base_url": address, "model": vllm.model, **({"cut_at_engine": True} if vllm.cut_at_engine else {})}


def uses_storage(participant: Participant, spec: StackSpec) -> bool:
    """Whether this process reads or writes the stack's storage, and so needs its credentials."""
    return spec.checkpoints.storage is not None and (spec.checkpoints.enabled or participant.kind == "collection")


def stack_root(storage: StorageSpec | StorageSettings, identity: StackIdentity) -> str:
    """The URI below which a stack keeps everything: what proves its storage and who owns it, and its cells.

    It holds the stack's UID and not its name: a stack deleted and made again under the same name must never
    take the old one's checkpoints for its own.
    """
    if storage.s3 is not None:
        parts = [f"s3://{storage.s3.bucket}", storage.s3.prefix, identity.uid]
        return "/".join(part for part in parts if part)
    assert storage.directory is not None  # StorageSpec holds exactly one of the two
    return f"{storage.directory.rstrip('/')}/{identity.uid}"


def checkpoint_root(storage: StorageSpec | StorageSettings, identity: StackIdentity, cell: int) -> str:
    """The URI below which a cell keeps its checkpoints."""
    return f"{stack_root(storage, identity)}/cell-{cell}"


def cell_folder(identity: StackIdentity, cell: int) -> str:
    """The last parts of that URI: what is a cell's own below a storage that stacks share."""
    return f"{identity.uid}/cell-{cell}"


def _storage(spec: StackSpec) -> StorageSettings:
    storage = spec.checkpoints.storage
    if storage is None:
        return StorageSettings()
    if storage.s3 is None:
        return StorageSettings(directory=storage.directory)
    return StorageSettings(s3=s3_settings(storage.s3))


def s3_settings(s3: S3Spec) -> S3Settings:
    """How a bucket of the spec is reached; its credentials are another matter."""
    encryption = s3.encryption
    return S3Settings(
        bucket=s3.bucket,
        prefix=s3.prefix,
        endpoint=s3.endpoint,
        region=s3.region,
        addressing_style=s3.addressing_style,
        encryption=S3Encryption(type=encryption.type, kms_key_id=encryption.kms_key_id) if encryption else None,
    )


def _collection(spec: StackSpec) -> CollectionSettings | None:
    if spec.collection is None:
        return None
    return CollectionSettings(
        tasks=spec.collection.tasks,
        output=spec.collection.output,
        repeats=spec.collection.repeats,
        concurrency=spec.collection.concurrency,
        max_failures=spec.collection.max_failures,
    )
