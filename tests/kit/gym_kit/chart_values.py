"""Whether a chart's values are described: each in a comment for people, and in the schema for helm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml


def assert_documented(chart: Path) -> None:
    """Every value has a `# --` comment of its own or of what it is part of, and its place in values.schema.json."""
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())
    described = _described((chart / "values.yaml").read_text())
    silent = [path for path in _leaves(values) if not any(path[: size + 1] in described for size in range(len(path)))]
    assert not silent, f"values.yaml says nothing of {['.'.join(path) for path in silent]}"
    unknown = [path for path in _leaves(values) if not _allowed(schema, path)]
    assert not unknown, f"values.schema.json does not have {['.'.join(path) for path in unknown]}"


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name)


def _described(text: str) -> set[tuple[str, ...]]:
    """The paths of keys that stand right below a `# --` comment."""
    found: set[tuple[str, ...]] = set()
    path: list[tuple[int, str]] = []
    comment = False
    for line in text.splitlines():
        if line.strip().startswith("#"):
            comment = comment or line.strip().startswith("# --")
            continue
        match = re.match(r"^( *)([A-Za-z0-9_]+):", line)
        if match is not None:
            depth = len(match[1])
            path = [(at, name) for at, name in path if at < depth] + [(depth, match[2])]
            if comment:
                found.add(tuple(name for _, name in path))
        comment = False
    return found


def _allowed(schema: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    node: Mapping[str, Any] = schema
    for name in path:
        if "$ref" in node:
            node = schema["definitions"][node["$ref"].rpartition("/")[2]]
        if name not in node.get("properties", {}):
            return not node.get("properties") and node.get("additionalProperties") is not False
        node = node["properties"][name]
    return True
