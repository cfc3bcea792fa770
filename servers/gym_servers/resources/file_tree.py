"""A directory as a JSON value and back: the same files give the same value. Links are kept, never followed."""

from __future__ import annotations

import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

Tree = list[dict[str, Any]]


class TreeTooLarge(Exception):
    """More files or bytes than may be kept; the message says how many."""


def snapshot(root: Path, max_bytes: int, max_files: int) -> Tree:
    """Everything below `root`, by path: files, directories and links; sockets and pipes are left out. Blocks. Raises
    TreeTooLarge, OSError."""
    tree: Tree = []
    size = 0
    for folder, names, files in os.walk(root, onerror=_raise):
        for name in [*names, *files]:
            path = Path(folder, name)
            found = path.lstat()
            entry: dict[str, Any] = {"path": _quoted(path.relative_to(root)), "mode": stat.S_IMODE(found.st_mode)}
            if stat.S_ISLNK(found.st_mode):
                tree.append({**entry, "kind": "link", "target": quote_from_bytes(os.fsencode(path.readlink()))})
            elif stat.S_ISDIR(found.st_mode):
                tree.append({**entry, "kind": "dir"})
            elif stat.S_ISREG(found.st_mode):
                size += found.st_size
                if size > max_bytes:
                    raise TreeTooLarge(f"its files hold more than {max_bytes} bytes")
                data = path.read_bytes()
                tree.append({**entry, "kind": "file", "data": b64encode(data).decode()})
            if len(tree) > max_files:
                raise TreeTooLarge(f"it holds more than {max_files} files")
    return sorted(tree, key=lambda entry: str(entry["path"]))


def _raise(error: OSError) -> None:
    raise error


def check(tree: Any, max_bytes: int) -> Tree:
    """A snapshot from elsewhere. Raises ValueError, KeyError or TypeError for one that could not have been taken: a
    path that leads out of the directory, also by way of a link, is never written."""
    folders = {entry["path"] for entry in tree if entry["kind"] == "dir"}
    seen: set[str] = set()
    size = 0
    for entry in tree:
        path = entry["path"]
        parts = PurePosixPath(os.fsdecode(unquote_to_bytes(path)))
        if parts.is_absolute() or ".." in parts.parts or not parts.parts or path in seen:
            raise ValueError(f"path {path!r}")
        if len(parts.parts) > 1 and _quoted(parts.parent) not in folders:
            raise ValueError(f"path {path!r} is in no directory")
        seen.add(path)
        if entry["kind"] not in ("file", "dir", "link") or not 0 <= int(entry["mode"]) <= 0o7777:
            raise ValueError(f"entry {path!r}")
        if entry["kind"] == "file":
            size += len(b64decode(entry["data"], validate=True))
        elif entry["kind"] == "link":
            unquote_to_bytes(entry["target"])
    if size > max_bytes:
        raise ValueError(f"{size} bytes are more than {max_bytes}")
    return list(tree)


def build(root: Path, tree: Sequence[dict[str, Any]]) -> None:
    """Make `root` what a checked snapshot says. Blocks. Raises OSError."""
    root.mkdir(parents=True, mode=0o700)
    by_depth = sorted(tree, key=lambda entry: str(entry["path"]).count("/"))
    for entry in by_depth:
        path = _path(root, entry)
        if entry["kind"] == "dir":
            path.mkdir(mode=0o700)
        elif entry["kind"] == "file":
            path.write_bytes(b64decode(entry["data"]))
            path.chmod(entry["mode"])
        else:
            path.symlink_to(os.fsdecode(unquote_to_bytes(entry["target"])))
    for entry in reversed(by_depth):
        if entry["kind"] == "dir":
            _path(root, entry).chmod(entry["mode"])


def contents(tree: Tree) -> dict[str, bytes]:
    """The regular files of a snapshot."""
    return {
        os.fsdecode(unquote_to_bytes(entry["path"])): b64decode(entry["data"])
        for entry in tree
        if entry["kind"] == "file"
    }


def of_texts(files: dict[str, str]) -> Tree:
    """A snapshot of text files, with the directories they need."""
    folders = {parent for name in files for parent in PurePosixPath(name).parents if parent.parts}
    tree: Tree = [{"path": _quoted(folder), "mode": 0o755, "kind": "dir"} for folder in folders]
    for name, text in files.items():
        data = b64encode(text.encode()).decode()
        tree.append({"path": _quoted(PurePosixPath(name)), "mode": 0o644, "kind": "file", "data": data})
    return sorted(tree, key=lambda entry: str(entry["path"]))


def _quoted(path: PurePosixPath | Path) -> str:
    return quote_from_bytes(os.fsencode(str(path)))


def _path(root: Path, entry: dict[str, Any]) -> Path:
    return root / os.fsdecode(unquote_to_bytes(entry["path"]))
