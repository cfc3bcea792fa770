"""What all kinds share: the metadata the rules look at, timestamps, and the lenient base of every status.

A status may have been written by a newer operator, so unknown fields of it are ignored; a spec is strict.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

from pydantic import ConfigDict, Field, StringConstraints

from gym_servers.stack.wire import WireModel

Timestamp = Annotated[str, StringConstraints(max_length=40), Field(json_schema_extra={"format": "date-time"})]
Digest = Annotated[str, StringConstraints(max_length=128)]
Uri = Annotated[str, StringConstraints(max_length=2048)]
Name = Annotated[str, StringConstraints(max_length=253)]
Message = Annotated[str, StringConstraints(max_length=1024)]
Reason = Annotated[str, StringConstraints(max_length=128)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]

MAX_MESSAGE: Final = 1024


class StatusModel(WireModel):
    """Base of everything below `status`."""

    model_config = ConfigDict(extra="ignore")


class ObjectMeta(StatusModel):
    """The part of an object's metadata that decisions are made from."""

    name: str
    namespace: str
    uid: str
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    finalizers: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


def format_time(now: float) -> Timestamp:
    """Unix seconds in the form Kubernetes uses, to the second."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: Timestamp) -> float:
    """Unix seconds of a timestamp of the API. Raises ValueError."""
    return datetime.fromisoformat(text).timestamp()


def clip(message: str, longest: int = MAX_MESSAGE) -> str:
    """A message no longer than a status may hold; the beginning says what happened and is kept."""
    return message if len(message) <= longest else f"{message[: longest - 3]}..."
