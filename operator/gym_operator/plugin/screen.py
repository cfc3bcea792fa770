"""What goes where: what was asked for to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, TextIO

import yaml
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gym_operator.plugin.views.table import Table, rendered


class Output(StrEnum):
    """How a table is printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


Document = Mapping[str, Any]
Tables = Callable[[bool], Sequence[Table]]
"""The tables of something; with True, wide ones."""


class Screen:
    """Where a verb says what it has to say."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._told = ""
        self._live: Live | None = None
        self._shown = ""

    def show(self, output: Output, document: Document, tables: Tables) -> None:
        """What was asked for: a document for programs, or tables."""
        self.line(_text(output, document, tables))

    def line(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def tell(self, text: str) -> None:
        """Progress: a line where it differs from the one before."""
        if text != self._told:
            self._told = text
            print(text, file=self._err, flush=True)

    def update(self, output: Output, document: Document, tables: Tables) -> None:
        """What was asked for, as it is now: in place on a terminal, elsewhere again where it has changed."""
        text = _text(output, document, tables)
        if self._out.isatty() and output in (Output.TABLE, Output.WIDE):
            if self._live is None:
                self._live = Live(console=Console(file=self._out), auto_refresh=False, vertical_overflow="visible")
                self._live.start()
            self._live.update(Text(text), refresh=True)
        elif text != self._shown:
            self.line(f"\n{text}" if self._shown and output in (Output.TABLE, Output.WIDE) else text)
        self._shown = text

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None


def _text(output: Output, document: Document, tables: Tables) -> str:
    match output:
        case Output.JSON:
            return json.dumps(document, indent=2)
        case Output.YAML:
            # A document of its own each time: a watch prints several.
            return "---\n" + yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True).rstrip()
        case _:
            return rendered(tables(output is Output.WIDE))
