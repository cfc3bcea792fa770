"""Tables in the form that kubectl prints: a line of headings, columns under each other, nothing cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Final

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gym_operator.plugin.views.text import NOTHING

WIDEST: Final = 100_000
"""Columns of the page that tables are laid out on: what a terminal cannot show on a line it wraps, as for kubectl."""
BETWEEN: Final = 3


@dataclass(frozen=True)
class Table:
    """`title` stands above it, where there are several. A cell that is empty shows a dash."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


def rendered(tables: Sequence[Table]) -> str:
    """The tables under each other, a blank line between two; of those without rows nothing."""
    return "\n\n".join(_one(table) for table in tables if table.rows)


def _one(table: Table) -> str:
    laid_out = RichTable(box=None, padding=(0, BETWEEN, 0, 0), pad_edge=False, show_edge=False, header_style="")
    for heading in table.headings:
        laid_out.add_column(heading, no_wrap=True)
    for row in table.rows:
        # As it is: a name may look like markup, and a message may hold a line break.
        laid_out.add_row(*(Text(" ".join(cell.split()) or NOTHING) for cell in row))
    page = StringIO()
    Console(file=page, width=WIDEST, color_system=None, force_terminal=False).print(laid_out)
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    return "\n".join([f"{table.title}:", *lines] if table.title else lines)
