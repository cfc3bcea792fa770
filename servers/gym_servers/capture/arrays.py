"""Token ids and log-probabilities as raw little-endian arrays: four bytes a number, in memory and in records.

A long rollout has hundreds of thousands of them; as JSON they would take six times the space and longer to read.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any


def int32(values: Sequence[int] = ()) -> array[int]:
    return array("i", values)


def float32(values: Sequence[float] = ()) -> array[float]:
    return array("f", values)


def to_bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


class ArrayReader:
    """Takes arrays from the front of `data`, in the order in which they were written."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def ints(self, count: int) -> array[int]:
        return self._take(int32(), count)

    def floats(self, count: int) -> array[float]:
        return self._take(float32(), count)

    def end(self) -> None:
        """Raises ValueError where something is left over."""
        if self._at != len(self._data):
            raise ValueError("bytes are left over")

    def _take(self, values: array[Any], count: int) -> array[Any]:
        end = self._at + 4 * count
        if count < 0 or end > len(self._data):
            raise ValueError("token arrays are cut short")
        values.frombytes(self._data[self._at : end])
        if sys.byteorder == "big":
            values.byteswap()
        self._at = end
        return values
