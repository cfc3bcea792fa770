"""Write by write: the marks of tests that kill an operator at each write that it makes."""

from __future__ import annotations

import os

import pytest

STEP = 3


def kills(last: int, first: int = 1, *, all_of_them: bool) -> list[tuple[int, bool]]:
    """(write, after): at which write of `first` to `last` somebody is killed, and whether after it has landed. All of
    them, or every third, by turns before and after it."""
    writes = range(first, last + 1)
    if all_of_them:
        return [(write, after) for write in writes for after in (False, True)]
    return [(write, number % 2 == 1) for number, write in enumerate(writes[::STEP])]


def at_any_write(last: int, first: int = 1) -> pytest.MarkDecorator:
    """Gives a test `write` and `after`. With `N=1` and more it is all of them."""
    wanted = kills(last, first, all_of_them=int(os.environ.get("N", "0")) > 0)
    return pytest.mark.parametrize(("write", "after"), wanted)
