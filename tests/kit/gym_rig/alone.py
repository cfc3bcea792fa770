"""Participants alone, with neither HTTP nor a cell: the episodes that tests of them speak of, and how a refusal is
read."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

R0, R1, R2 = (Episode("r", attempt) for attempt in range(3))


async def code(call: Awaitable[Any]) -> str:
    """Of the refusal in which the call must end."""
    with pytest.raises(ProtocolError) as refused:
        await call
    return refused.value.code


class Unseen(dict[Any, Any]):
    """A table that may be asked for a key, and not be walked over."""

    def _walked(self) -> Any:
        raise AssertionError("the whole table was walked over")

    __iter__ = items = values = keys = _walked
