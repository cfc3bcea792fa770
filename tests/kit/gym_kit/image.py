"""Builds the project's image from the Dockerfile: with Docker where an engine answers, else with buildah as root.

An image is named by the hash of all that goes into it, so an unchanged one is neither built nor loaded again. Without
Docker there may be no registry either: the base is then a Debian tree made by debootstrap, and Python packages come
from wheels that pip downloads on this host, with this host's settings.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gym_kit import packages
from gym_kit.cluster.kind import docker_answers
from gym_kit.errors import KitError
from gym_kit.locking import exclusive
from gym_kit.paths import built_in_place, cache_folder
from gym_kit.progress import Progress
from gym_kit.run import run, succeeds

PROJECT = Path(__file__).parents[3]
NAME = "localhost/gym-operator"
SOURCES = ("Dockerfile", "pyproject.toml", "operator/gym_operator", "servers/gym_servers")
MODELS = "/opt/gym/models"
"""Where a test's image has the models that it was given."""
KEPT_ARCHIVES = 3
SUITE = "trixie"
SUITE_PYTHON = "3.13"
INCLUDED = ("python3", "python3-venv", "ca-certificates")
# As in the slim images: nothing of it is read at run time.
DISPENSABLE = (
    *("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian"),
    *("var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log", "dev"),
)
TIMEOUT = 3600.0


@dataclass(frozen=True)
class Extra:
    """What a test's image has beside ours: `files` by their path in the build's context, and the `steps` of a
    Dockerfile that put them there."""

    files: Mapping[str, bytes]
    steps: str


def models(files: Mapping[str, bytes]) -> Extra:
    """A model's files, by name."""
    return Extra({f"models/{name}": data for name, data in files.items()}, f"COPY models {MODELS}\n")


@dataclass(frozen=True)
class Image:
    """`reference` is what a pod names; `archive` is what `Cluster.load_image` takes."""

    reference: str
    archive: Path


def build(
    progress: Progress,
    project: Path = PROJECT,
    *,
    requirements: str = "runtime",
    extra: Extra | None = None,
) -> Image:
    """The image of the project as it lies there now, with one of the locks in requirements/, and `extra` for a test.
    Raises KitError if it cannot be built."""
    files = read_sources(project, requirements)
    if extra is not None:
        files["Dockerfile"] += b"\n" + extra.steps.encode()
        files.update(extra.files)
    with_docker = docker_answers()
    key = content_key(files, "docker" if with_docker else _base_key())
    image = Image(f"{NAME}:{key}", cache_folder() / "images" / f"{key}.tar")
    if image.archive.is_file():
        return image
    if not with_docker:
        if os.geteuid() != 0:
            raise KitError(
                "without a Docker engine the image is built by buildah, which needs root: run this as root"
            )
        packages.ensure_installed(packages.IMAGE, progress)
    with exclusive(cache_folder() / "images.lock", "building the image", progress):
        if not image.archive.is_file():
            with progress.step(f"building {image.reference}"):
                _build(image, files, with_docker, progress)
    return image


