"""Manifests that tests of several modules read."""

from __future__ import annotations

from typing import Any

STACK: dict[str, Any] = {
    "kind": "GymStack",
    "metadata": {"name": "demo"},
    "spec": {
        "servers": [
            {"name": "env", "kind": "environment", "server": "single-agent-turn"},
            {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://127.0.0.1:1"}},
            {"name": "agent", "kind": "agent", "server": "simple-agent"},
            {"name": "counter", "kind": "resources", "server": "counter"},
        ],
        "checkpoints": {"storage": {"directory": "/tmp/none"}},
    },
}
"""The smallest stack of counter rows for the local runner."""
