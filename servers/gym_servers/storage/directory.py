"""A directory as an object store: for one machine, or a durable shared file system.

An object is written to a temporary file, synced, and linked to its name: a link fails where the name exists, so
creation is atomic, and a crash leaves either the whole object or none.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gym_servers.storage.store import ObjectConflict, ObjectMissing, StorageError, StorageProblem

_PROBLEMS: Final[Mapping[int, StorageProblem]] = {
    errno.ENOSPC: StorageProblem.FULL,
    errno.EDQUOT: StorageProblem.FULL,
    errno.EACCES: StorageProblem.ACCESS_DENIED,
    errno.EPERM: StorageProblem.ACCESS_DENIED,
    errno.EROFS: StorageProblem.ACCESS_DENIED,
}


class DirectoryStore:
    """Objects as files below `root`, which is made when it is first written to."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        try:
            temporary = self._write(path, data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                if path.read_bytes() != data:
                    raise ObjectConflict(f"{path} exists with other contents") from None
            finally:
                temporary.unlink()
            _sync(path.parent)
        except OSError as error:
            raise _unusable(path, error) from error

    def replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        try:
            self._write(path, data).replace(path)
            _sync(path.parent)
        except OSError as error:
            raise _unusable(path, error) from error

    def get(self, key: str) -> bytes:
        path = self._path(key)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise ObjectMissing(f"{path} does not exist") from error
        except OSError as error:
            raise _unusable(path, error) from error

    def fingerprint(self, key: str) -> tuple[int, str]:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
                return file.tell(), digest.hexdigest()
        except FileNotFoundError as error:
            raise ObjectMissing(f"{path} does not exist") from error
        except OSError as error:
            raise _unusable(path, error) from error

    def list(self, prefix: str) -> dict[str, int]:
        base = self._path(prefix) if prefix else self._root
        found = {}
        try:
            # Not by `rglob`, which passes over what it may not read: a store that is away would look empty.
            for folder, _, names in os.walk(base, onerror=_unless_missing):
                for name in names:
                    path = Path(folder, name)
                    if not name.startswith(".tmp-") and (size := _size(path)) is not None:
                        found[str(path.relative_to(self._root))] = size
        except OSError as error:
            raise _unusable(base, error) from error
        return found

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                _sync(path.parent)
        except NotADirectoryError:
            return
        except OSError as error:
            raise _unusable(path, error) from error

    def _path(self, key: str) -> Path:
        path = (self._root / key).absolute()
        if ".." in Path(key).parts or not path.is_relative_to(self._root):
            raise StorageError(f"key {key!r} leaves the store")
        return path

    @staticmethod
    def _write(path: Path, data: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)  # a full disk is not to be filled with what did not fit
            raise
        return temporary


def _unless_missing(error: OSError) -> None:
    """What is not there has no objects; anything else is no answer."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _size(path: Path) -> int | None:
    """A file's size in bytes; None where it is none, or is gone by now."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unusable(path: Path, error: OSError) -> StorageError:
    problem = _PROBLEMS.get(error.errno or 0, StorageProblem.FAILED)
    return StorageError(f"cannot use {path}: {error.strerror}; check its permissions and free space", problem)
