"""From what went wrong to a line for people and an exit code: never a trace."""

from __future__ import annotations

import logging
import sys

from gym_operator.plugin.arguments import cli
from gym_operator.plugin.exits import OUR_FAULT, NotDone, OutOfReach, PluginError, Unusable
from gym_servers.log_level import log_as_told
from gym_servers.protocol.errors import ProtocolError
from gym_servers.stack.settings import SettingsError
from gym_servers.stack.spec import SpecError
from gym_servers.storage.store import StorageError


def main() -> None:
    """Read the command line and do it."""
    try:
        log_as_told("%(levelname)s %(name)s: %(message)s", otherwise="CRITICAL")
        cli(prog_name="kubectl gym")
    except Exception as error:
        logging.getLogger(__name__).debug("the verb ended", exc_info=True)
        print(f"kubectl gym: {as_told(error)}", file=sys.stderr)
        sys.exit(code_of(error))


def as_told(error: Exception) -> str:
    """One line for people."""
    match error:
        case ProtocolError():
            text = error.detail
        case PluginError() | StorageError() | SpecError() | SettingsError():
            text = str(error)
        case _:
            text = (
                f"a fault of this program ended it: {type(error).__name__}; set GYM_LOG_LEVEL=DEBUG to see where, "
                "and report it"
            )
    return " ".join(text.split())


def code_of(error: Exception) -> int:
    """The exit code that says what kind of end it was."""
    match error:
        case PluginError():
            return error.code
        case StorageError():
            return OutOfReach.code
        case ProtocolError():
            return NotDone.code
        case SpecError() | SettingsError():
            return Unusable.code
        case _:
            return OUR_FAULT
