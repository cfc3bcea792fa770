"""The two documents of a checkpoint: a manifest per participant, and `checkpoint.json`, which publishes it.

`checkpoint.json` is written once, create-only: either the publication or a tombstone, by whoever gives the
checkpoint up. What landed is the truth, also for a coordinator that was away.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gym_servers.protocol.digests import canonical
from gym_servers.protocol.errors import ProtocolError

MANIFEST = "manifest.json"
CHECKPOINT = "checkpoint.json"


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_bytes(self) -> bytes:
        return canonical(self.model_dump(mode="json"))


class CodeIdentity(_Document):
    """What wrote the records. Another server class, or a newer record format, is refused at restore unless that is
    asked for. Image and configuration are kept for people: they change while rollouts go on."""

    image: str
    server: str
    config_digest: str
    record_format: int

    def reads(self, server: str, record_format: int) -> bool:
        """Whether it takes what this server class has written in this format."""
        return server == self.server and record_format <= self.record_format


class RecordEntry(_Document):
    """Where one record is: `pack` is a key below the checkpoint's directory."""

    id: str
    pack: str
    offset: int
    length: int
    sha256: str


class PackEntry(_Document):
    key: str
    size: int
    sha256: str


class Manifest(_Document):
    """What one participant wrote. `episodes`: the capture keys its records belong to, as it exported them. `marks`:
    the watermarks of its fence, rollout -> attempt."""

    format: Literal[1] = 1
    checkpoint_id: str
    kind: str
    instance: str
    session: str
    code: CodeIdentity
    episodes: list[str]
    marks: dict[str, int] = {}
    packs: list[PackEntry]
    records: list[RecordEntry]


class Member(_Document):
    """One participant of a published checkpoint."""

    kind: str
    instance: str
    session: str
    manifest_digest: str
    records: int
    bytes: int
    code: CodeIdentity

    @property
    def directory(self) -> str:
        """Where its manifest and packs are, below the checkpoint's."""
        return f"{self.kind}/{self.instance}"


class Publication(_Document):
    """`checkpoint.json`. `episodes`: the restorable set; `restarts`, `not_started`, `left_out`: those that ran and
    are not in it, since they cannot be continued, had not begun, or were not asked for. `labels` and `driver_state`
    are whoever asked's, kept as they are: the state is `{value}`, or `{uri, digest}`. A tombstone has state
    `abandoned` and no members."""

    format: Literal[1] = 1
    state: Literal["published", "abandoned"]
    checkpoint_id: str
    name: str
    stack_uid: str
    cell: int
    cell_attempt: int
    sequence: int
    created: float
    reason: str = ""
    members: list[Member] = []
    scope: list[str] = []
    episodes: list[str] = []
    restarts: list[str] = []
    not_started: list[str] = []
    left_out: list[str] = []
    labels: dict[str, str] = {}
    driver_state: dict[str, Any] | None = None

    @property
    def discontinued(self) -> list[str]:
        """Episodes that ran and are not in the restorable set: their attempts are over."""
        return sorted({*self.restarts, *self.not_started, *self.left_out})

    @property
    def order(self) -> tuple[int, int]:
        """Newest = highest."""
        return self.cell_attempt, self.sequence


def read_manifest(data: bytes) -> Manifest:
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(
            "invalid_checkpoint_state", "the manifest is not of a format this version reads"
        ) from error


def read_publication(data: bytes) -> Publication:
    try:
        return Publication.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(
            "invalid_checkpoint_state", "checkpoint.json is not of a format this version reads"
        ) from error
