"""The settings one server process starts with.

Whoever starts processes (the operator on Kubernetes, the local runner elsewhere) renders a stack's spec into
one such document per server; a process reads it once and never again. Secrets are not part of it: the control
token, the cookie secret and S3 credentials come from files or environment variables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

DATA_PORT = 8000
CONTROL_PORT = 8001

AWAIT_FINAL = "GYM_AWAIT_FINAL"
"""Variable of a process whose end leaves it time: told to end, it waits for a last checkpoint. No setting: it says
how the process is run, and not what it does."""

ParticipantKind = Literal["environment", "model", "agent", "resources", "collection"]


class SettingsError(ValueError):
    """The settings or a secret are missing or not usable; the message says what to change."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StackIdentity(_Model):
    """Which stack this is. The UID, never the name, tells two stacks apart (it is part of every storage key)."""

    namespace: str
    name: str
    uid: str


class Peer(_Model):
    """Another server of the same cell: `url` is its data address."""

    kind: ParticipantKind
    url: str


class S3Encryption(_Model):
    """How objects are encrypted at rest. Without `kms_key_id`, SSE-KMS uses the account's own key."""

    type: Literal["SSE-S3", "SSE-KMS"]
    kms_key_id: str | None = None


class S3Settings(_Model):
    """Where an S3 bucket is and how it is written to. Credentials and trusted certificates are no part of it: see
    `gym_servers.storage.s3_access`."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    addressing_style: Literal["path", "virtual", "auto"] = "auto"
    encryption: S3Encryption | None = None


class StorageSettings(_Model):
    """Exactly one place for checkpoints: a bucket, or a directory for local use."""

    s3: S3Settings | None = None
    directory: str | None = None


class CheckpointSettings(_Model):
    """`enabled: false` installs no control route and builds no record. `coordinated` processes start closed.
    `external_driver`: somebody without storage of his own drives, so an environment uses his attempt numbers up."""

    enabled: bool = False
    coordinated: bool = True
    lease_grace_seconds: float = Field(60.0, gt=0)
    attempt_floor: bool = True
    external_driver: bool = False


class CollectionSettings(_Model):
    """The driver's job: `tasks` and `output` are URIs (`s3://...` or a path); `repeats` rollouts per task."""

    tasks: str
    output: str
    repeats: int = Field(1, ge=1)
    concurrency: int = Field(64, ge=1)
    max_failures: int = Field(3, ge=1)


class ServerSettings(_Model):
    """Everything a process needs to know about itself, its peers and its storage.

    `cells_file` says which cells there are (`gym_servers.stack.cells`), and may change while the process runs;
    without one this is the only cell.
    """

    stack: StackIdentity
    cell: int = Field(0, ge=0)
    name: str
    kind: ParticipantKind
    server: str
    config: dict[str, Any] = Field(default_factory=dict)
    peers: dict[str, Peer] = Field(default_factory=dict)
    host: str = "0.0.0.0"
    data_port: int = DATA_PORT
    control_port: int = CONTROL_PORT
    checkpoint: CheckpointSettings = CheckpointSettings()
    storage: StorageSettings = StorageSettings()
    collection: CollectionSettings | None = None
    cells_file: str | None = None
    image: str = ""

    def peers_of(self, kind: ParticipantKind) -> dict[str, Peer]:
        """The peers of one kind, by name."""
        return {name: peer for name, peer in self.peers.items() if peer.kind == kind}


def load_settings(path: Path, cell: int | None = None) -> ServerSettings:
    """Read a settings file (JSON or YAML). `{cell}` inside any text stands for the cell's number, so that all
    cells share one document; `cell` overrides the number in it.

    Raises SettingsError with every wrong field named.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise SettingsError(f"cannot read settings {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"settings {path} are not valid: not a text in UTF-8") from error
    try:
        document = yaml.safe_load(text)
        if not isinstance(document, dict):
            raise SettingsError(f"settings {path} are not valid: write one mapping of names to values")
        number = cell if cell is not None else document.get("cell", 0)
        document = yaml.safe_load(text.replace("{cell}", str(number)))
        return ServerSettings.model_validate({**document, "cell": number})
    except (yaml.YAMLError, ValidationError) as error:
        raise SettingsError(f"settings {path} are not valid: {describe(error)}") from error


def describe(error: Exception) -> str:
    """An error of a document in one line: where, and what is wrong; never the offending value."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'document'}: {e['msg']}" for e in error.errors())
    return str(error)


def read_secret(name: str) -> str:
    """A secret from the file named by `<name>_FILE`, else from the environment variable `<name>`.

    Raises SettingsError naming the variable, never the value.
    """
    file = os.environ.get(f"{name}_FILE")
    if file:
        try:
            value = Path(file).read_text().strip()
        except OSError as error:
            raise SettingsError(f"cannot read {name}_FILE={file}: {error.strerror}") from error
    else:
        value = os.environ.get(name, "").strip()
    if not value:
        raise SettingsError(f"no secret: set {name}_FILE to a file that holds it, or {name}")
    return value


def read_optional_secret(name: str) -> str:
    """As `read_secret`; empty where there is none, also where its file is not there."""
    try:
        return read_secret(name)
    except SettingsError:
        return ""
