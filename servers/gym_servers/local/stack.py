"""A GymStack manifest on this machine: ports, secrets and settings of its processes."""

from __future__ import annotations

import secrets
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gym_servers.registry import check_server
from gym_servers.stack.render import Ports, checkpoint_root, render_settings
from gym_servers.stack.settings import SettingsError, StackIdentity, describe
from gym_servers.stack.spec import StackSpec, check_stack_name, parse_spec


@dataclass(frozen=True)
class LocalStack:
    """A stack ready to run: `settings` per server, `environment` with its secrets, and where checkpoints go."""

    identity: StackIdentity
    spec: StackSpec
    settings: dict[str, dict[str, Any]]
    environment: dict[str, str] = field(repr=False)
    root: str


def read_manifest(path: Path) -> dict[str, Any]:
    """The GymStack of a YAML file. Raises SettingsError."""
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text()) if isinstance(d, dict)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read {path}: {describe(error)}") from error
    stacks = [d for d in documents if d.get("kind") == "GymStack"]
    if len(stacks) != 1:
        raise SettingsError(f"{path} holds {len(stacks)} GymStacks; one is needed")
    return stacks[0]


def local_stack(manifest: dict[str, Any], folder: Path) -> LocalStack:
    """Prepare a manifest for this machine. The stack's UID and secrets are kept in `folder`, so that a later run
    there continues. Raises SpecError, SettingsError."""
    spec = parse_spec(manifest.get("spec"))
    metadata = manifest.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
    check_stack_name(name, spec)
    participants = spec.participants()
    for participant in participants:
        check_server(participant.kind, participant.server)
    if spec.cells > 1:
        raise SettingsError(
            f"the local runner runs one cell, not {spec.cells}: set cells: 1, or create the stack in a cluster"
        )
    if spec.inference is not None:
        raise SettingsError(
            "the local runner starts no engine: leave spec.inference out, and set config.base_url of the model server"
        )
    if not spec.checkpoints.enabled or spec.checkpoints.storage is None:
        raise SettingsError("the local runner coordinates by checkpoints: set checkpoints.storage.directory")
    folder.mkdir(parents=True, exist_ok=True)
    ports = free_ports(2 * len(participants))
    ports_of = {p.name: Ports(ports[2 * i], ports[2 * i + 1]) for i, p in enumerate(participants)}
    identity = StackIdentity(namespace="local", name=name, uid=_kept(folder / "uid", lambda: str(uuid.uuid4())))
    return LocalStack(
        identity,
        spec,
        render_settings(
            identity,
            spec,
            lambda server: f"http://127.0.0.1:{ports_of[server].data}",
            host="127.0.0.1",
            ports_of=lambda server: ports_of[server],
        ),
        {
            "GYM_CONTROL_TOKEN": _kept(folder / "control-token", lambda: secrets.token_urlsafe(32)),
            "GYM_COOKIE_SECRET": _kept(folder / "cookie-secret", lambda: secrets.token_urlsafe(32)),
        },
        checkpoint_root(spec.checkpoints.storage, identity, 0),
    )


def _kept(path: Path, make: Callable[[], str]) -> str:
    """A value that is made once. Raises SettingsError."""
    try:
        if not path.exists() or not path.stat().st_size:  # empty where its disk was full
            path.touch(mode=0o600)
            path.write_text(make())
        return path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"cannot use {path}: {error.strerror}; check its permissions and free space") from error


def free_ports(count: int) -> list[int]:
    """Ports that are free now. All are held until all are known, so that none is given twice."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
