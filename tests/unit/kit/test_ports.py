"""Ports are free together with their companions, and a crowded machine is an error, not an endless search."""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_kit.errors import KitError
from gym_kit.ports import COMPANION, FIRST, LAST, free_ports, is_free, pick_ports


@given(seed=st.integers(), taken=st.sets(st.integers(FIRST, LAST + COMPANION), max_size=500))
def test_picked_ports_differ_and_are_free_with_their_companions(seed: int, taken: set[int]) -> None:
    ports = pick_ports(9, lambda port: port not in taken, random.Random(seed))

    assert len(set(ports)) == 9
    assert not taken & {*ports, *(port + COMPANION for port in ports)}


def test_a_port_whose_companion_is_taken_is_no_choice() -> None:
    with pytest.raises(KitError, match="found no 1 free TCP ports"):
        pick_ports(1, lambda port: port <= LAST, random.Random(0))


def test_a_bound_port_does_not_count_as_free() -> None:
    (port,) = free_ports(1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()

        assert not is_free(port)
