"""What a program logs: as much as `GYM_LOG_LEVEL` says, and of libraries warnings alone."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from gym_servers.stack.settings import SettingsError

VARIABLE: Final = "GYM_LOG_LEVEL"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LIBRARIES: Final = (
    *("kopf", "httpx", "httpcore", "kubernetes", "aiohttp", "asyncio"),
    *("boto3", "botocore", "s3transfer", "urllib3"),
)
"""Below a warning they tell whatever they send and get: session tokens and trajectories too."""


def log_as_told(form: str, *, otherwise: str = "INFO", file: Path | None = None) -> None:
    """Log in this form, to standard error or from now on to a file; at the level `otherwise` where none is set.
    Raises SettingsError."""
    level = (os.environ.get(VARIABLE) or otherwise).upper()
    if level not in LEVELS:
        raise SettingsError(
            f"{VARIABLE} is {level}, which is no level: write {', '.join(LEVELS[:-1])} or {LEVELS[-1]}"
        )
    logging.basicConfig(filename=file, level=level, format=form, force=file is not None)
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(max(logging.getLogger().level, logging.WARNING))
