"""How a verb ends that did not do what it was asked for: a line for people, and a code for programs.

PluginError
 ├─ NotDone         1  it was tried, and did not work out
 ├─ Unusable        2  what was asked for cannot be: wrong arguments, or no such object
 ├─ OutOfReach      3  the cluster or the storage does not answer, or does not let the user
 └─ TookTooLong     4  it goes on, and the time to wait for it is over
"""

from __future__ import annotations

from typing import Final

INTERRUPTED: Final = 130
"""The exit code of what Ctrl-C has ended."""
OUR_FAULT: Final = 70
"""The exit code of a fault of the plugin itself."""


class PluginError(Exception):
    """The text says in one line what happened and what to do."""

    code = 1


class NotDone(PluginError):
    """It was tried, and did not work out: a checkpoint that failed, a digest that does not match."""


class Unusable(PluginError):
    """What was asked for cannot be: the user has to ask for something else."""

    code = 2


class OutOfReach(PluginError):
    """The cluster or the storage cannot be used: it does not answer, or does not let the user."""

    code = 3


class NoAnswer(OutOfReach):
    """The API server does not answer now: asked again, it may."""


class TookTooLong(PluginError):
    """What was begun goes on without us."""

    code = 4
