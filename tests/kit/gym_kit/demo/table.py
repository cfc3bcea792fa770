"""What a person sees while the demonstration runs: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gym_kit.demo.kube import Object


class Watch:
    """Shows a stack's status. `note` adds a line that stays."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._last = ""
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", highlight=False, markup=False)

    def show(self, stack: Object) -> None:
        status = stack.get("status") or {}
        cell = (status.get("cells") or [{}])[0]
        collection = cell.get("collection") or {}
        line = (
            f"{status.get('phase', 'Pending')}, attempt {cell.get('attempt', 0)}, "
            f"rows {collection.get('rows', 0)}/{collection.get('expected', '?')}"
        )
        if not self._console.is_terminal:
            if line != self._last:
                self.note(line)
            self._last = line
            return
        table = Table(title=line, title_justify="left")
        for column in ("participant", "pod", "session", "phase"):
            table.add_column(column)
        for one in cell.get("participants") or []:
            table.add_row(
                one["name"], one.get("pod") or "-", (one.get("session") or "-")[:8], one.get("phase") or "-"
            )
        self._live.update(table)
