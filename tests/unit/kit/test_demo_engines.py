"""An engine is interrupted in the middle of a generation, and goes on whatever becomes of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import pytest

from gym_kit.demo import engines
from gym_kit.demo.engines import in_mid_generation
from gym_kit.errors import KitError
from gym_vllm.journal import Generated


def stream(tokens: int, *, ended: bool = False) -> Generated:
    return Generated("r", "1", [1], list(range(tokens)), ended=ended)


@dataclass
class FakeEngine:
    """Shows one look after the other, the last one for ever."""

    looks: list[list[Generated]]
    holds: int = 0
    moments: int = 0

    def __post_init__(self) -> None:
        self._coming: Iterator[list[Generated]] = chain(self.looks, repeat(self.looks[-1]))

    def values(self, stack: str, release: str) -> dict[str, Any]:
        return {}

    def generated(self) -> list[Generated]:
        return next(self._coming)

    def hold(self) -> None:
        self.holds += 1

    def go_on(self) -> None:
        self.holds -= 1
        self.moments += 1


def test_it_works_on_until_enough_was_said_and_something_is_unsaid() -> None:
    engine = FakeEngine([[stream(5)], [stream(9)], [stream(15, ended=True)], [stream(15, ended=True), stream(1)]])
    with in_mid_generation(engine, 10):
        assert (engine.holds, engine.moments) == (1, 2)
    assert engine.holds == 0


def test_it_goes_on_where_what_was_done_meanwhile_failed() -> None:
    engine = FakeEngine([[stream(5)]])
    with pytest.raises(ZeroDivisionError), in_mid_generation(engine, 0):
        raise ZeroDivisionError
    assert engine.holds == 0


def test_it_says_so_where_everything_has_been_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MIDDLE_SECONDS", 0.1)
    engine = FakeEngine([[stream(5, ended=True)]])
    with pytest.raises(KitError, match="may have ended already"), in_mid_generation(engine, 0):
        pass
    assert engine.holds == 0
