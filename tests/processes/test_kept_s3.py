"""The S3 server that `make demo KEEP=1` leaves up."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_kit import kept
from gym_kit.bucket import SeaweedFS


def test_what_is_left_up_is_ended_by_another_process_with_all_that_it_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "state_folder", lambda: tmp_path)
    left = [SeaweedFS(kept.new_folder()) for _ in range(2)]
    try:
        for server in left:
            server.start()
        assert kept.end_all() == 2
        assert not any(server.running for server in left)
        assert list((tmp_path / "kept").iterdir()) == []
        assert kept.end_all() == 0
    finally:
        for server in left:
            server.kill()
