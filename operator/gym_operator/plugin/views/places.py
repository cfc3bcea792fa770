"""Where a checkpoint is that somebody asks for, by the name of its GymCheckpoint or by its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.views.checkpoints import failure_of, phase_of, status_of
from gym_operator.rules.restores import Place
from gym_servers.stack.settings import S3Settings
from gym_servers.stack.spec import SpecError, StorageSpec
from gym_servers.storage.manifest import CHECKPOINT


def is_place(wanted: str) -> bool:
    """A place is told by its slash; no object's name has one."""
    return "/" in wanted


def folder_of(uri: str) -> str:
    """The folder of a checkpoint, also where its document is named. Raises Unusable where no folder is."""
    folder = uri.rstrip("/").removesuffix(f"/{CHECKPOINT}").rstrip("/")
    if folder in ("", "s3:"):
        raise Unusable(f"{uri} is no checkpoint's folder: write s3://bucket/folder, or a path")
    return folder


def places_of(body: Mapping[str, Any]) -> list[Place]:
    """Where the published parts of a GymCheckpoint are. Raises Unusable where there are none."""
    status, name = status_of(body), body["metadata"]["name"]
    found = [Place(cell.uri, cell.digest, cell.index) for cell in status.cells if cell.uri and cell.digest]
    if found:
        return found
    why = f"it failed: {failure_of(body)}" if status.phase == "Failed" else f"it is {phase_of(body)}"
    raise Unusable(f"GymCheckpoint {name} has nothing in storage: {why}")


def storage_of(checkpoint: Mapping[str, Any], stack: Mapping[str, Any] | None) -> StorageSpec:
    """How a GymCheckpoint's storage is reached: as its stack says, where it is there, else as its stack said when it
    was taken. Raises Unusable."""
    told = ((stack or {}).get("spec") or {}).get("checkpoints", {}).get("storage") or status_of(checkpoint).storage
    try:
        return StorageSpec.parse(told)
    except SpecError as error:
        name = checkpoint["metadata"]["name"]
        raise Unusable(
            f"nothing says how the storage of GymCheckpoint {name} is reached: its stack is gone; give its URI in "
            "place of its name, and the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error


def s3_of(uri: str, endpoint: str | None, region: str | None, addressing_style: str) -> S3Settings | None:
    """How a bucket is reached that no object describes. Raises Unusable."""
    if not uri.startswith("s3://"):
        return None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise Unusable(f"--endpoint {endpoint} is no address: write http:// or https://, a host and a port")
    given = {"region": region} if region else {}
    return S3Settings.model_validate(
        {"bucket": "", "endpoint": endpoint, "addressing_style": addressing_style, **given}
    )
