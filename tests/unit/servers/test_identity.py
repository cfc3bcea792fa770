"""Names of episodes: every valid one survives the way through a capture key, everything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_servers.http.episode_path import PREFIX, episode_path
from gym_servers.protocol.identity import (
    MAX_ATTEMPT,
    MAX_ROLLOUT_ID,
    Episode,
    InvalidIdentity,
    next_attempt,
    parse_key,
)

LETTERS = "abcXYZ019"
ROLLOUTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True).filter(
    lambda name: not name.rpartition("-a")[2].isdigit() or "-a" not in name
)
ATTEMPTS = st.integers(0, 10_000)


@given(ROLLOUTS, ATTEMPTS)
def test_every_episode_is_told_back_by_its_capture_key(rollout: str, attempt: int) -> None:
    episode = Episode(rollout, attempt)
    assert parse_key(episode.key) == episode
    assert episode_path(episode, "/x") == f"{PREFIX}{episode.key}/x"


@given(ROLLOUTS, ATTEMPTS, ROLLOUTS, ATTEMPTS)
def test_two_episodes_never_share_a_capture_key(one: str, first: int, other: str, second: int) -> None:
    assert (Episode(one, first) == Episode(other, second)) == (Episode(one, first).key == Episode(other, second).key)


@given(st.text(max_size=30))
def test_whatever_is_read_as_a_key_is_written_the_same_way(key: str) -> None:
    try:
        episode = parse_key(key)
    except InvalidIdentity:
        return
    assert episode.key == key


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".hidden",
        "-dash",
        "_under",
        "a b",
        "a/b",
        "a\n",
        "ä",
        "x-a1",
        "x-a0",
        "x-a007",
        "a" * (MAX_ROLLOUT_ID + 1),
        "..",
        "%2e",
    ],
)
def test_names_that_would_be_ambiguous_or_unsafe_in_a_path_are_refused(name: str) -> None:
    with pytest.raises(InvalidIdentity):
        Episode(name, 0)


@pytest.mark.parametrize("key", ["x-a0", "x-a01", "x-a1-a2", "-a1", "a b-a1", "x-a-1 "])
def test_keys_that_are_not_canonical_are_refused(key: str) -> None:
    with pytest.raises(InvalidIdentity):
        parse_key(key)


@pytest.mark.parametrize("name", ["x-a", "x-ab1", "x-a1b", "a1", "x.a1", "x--a1b", "a" * MAX_ROLLOUT_ID])
def test_names_that_only_look_like_a_suffix_are_fine(name: str) -> None:
    assert parse_key(name) == Episode(name, 0)


def test_negative_attempts_are_refused() -> None:
    with pytest.raises(InvalidIdentity, match="count from 0"):
        Episode("x", -1)


@pytest.mark.parametrize("attempt", [MAX_ATTEMPT + 1, 10**400])
def test_attempts_have_an_end(attempt: int) -> None:
    with pytest.raises(InvalidIdentity, match=f"end at {MAX_ATTEMPT}"):
        Episode("x", attempt)
    for digits in (str(attempt), "9" * 5000):  # more than Python would read as a number
        with pytest.raises(InvalidIdentity, match=f"end at {MAX_ATTEMPT}"):
            parse_key(f"x-a{digits}")
    assert parse_key(Episode("x", MAX_ATTEMPT).key).attempt == MAX_ATTEMPT


@given(st.none() | st.integers(0, 50), st.integers(0, 50))
def test_the_next_attempt_is_above_the_last_one_and_not_below_the_cells(last: int | None, cell: int) -> None:
    attempt = next_attempt(last, cell)
    assert attempt >= cell
    assert last is None or attempt > last
    assert attempt in (cell, (last or 0) + 1)
