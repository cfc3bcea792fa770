"""In which order the kinds of participant are asked. One table for every verb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

PREPARE = ("collection", "environment", "model", "agent", "resources")
RESUME = ("resources", "agent", "model", "environment", "collection")
RETIRE = (("environment",), ("agent",), ("model", "resources"), ("collection",))
OWNER = "environment"  # of episodes


class HasKind(Protocol):
    @property
    def kind(self) -> str: ...


T = TypeVar("T", bound=HasKind)


def staged(members: Sequence[T], order: Sequence[str | tuple[str, ...]]) -> list[list[T]]:
    """Members grouped into the stages of an order; empty stages are left out."""
    kinds = [(stage,) if isinstance(stage, str) else stage for stage in order]
    groups = [[member for member in members if member.kind in stage] for stage in kinds]
    return [group for group in groups if group]
