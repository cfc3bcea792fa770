"""The one error this package raises for what a person can put right.

The command line prints its text and nothing else; whoever raises it says what to do next.
"""

from __future__ import annotations


class KitError(Exception):
    """Something outside this package is missing or refused; the text names it and the way out."""
