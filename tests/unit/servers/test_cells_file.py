"""What processes are told of how many cells there are."""

from __future__ import annotations

import pytest

from gym_servers.stack.cells import Cells, parse_cells


@pytest.mark.parametrize(("cells", "text"), [(Cells(3, 3), "3\n"), (Cells(2, 3), "2 3\n")])
def test_the_text_says_which_cells_are_to_be_and_which_are_there(cells: Cells, text: str) -> None:
    assert cells.text == text
    assert parse_cells(text) == cells


@pytest.mark.parametrize(("text", "cells"), [("0\n", Cells(1, 1)), ("3 2\n", Cells(3, 3))])
def test_numbers_that_cannot_be_mean_the_least_harm(text: str, cells: Cells) -> None:
    assert parse_cells(text) == cells


@pytest.mark.parametrize("text", ["", "\n", "two"])
def test_a_text_without_numbers_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cells(text)
