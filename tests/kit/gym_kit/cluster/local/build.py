"""Builds the node's programs from pinned Go modules into the cache: no release server and no registry is needed.

Takes a quarter of an hour on two cores the first time and about a minute while Go's own build cache is warm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gym_kit.cluster.local.settings import COREDNS, KUBERNETES
from gym_kit.errors import KitError
from gym_kit.locking import exclusive
from gym_kit.paths import built_in_place, cache_folder
from gym_kit.progress import Progress
from gym_kit.run import run, succeeds

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
GO_DIRECTIVE = "1.26.0"
LONGEST_BUILD = 3 * 3600.0

PAUSE_SOURCE = """package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
"""


def binaries_folder() -> Path:
    return cache_folder() / f"kubernetes-{KUBERNETES}"


def build_kubernetes(progress: Progress) -> Path:
    """The folder with all programs, built now if it is not in the cache. Raises KitError if the build fails."""
    folder = binaries_folder()
    if folder.is_dir():
        return folder
    if not succeeds(["go", "version"]):
        raise KitError(f"building Kubernetes {KUBERNETES} needs Go (1.21 or newer fetches what it lacks): install it")
    with exclusive(folder.with_name(f"{folder.name}.lock"), "building Kubernetes", progress):
        if not folder.is_dir():
            with (
                progress.step(f"building Kubernetes {KUBERNETES} from its Go modules (once; up to 20 minutes)"),
                built_in_place(folder) as scratch,
            ):
                _build_all(scratch, progress)
    return folder


def staging_replaces(go_mod: str, version: str) -> list[tuple[str, str]]:
    """Module and version for each staging module.

    Kubernetes' own go.mod points these at folders of its repository, which a module download does not contain; they
    are released under v0 with the same minor and patch number.
    """
    released = "v0." + version.removeprefix("v1.")
    names = re.findall(r"^\t(k8s\.io/\S+) => \./staging/", go_mod, re.MULTILINE)
    return [(name, released) for name in names]


def render_go_mod(
    requires: Sequence[tuple[str, str]], replaces: Sequence[tuple[str, str]], tools: Sequence[str]
) -> str:
    """A go.mod of a module that only exists to build other modules' programs at given versions."""
    lines = ["module gymkit", "", f"go {GO_DIRECTIVE}", ""]
    lines += [f"require {name} {version}" for name, version in requires]
    lines += [f"tool {tool}" for tool in tools]
    lines += [f"replace {name} => {name} {version}" for name, version in replaces]
    return "\n".join(lines) + "\n"


def version_flags(version: str) -> str:
    """Linker flags that make the programs report their release rather than v0.0.0."""
    major, minor = version.removeprefix("v").split(".")[:2]
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in values.items())


def _build_all(target: Path, progress: Progress) -> None:
    # The work folder lies beside the result for the same file system and is removed with it.
    work = target.parent / "work"
    commands = [f"k8s.io/kubernetes/cmd/{name}" for name in PROGRAMS]
    kubernetes = work / "kubernetes"
    kubernetes.mkdir(parents=True)
    with progress.step("downloading modules"):
        (kubernetes / "go.mod").write_text(render_go_mod([], [], []))
        run(["go", "mod", "download", f"k8s.io/kubernetes@{KUBERNETES}"], cwd=kubernetes, env=_env(target))
        source = Path(run(["go", "env", "GOMODCACHE"]).strip()) / f"k8s.io/kubernetes@{KUBERNETES}"
        replaces = staging_replaces((source / "go.mod").read_text(), KUBERNETES)
        (kubernetes / "go.mod").write_text(render_go_mod([("k8s.io/kubernetes", KUBERNETES)], replaces, commands))
        run(["go", "mod", "tidy"], cwd=kubernetes, env=_env(target), timeout=LONGEST_BUILD)
    flags = version_flags(KUBERNETES)
    for name, command in zip(PROGRAMS, commands, strict=True):
        _install(name, command, kubernetes, flags, target, progress)
    # CoreDNS wants other versions of the same dependencies, so it is built in a module of its own.
    coredns = work / "coredns"
    coredns.mkdir()
    (coredns / "go.mod").write_text(render_go_mod([], [], []))
    get = ["go", "get", "-tool", f"github.com/coredns/coredns@{COREDNS}"]
    run(get, cwd=coredns, env=_env(target), timeout=LONGEST_BUILD)
    _install("coredns", "github.com/coredns/coredns", coredns, "-s -w", target, progress)
    pause = work / "pause"
    pause.mkdir()
    (pause / "go.mod").write_text(render_go_mod([], [], []))
    (pause / "main.go").write_text(PAUSE_SOURCE)
    build: list[str | Path] = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", target / "pause", "."]
    run(build, cwd=pause, env=_env(target), timeout=LONGEST_BUILD)


def _install(name: str, package: str, module: Path, flags: str, target: Path, progress: Progress) -> None:
    with progress.step(name):
        install = ["go", "install", "-trimpath", "-ldflags", flags, package]
        run(install, cwd=module, env=_env(target), timeout=LONGEST_BUILD)


def _env(target: Path) -> dict[str, str]:
    return {"CGO_ENABLED": "0", "GOBIN": str(target), "GOWORK": "off"}
