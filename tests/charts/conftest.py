"""Rendering charts with helm itself, into objects a test can look at."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_kit import tools
from gym_rig.virtual import VirtualLoop

CHARTS = Path(__file__).parents[2] / "charts"


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], VirtualLoop]]:
    """Where an operator works under a rendered role, time is virtual."""
    return {"virtual": VirtualLoop}


Objects = dict[tuple[str, str], dict[str, Any]]
Helm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Runs helm in the charts folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(tools.helm()), *arguments], cwd=CHARTS, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture(scope="session")
def render(helm: Helm) -> Callable[..., Objects]:
    """`render(chart, values)` -> the rendered objects by (kind, name)."""

    def objects(chart: str, values: dict[str, Any] | None = None, release: str = "rel") -> Objects:
        done = helm("template", release, chart, "--namespace=team", *_set(values or {}))
        assert done.returncode == 0, done.stderr
        documents = [d for d in yaml.safe_load_all(done.stdout) if d]
        by_name = {(d["kind"], d["metadata"]["name"]): d for d in documents}
        # RBAC per namespace repeats names; nothing else may.
        repeated = [d for d in documents if d["kind"] in ("Role", "RoleBinding")]
        assert len(by_name) + len(repeated) >= len(documents)
        by_name |= {(d["kind"], f"{d['metadata']['namespace']}/{d['metadata']['name']}"): d for d in repeated}
        return by_name

    return objects


@pytest.fixture(scope="session")
def refuse(helm: Helm) -> Callable[[str, dict[str, Any]], str]:
    """`refuse(chart, values)` -> what helm says; the chart must not render."""

    def message(chart: str, values: dict[str, Any]) -> str:
        done = helm("template", "rel", chart, *_set(values))
        assert done.returncode != 0, f"rendered in spite of {values}"
        return done.stderr

    return message


def _set(values: dict[str, Any]) -> list[str]:
    # As JSON: what reaches the chart has the type a values file would give it.
    return [part for key, value in values.items() for part in ("--set-json", f"{key}={json.dumps(value)}")]


def pod_specs(objects: Objects) -> dict[str, dict[str, Any]]:
    """Every pod spec among the objects, by the name of what holds it."""
    return {
        name: body["spec"] if kind == "Pod" else body["spec"]["template"]["spec"]
        for (kind, name), body in objects.items()
        if kind in ("Pod", "Deployment", "StatefulSet", "Job")
    }


@pytest.fixture(scope="session")
def assert_restricted() -> Callable[[Objects], None]:
    """Every pod of a chart meets the restricted Pod Security Standard and has a read-only root."""

    def check(objects: Objects) -> None:
        specs = pod_specs(objects)
        assert specs
        for spec in specs.values():
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in spec["containers"]:
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert security["readOnlyRootFilesystem"] is True

    return check
