"""Numbers, lists and tables as people read them."""

from __future__ import annotations

import pytest

from gym_operator.plugin.views.table import Table, rendered
from gym_operator.plugin.views.text import age, count_of, size, some_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (119.9, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_800, "2d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_572_864, "1.5 MiB"), (3 * 1024**3, "3.0 GiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_the_largest_unit_holds_whatever_is_larger() -> None:
    assert size(5000 * 1024**4) == "5000.0 TiB"


def test_long_lists_are_cut_and_say_so() -> None:
    assert some_of(["a", "b"]) == "a, b"
    assert some_of([str(i) for i in range(12)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_a_number_goes_with_its_noun() -> None:
    assert [count_of(n, "rollout") for n in (0, 1, 2)] == ["0 rollouts", "1 rollout", "2 rollouts"]


def test_columns_stand_under_each_other_and_nothing_is_cut_off() -> None:
    long = "x" * 300
    text = rendered([Table(("NAME", "PHASE"), [["a", "Running"], [long, "Failed"]])])
    first, second, third = text.splitlines()
    assert first.index("PHASE") == second.index("Running") == third.index("Failed") == 303
    assert third == f"{long}   Failed"


def test_a_cell_without_anything_shows_a_dash_and_no_line_ends_in_blanks() -> None:
    assert rendered([Table(("NAME", "REASON"), [["a", ""]])]) == "NAME   REASON\na      -"
    assert all(line == line.rstrip() for line in rendered([Table(("A", "B"), [["long name", "b"]])]).splitlines())


def test_what_looks_like_markup_or_has_lines_stays_one_cell() -> None:
    assert rendered([Table(("A",), [["[red]x[/red]\ny"]])]) == "A\n[red]x[/red] y"


def test_tables_without_rows_are_left_out() -> None:
    assert rendered([Table(("A",), []), Table(("B",), [["1"]], "second")]) == "second:\nB\n1"
    assert rendered([Table(("A",), [["1"]]), Table(("B",), [["2"]])]) == "A\n1\n\nB\n2"
