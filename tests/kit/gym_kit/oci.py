"""The OCI image archive, as far as the kit needs it: read an archive's reference, write a one-program image.

The local node needs its pause image before any image builder may be installed, so that one is written by hand.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from gym_kit.errors import KitError

REFERENCE = "org.opencontainers.image.ref.name"


def reference_of(archive: Path) -> str:
    """The reference an image archive names itself by (`oci-archive` and `docker save` alike); KitError if none."""
    try:
        with tarfile.open(archive, "r:") as tar:
            members = {member.name.removeprefix("./"): member for member in tar}
            for name in ("index.json", "manifest.json"):
                stream = tar.extractfile(members[name]) if name in members else None
                reference = _named_in(json.load(stream)) if stream else None
                if reference:
                    return reference
    except (OSError, tarfile.TarError, ValueError) as unreadable:
        raise KitError(f"{archive} is no image archive: {unreadable}") from unreadable
    raise KitError(f"the image archive {archive} names no reference: write it with NAME:TAG")


def _named_in(index: Any) -> str | None:
    if isinstance(index, dict):
        for manifest in index.get("manifests", []):
            name = manifest.get("annotations", {}).get(REFERENCE)
            if name and ":" in name:
                return str(name)
    else:
        for image in index:
            for tag in image.get("RepoTags") or []:
                return str(tag)
    return None


def write_single_program(program: Path, reference: str, architecture: str, archive: Path) -> None:
    """An image of one static program at the root, run as its entry point; same input, same bytes."""
    layer = _tar({program.name: program.read_bytes()}, mode=0o755)
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = {"layer.v1.tar": layer, "config.v1+json": json.dumps(config).encode()}
    layer_entry, config_entry = (_descriptor(f"image.{kind}", blob) for kind, blob in blobs.items())
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config_entry,
            "layers": [layer_entry],
        }
    ).encode()
    entry = _descriptor("image.manifest.v1+json", manifest)
    # containerd takes the first annotation for the image's name, other readers the second.
    entry["annotations"] = {"io.containerd.image.name": reference, REFERENCE: reference}
    files = {f"blobs/{_digest(blob).replace(':', '/')}": blob for blob in (*blobs.values(), manifest)}
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    archive.write_bytes(_tar(files, mode=0o644))


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _descriptor(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": f"application/vnd.oci.{kind}", "digest": _digest(blob), "size": len(blob)}


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
