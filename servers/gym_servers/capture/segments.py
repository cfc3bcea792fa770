"""Files that hold many calls each: written once, read in any part, gone once nothing of them is needed.

They are this process's alone: what a dead one left is of no use, since a fresh one restores a checkpoint. So nothing
is waited for until it is on the disk, and no file stays open.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError

PREFIX = "gym-ledgers-"
# Tells this process from an earlier one of its number, as in a container that was restarted.
RUN = uuid.uuid4().hex[:12]
SEGMENT_BYTES = 1024 * 1024  # of a file, about: the disk is given back file by file
# What this process lacks for a moment: no fault of a file.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Damaged(ProtocolError):
    """What was put into a file is not there any more as it was: `checkpoint_error` for whoever needs it."""

    def __init__(self, detail: str) -> None:
        super().__init__("checkpoint_error", f"captured calls are lost: {detail}")


@dataclass(eq=False, slots=True)
class Segment:
    """A file, and how often its parts are still needed: each as long as it is kept, and by each of its readers."""

    path: Path
    needed: int


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where one part is."""

    segment: Segment
    offset: int
    size: int
    digest: str


class Segments:
    """`folder` is where they go, a temporary one by default; a folder in it is made when it is first needed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._own: Path | None = None

    def write(self, parts: Sequence[bytes]) -> list[Place]:
        """Put these into one file. Raises OSError; then there is none."""
        segment = Segment(self._place() / uuid.uuid4().hex, len(parts))
        places, offset = [], 0
        for part in parts:
            places.append(Place(segment, offset, len(part), sha256(part)))
            offset += len(part)
        try:
            segment.path.write_bytes(b"".join(parts))
        except OSError:
            segment.path.unlink(missing_ok=True)
            raise
        return places

    def hold(self, place: Place) -> None:
        """Somebody reads a part: it is needed once more, until it is freed again."""
        place.segment.needed += 1

    def free(self, place: Place) -> None:
        """A part is not needed any more, by one of those who did."""
        place.segment.needed -= 1
        if not place.segment.needed:
            place.segment.path.unlink(missing_ok=True)

    def _place(self) -> Path:
        if self._own is None:
            parent = self._folder or Path(tempfile.gettempdir())
            parent.mkdir(parents=True, exist_ok=True)
            for left in parent.glob(f"{PREFIX}*"):
                if _is_left_over(left.name):
                    shutil.rmtree(left, ignore_errors=True)
            self._own = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{RUN}-", dir=parent))
        # Somebody may have cleaned up: without it all that follows would stay in memory.
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._own


def read(place: Place) -> bytes:
    """A part, as it was written. Raises Damaged, and `checkpoint_error` where it cannot be read just now."""
    try:
        with place.segment.path.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.size)
    except OSError as error:
        reason = f"a ledger's file cannot be read: {error.strerror}"
        if error.errno in _SHORTAGES:
            raise ProtocolError("checkpoint_error", reason) from error
        raise Damaged(reason) from error
    if sha256(data) != place.digest:
        raise Damaged("a ledger's file does not match its digest")
    return data


def _is_left_over(name: str) -> bool:
    """Whether a folder is of a process that has ended: one is killed without notice, and cleans nothing up."""
    number, _, rest = name.removeprefix(PREFIX).partition("-")
    if number == str(os.getpid()):
        return not rest.startswith(RUN)
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False
    return False
