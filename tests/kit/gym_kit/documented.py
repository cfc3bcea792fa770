"""What the pages of docs give people to paste: who tries it takes it from there."""

from __future__ import annotations

from typing import Any

import yaml

from gym_kit.image import PROJECT


def plugin_role() -> dict[str, Any]:
    """The Role of docs/kubectl-gym.md that is just enough for every verb."""
    page = (PROJECT / "docs" / "kubectl-gym.md").read_text()
    blocks = (part.partition("```")[0] for part in page.split("```yaml\n")[1:])
    (block,) = [block for block in blocks if "kind: Role\n" in block]
    role: dict[str, Any] = yaml.safe_load(block)
    return role
