"""What a driver outside of the stack hands over with a checkpoint, what it is given back after a recovery, and what
it has to know then."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gym_operator.api.objects import Count, Digest, Name, StatusModel, Uri
from gym_servers.protocol.digests import canonical
from gym_servers.stack.wire import FREE_OBJECT, WireModel, matches, rule, with_rules

MAX_VALUE_BYTES: Final = 8192
"""Of a driver's state as JSON: it is copied into the stack's status."""
MAX_ROLLOUTS: Final = 20
"""How many rollouts of each sort a status names after a recovery; the environment's /ng-rollout-state has all of
them."""

_EITHER = "give the driver's state as value, or as uri and digest"
_BOTH = "uri needs digest beside it, the SHA-256 of what is there"
_TOO_LARGE = (
    f"value is more than {MAX_VALUE_BYTES} bytes of JSON: put it into a bucket, and write its uri and digest instead"
)


class DriverState(WireModel):
    """A driver's own state: a small object, or where a large one is."""

    model_config = with_rules(
        rule("has(self.value) != has(self.uri)", _EITHER), rule("has(self.uri) == has(self.digest)", _BOTH)
    )

    value: Annotated[dict[str, Any], Field(max_length=64, json_schema_extra=FREE_OBJECT)] | None = None
    """The state itself, at most 8 KiB as JSON. Not for secrets."""
    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = None
    """Where the state is. It is given back as it stands here, and never read."""
    digest: (
        Annotated[
            str, StringConstraints(max_length=64), matches(r"^[0-9a-f]{64}$", "write the 64 hex digits of a SHA-256")
        ]
        | None
    ) = None
    """SHA-256 of what is at the URI."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.value is None) == (self.uri is None):
            raise PydanticCustomError("driver_state", _EITHER)
        if (self.uri is None) != (self.digest is None):
            raise PydanticCustomError("driver_state", _BOTH)
        if self.value is not None and len(canonical(self.value)) > MAX_VALUE_BYTES:
            raise PydanticCustomError("driver_state", _TOO_LARGE)
        return self


class KeptDriverState(StatusModel):
    """A driver's own state, as it came with a checkpoint."""

    value: Annotated[dict[str, Any] | None, Field(json_schema_extra=FREE_OBJECT)] = None
    """The state itself."""
    uri: Uri | None = None
    """Where the state is."""
    digest: Digest | None = None
    """SHA-256 of what is at the URI."""


class RestoredCheckpoint(StatusModel):
    """What was handed over with the checkpoint that a recovery continued from."""

    name: Name
    """Name of the GymCheckpoint."""
    id: Name
    """Id of the checkpoint, as participants and storage know it."""
    labels: Annotated[
        dict[str, Annotated[str, StringConstraints(max_length=256)]], Field(default_factory=dict, max_length=16)
    ]
    """Its labels, such as the trainer's step."""
    driver_state: KeptDriverState | None = None
    """The driver's own state."""


class ContinuedRollout(StatusModel):
    """A rollout that goes on where it was."""

    rollout: Name
    """Id of the rollout."""
    attempt: Count
    """The attempt to send it under."""


class Continuation(StatusModel):
    """What the cell's last recovery continues. Whatever else was under way starts over from its input, under an
    attempt not below this one."""

    attempt: Count
    """The cell attempt it began."""
    checkpoint: Name | None = None
    """Id of the checkpoint it continued from; absent if it began from the input."""
    continued_count: Count = 0
    """Rollouts that go on where they were."""
    continued: Annotated[tuple[ContinuedRollout, ...], Field(max_length=MAX_ROLLOUTS)] = ()
    """The first rollouts that go on where they were."""
    started_over_count: Count = 0
    """Rollouts that ran when the checkpoint was taken, and that it could not continue."""
    started_over: Annotated[tuple[Name, ...], Field(max_length=MAX_ROLLOUTS)] = ()
    """The first of them. Those that began after the checkpoint start over too."""
