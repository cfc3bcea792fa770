"""Shows a person what takes so long: one line per step on standard error, with the seconds that passed.

On a terminal the running step redraws itself every second; elsewhere (CI logs) a reminder is printed twice a minute.
`Progress.silent()` is what tests and `--json` callers hand in.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

REMIND_SECONDS = 30.0


class Progress:
    """Reports steps to `stream`; None reports nothing."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._depth = 0

    @classmethod
    def to_stderr(cls) -> Progress:
        return cls(sys.stderr)

    @classmethod
    def silent(cls) -> Progress:
        return cls(None)

    def note(self, text: str) -> None:
        """One finished line."""
        if self._stream is not None:
            print("  " * self._depth + text, file=self._stream, flush=True)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Shows `text` while the block runs and how long it took; steps may nest."""
        if self._stream is None:
            yield
            return
        started = self._clock()
        indent = "  " * self._depth
        done = threading.Event()
        # Nested steps print lines of their own, so only the outermost one may redraw its line.
        redraw = self._stream.isatty() and self._depth == 0
        ticker = threading.Thread(target=self._tick, args=(indent + text, started, done, redraw), daemon=True)
        if not redraw:
            print(f"{indent}{text} ...", file=self._stream, flush=True)
        ticker.start()
        self._depth += 1
        outcome = "failed after"
        try:
            yield
            outcome = "done in"
        finally:
            self._depth -= 1
            done.set()
            ticker.join()
            clear = "\r\x1b[K" if redraw else ""
            line = f"{clear}{indent}{text}: {outcome} {self._clock() - started:.1f} s"
            print(line, file=self._stream, flush=True)

    def _tick(self, text: str, started: float, done: threading.Event, redraw: bool) -> None:
        assert self._stream is not None
        while not done.wait(1.0 if redraw else REMIND_SECONDS):
            passed = self._clock() - started
            if redraw:
                self._stream.write(f"\r\x1b[K{text} ... {passed:.0f} s")
                self._stream.flush()
            else:
                print(f"{text} ... still at it after {passed:.0f} s", file=self._stream, flush=True)