def read_sources(project: Path, requirements: str = "runtime") -> dict[str, bytes]:
    """Content of every file that goes into the image, by its path in the project."""
    files: dict[str, bytes] = {}
    for source in (*SOURCES, f"requirements/{requirements}.txt"):
        found = project / source
        if not found.exists():
            raise KitError(f"{found} is missing: the image cannot be built without it")
        for file in [found] if found.is_file() else sorted(found.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                files[str(file.relative_to(project))] = file.read_bytes()
    return files


def content_key(files: Mapping[str, bytes], base: str) -> str:
    """Short name of this content: the same for the same files in any order, another for any change."""
    digest = hashlib.sha256(base.encode())
    for name in sorted(files):
        digest.update(f"\0{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()[:16]


def _build(image: Image, files: Mapping[str, bytes], with_docker: bool, progress: Progress) -> None:
    image.archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=image.archive.parent, prefix=".build.") as scratch:
        context, archive = Path(scratch) / "context", Path(scratch) / "image.tar"
        for name, content in files.items():
            file = context / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        if with_docker:
            words = ["--build-arg", f"REQUIREMENTS={_requirements(context).stem}", "--tag", image.reference]
            run(["docker", "build", *words, context], timeout=TIMEOUT)
            run(["docker", "save", "--output", archive, image.reference], timeout=TIMEOUT)
        else:
            _with_buildah(image.reference, context, archive, progress)
        archive.rename(image.archive)
    _forget_old(image.archive.parent, with_docker)


def _with_buildah(reference: str, context: Path, archive: Path, progress: Progress) -> None:
    base = _base_image(progress)
    listed = _requirements(context)
    wheels = _wheels(listed.read_bytes(), progress)
    shutil.copytree(wheels, context / "requirements/wheels", copy_function=os.link)
    with progress.step("layers"):
        given = ("--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"REQUIREMENTS={listed.stem}")
        _buildah("build", "--layers", *given, "--tag", reference, str(context))
    with progress.step("archive"):
        # The fastest that containerd takes in: the archive never leaves this machine.
        compression = ("--compression-format=zstd", "--compression-level=1")
        _buildah("push", "--quiet", *compression, reference, f"oci-archive:{archive}:{reference}")


def _requirements(context: Path) -> Path:
    """The lock that was put there."""
    (found,) = (context / "requirements").glob("*.txt")
    return found


def _base_image(progress: Progress) -> str:
    """Reference of a Debian image with Python, made from a debootstrap tree if there is none yet."""
    reference = f"localhost/gym-base:{_base_key()}"
    if _has_image(reference):
        return reference
    tree = cache_folder() / f"base-{_base_key()}"
    if not tree.is_dir():
        with progress.step(f"installing Debian {SUITE} into a folder"), built_in_place(tree) as scratch:
            words = ["--variant=minbase", f"--include={','.join(INCLUDED)}", SUITE, str(scratch)]
            run(["debootstrap", *words], timeout=TIMEOUT)
            scratch.chmod(0o755)
    with progress.step("base image"):
        container = _buildah("from", "scratch").strip()
        root = _buildah("mount", container).strip()
        try:
            # Copied by hand because `buildah copy` gives every file to root.
            run(["cp", "-a", f"{tree}/.", root], timeout=TIMEOUT)
            for folder in DISPENSABLE:
                for entry in (Path(root) / folder).glob("*"):
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            _buildah("commit", "--quiet", container, reference)
        finally:
            _buildah("rm", container)
    return reference


def _base_key() -> str:
    recipe = " ".join((SUITE, platform.machine(), *INCLUDED, "without", *DISPENSABLE))
    return f"{SUITE}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"


def _wheels(requirements: bytes, progress: Progress) -> Path:
    """A folder of wheels for these requirements on the base's Python, whatever Python runs here."""
    folder = cache_folder() / f"wheels-{hashlib.sha256(requirements).hexdigest()[:16]}"
    if not folder.is_dir():
        with progress.step("downloading wheels"), built_in_place(folder) as scratch:
            listed = scratch.parent / "listed.txt"
            listed.write_bytes(requirements)
            run([sys.executable, "-m", "pip", *download_words(listed, scratch, platform.machine())], timeout=TIMEOUT)
    return folder


def download_words(requirements: Path, target: Path, machine: str) -> list[str]:
    """pip's words to fetch wheels for the base's Python; pip wants each platform tag it may take spelled out."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(41, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    words = ["download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(target)]
    words += ["--implementation=cp", f"--python-version={SUITE_PYTHON}"]
    words += [f"--platform={name}" for name in platforms]
    return [*words, "--requirement", str(requirements)]


def _has_image(reference: str) -> bool:
    return succeeds(_buildah_words("inspect", "--type=image", reference))


def _buildah(*words: str) -> str:
    return run(_buildah_words(*words), env={"BUILDAH_ISOLATION": "chroot"}, timeout=TIMEOUT)


def _buildah_words(*words: str) -> list[str]:
    """buildah with storage of its own, so that neither a person's images nor ours get in each other's way."""
    driver = _storage_driver()
    return ["buildah", *_storage_words(driver), *words]


def _storage_driver() -> str:
    # overlay shares layers where vfs copies the whole tree for each; it does not work on every file system.
    return "overlay" if succeeds(["buildah", *_storage_words("overlay"), "info"]) else "vfs"


def _storage_words(driver: str) -> list[str]:
    root = cache_folder() / f"buildah-{driver}"
    return ["--storage-driver", driver, "--root", str(root), "--runroot", "/run/gym-operator-buildah"]


def _forget_old(folder: Path, with_docker: bool) -> None:
    archives = sorted(folder.glob("*.tar"), key=lambda file: file.stat().st_mtime, reverse=True)
    # Not at every build: searching the store for layers that nobody needs takes seconds.
    if len(archives) <= 2 * KEPT_ARCHIVES:
        return
    for old in archives[KEPT_ARCHIVES:]:
        reference = f"{NAME}:{old.stem}"
        succeeds(["docker", "rmi", reference] if with_docker else _buildah_words("rmi", reference))
        old.unlink(missing_ok=True)
    if not with_docker:
        succeeds(_buildah_words("rmi", "--prune"), timeout=TIMEOUT)
