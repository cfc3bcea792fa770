"""The tokens that open the control port: the current one and, during a rotation, the one before it.

A pod has them in files of a Secret, which are replaced while it runs. Nobody can change a Secret, the operator and
every pod at the same moment, so for a while both tokens are good.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from gym_servers.stack.settings import SettingsError, read_optional_secret, read_secret

log = logging.getLogger("gym_servers")

TOKEN: Final = "GYM_CONTROL_TOKEN"
PREVIOUS: Final = "GYM_CONTROL_TOKEN_PREVIOUS"
LOOK_SECONDS: Final = 5.0
"""Between looks at files that may have been replaced."""


class ControlTokens:
    """Good tokens, at least one. `read` gives them anew and may raise SettingsError."""

    def __init__(self, read: Callable[[], Sequence[str]], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._read, self._monotonic = read, monotonic
        self._good = _headers(read())
        self._due = monotonic() + LOOK_SECONDS

    def admits(self, authorization: bytes) -> bool:
        """Whether an Authorization header bears a good token. Takes as long whether or not, and whichever."""
        self._look()
        found = [hmac.compare_digest(authorization, good) for good in self._good]  # all, whichever is good
        return any(found)

    def bearer(self) -> str:
        """The Authorization header of whoever calls with the current token."""
        self._look()
        return self._good[0].decode()

    def _look(self) -> None:
        if self._monotonic() < self._due:
            return
        self._due = self._monotonic() + LOOK_SECONDS
        try:
            self._good = _headers(self._read())
        except SettingsError as error:
            log.warning("the control token stays as it was: %s", error)


def only(token: str) -> ControlTokens:
    """One token, for good."""
    return ControlTokens(lambda: (token,), lambda: 0.0)


def tokens_of_process() -> ControlTokens:
    """The tokens that this process's files or environment name. Raises SettingsError."""
    return ControlTokens(_tokens)


def _tokens() -> Sequence[str]:
    previous = read_optional_secret(PREVIOUS)
    return (read_secret(TOKEN), previous) if previous else (read_secret(TOKEN),)


def _headers(tokens: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(f"Bearer {token}".encode() for token in tokens)
