"""An image's name follows its content, and its archive tells its name."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from gym_kit.errors import KitError
from gym_kit.image import content_key, download_words, read_sources
from gym_kit.oci import reference_of, write_single_program

FILES = {"Dockerfile": b"FROM x", "servers/gym_servers/a.py": b"1", "servers/gym_servers/b.py": b"2"}


def test_the_key_ignores_order_and_notices_every_change() -> None:
    key = content_key(FILES, "base")

    assert content_key(dict(reversed(FILES.items())), "base") == key
    assert content_key(FILES, "other base") != key
    assert content_key({**FILES, "servers/gym_servers/b.py": b"3"}, "base") != key
    assert content_key({**FILES, "servers/gym_servers/c.py": b""}, "base") != key


def test_the_key_tells_apart_files_whose_bytes_only_moved() -> None:
    assert content_key({"a": b"12", "b": b"3"}, "base") != content_key({"a": b"1", "b": b"23"}, "base")
    assert content_key({"a": b"1", "b": b"2"}, "base") != content_key({"a": b"2", "b": b"1"}, "base")


def test_sources_leave_out_bytecode_and_name_what_is_missing(tmp_path: Path) -> None:
    for name in ("Dockerfile", "pyproject.toml", "requirements/runtime.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
    for name in ("operator/gym_operator", "servers/gym_servers"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "__pycache__/x.pyc").write_bytes(b"")
        (tmp_path / name / "code.py").write_text("")

    with pytest.raises(KitError, match=r"requirements/served\.txt is missing"):
        read_sources(tmp_path, "served")
    assert {*read_sources(tmp_path)} == {
        *("Dockerfile", "pyproject.toml", "requirements/runtime.txt"),
        *("operator/gym_operator/code.py", "servers/gym_servers/code.py"),
    }
    (tmp_path / "Dockerfile").unlink()
    with pytest.raises(KitError, match="Dockerfile is missing"):
        read_sources(tmp_path)


def test_wheels_are_asked_for_the_images_python_and_checked_by_hash() -> None:
    words = download_words(Path("runtime.txt"), Path("wheels"), "aarch64")

    assert {"--require-hashes", "--only-binary=:all:", "--python-version=3.13"} <= set(words)
    assert "--platform=manylinux_2_28_aarch64" in words


def test_a_written_image_archive_names_itself_and_is_the_same_each_time(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF")
    for name in ("one.tar", "two.tar"):
        write_single_program(program, "localhost/pause:1", "amd64", tmp_path / name)

    assert reference_of(tmp_path / "one.tar") == "localhost/pause:1"
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_the_reference_of_a_saved_docker_image_is_its_first_tag(tmp_path: Path) -> None:
    # Newer engines write both files, and their index.json holds the bare tag.
    index = {"manifests": [{"annotations": {"org.opencontainers.image.ref.name": "v1"}}]}
    manifest = [{"RepoTags": ["localhost/x:v1"]}]
    archive = tmp_path / "saved.tar"
    with tarfile.open(archive, "w") as tar:
        for name, content in (("index.json", index), ("manifest.json", manifest)):
            blob = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(blob)
            tar.addfile(member, io.BytesIO(blob))

    assert reference_of(archive) == "localhost/x:v1"


def test_a_file_that_is_no_archive_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"no tar" * 200)

    with pytest.raises(KitError, match=r"broken\.tar is no image archive"):
        reference_of(tmp_path / "broken.tar")
