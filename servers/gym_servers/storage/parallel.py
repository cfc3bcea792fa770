"""Many small waits for a storage, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

PARALLEL: Final = 8

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What `work` makes of each item, in order; at most PARALLEL at once. Blocks. What has not begun when one fails
    is not begun any more; its error comes out when the others have ended."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        results = [pool.submit(work, item) for item in items]
        try:
            return [result.result() for result in results]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
