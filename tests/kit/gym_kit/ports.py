"""Picks free TCP ports outside the range from which the kernel takes ports for outgoing connections.

SeaweedFS binds each port it is given and that port plus 10000, so every picked port is free with its companion.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

from gym_kit.errors import KitError

COMPANION = 10_000
FIRST, LAST = 12_000, 21_999  # companions end at 31999, below Linux's default 32768-60999 for outgoing connections
ATTEMPTS = 2_000


def pick_ports(count: int, is_free: Callable[[int], bool], rng: random.Random) -> list[int]:
    """`count` different ports, each free together with its companion.

    Raises KitError when so many are taken that a search would not end.
    """
    picked: list[int] = []
    for _ in range(ATTEMPTS):
        if len(picked) == count:
            return picked
        port = rng.randint(FIRST, LAST)
        if port not in picked and is_free(port) and is_free(port + COMPANION):
            picked.append(port)
    raise KitError(f"found no {count} free TCP ports between {FIRST} and {LAST}: is something using them all?")


def is_free(port: int) -> bool:
    """Whether the port can be bound on every address of this machine right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without it a connection of an earlier server in TIME_WAIT would count as a user of the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    return pick_ports(count, is_free, random.Random())
