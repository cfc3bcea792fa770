"""What the first process of a container needs before anything else is loaded."""

from __future__ import annotations

import os
import signal

FIRST = 1
TERMINATED = 128 + signal.SIGTERM


def end_when_told() -> None:
    """End at once on SIGTERM, until something better is known to do then.

    Any other process does so by itself. For the first one the kernel drops a signal that it has no handler for: a pod
    that was deleted while its server was still loading would stay for all the time that it may have to end.
    """
    if os.getpid() == FIRST:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
