"""Which cluster `auto` means, where things are kept, what is missing, and which versions are new enough."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gym_kit.bucket import Credentials, Ports, command, identities_file
from gym_kit.cluster import choose, current
from gym_kit.errors import KitError
from gym_kit.locking import exclusive
from gym_kit.packages import IMAGE, NODE, Requirement, missing_packages
from gym_kit.paths import built_in_place, cache_folder, private_folder, state_folder
from gym_kit.progress import Progress
from gym_kit.tools import version_of


@pytest.mark.parametrize(
    ("given", "docker", "meant"),
    [(True, True, "current"), (True, False, "current"), (False, True, "kind"), (False, False, "local")],
)
def test_auto_prefers_a_given_cluster_then_docker_then_processes(given: bool, docker: bool, meant: str) -> None:
    assert choose("auto", given, docker) == meant


def test_a_named_provider_is_taken_whatever_is_there() -> None:
    assert choose("local", kubeconfig_given=True, docker_answers=True) == "local"


def test_a_given_cluster_needs_a_kubeconfig_that_exists(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="set KUBECONFIG"):
        current.take(None)
    with pytest.raises(KitError, match="there is no kubeconfig"):
        current.take(tmp_path / "nowhere")


def test_folders_follow_the_xdg_variables() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/gym-operator")
    assert state_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/gym-operator")
    assert state_folder({}) == Path("/var/tmp/gym-operator")


def test_a_state_folder_too_long_for_sockets_is_refused_with_the_limit() -> None:
    with pytest.raises(KitError, match="at most 47 characters"):
        state_folder({"XDG_STATE_HOME": "/" + "x" * 60})


def test_a_private_folder_is_closed_to_others(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "state")

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_failed_build_leaves_nothing_and_a_finished_one_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "built"
    with pytest.raises(RuntimeError), built_in_place(target) as scratch:
        (scratch / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []

    with built_in_place(target) as scratch:
        (scratch / "whole").touch()
    assert [file.name for file in target.iterdir()] == ["whole"]


def test_the_holder_of_a_lock_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (
        exclusive(lock, "a test", Progress.silent()),
        pytest.raises(KitError, match=r"process \d+ \(a test\) holds .*lock"),
        exclusive(lock, "another", Progress.silent(), patience=0.0),
    ):
        pass


def test_missing_packages_are_named_once() -> None:
    needs = (Requirement("a", "both"), Requirement("b", "both"), Requirement("c", "other"))

    assert missing_packages(needs, lambda program: program == "c") == ["both"]
    assert missing_packages((*NODE, *IMAGE), lambda _: True) == []


@pytest.mark.parametrize(
    ("text", "version"),
    [("v1.34.5", (1, 34)), ("v3.14.0+g3fc9f4b\n", (3, 14)), ("4.1.4", (4, 1)), ("", (0, 0)), ("none", (0, 0))],
)
def test_versions_are_read_from_what_programs_print(text: str, version: tuple[int, int]) -> None:
    assert version_of(text) == version


def test_the_s3_server_reports_to_nobody_and_listens_on_the_given_address_alone() -> None:
    words = command(Path("weed"), Path("/data"), "10.0.0.1", Ports(1, 2, 3, 4), Path("/sockets"))

    assert {"-ip=10.0.0.1", "-ip.bind=10.0.0.1", "-master.telemetry=false", "-s3.autoCreateBucket=false"} <= set(
        words
    )


def test_a_secret_is_in_the_servers_file_but_not_in_what_is_printed() -> None:
    credentials = Credentials.random()

    assert credentials.secret_key in identities_file(credentials)
    assert credentials.secret_key not in repr(credentials)
    assert Credentials.random() != credentials
