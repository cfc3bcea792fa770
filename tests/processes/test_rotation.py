"""Keys and tokens are replaced under processes that run: no checkpoint is lost, and nothing is started again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_kit.bucket import Credentials, SeaweedFS
from gym_kit.faulty_s3 import FaultyS3, refusing
from gym_servers.control import tokens
from gym_servers.protocol.messages import PREFIX
from gym_servers.storage.s3_access import CREDENTIALS_FOLDER, KEYS

pytestmark = pytest.mark.timeout(300)


def put(path: Path, text: str) -> None:
    """As a kubelet does: never half a file."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(text)
    fresh.replace(path)


def put_keys(folder: Path, credentials: Credentials) -> None:
    for name, value in zip(KEYS, (credentials.access_key, credentials.secret_key), strict=True):
        put(folder / name, value)


async def test_keys_of_the_bucket_are_rotated_while_a_checkpoint_is_open(
    collecting: Callable[..., Any], s3: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    put_keys(folder, s3.credentials)
    monkeypatch.setenv(CREDENTIALS_FOLDER, str(folder))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "not-used")
    revoked = f"Credential={s3.credentials.access_key}/"
    with FaultyS3(s3.endpoint) as faulty:
        async with collecting(steps=16, endpoint=faulty.endpoint) as run:
            await run.progress()
            await run.take("during", "Committing", lambda: put_keys(folder, s3.spare))
            faulty.fault = refusing(
                403, "InvalidAccessKeyId", lambda asked: revoked in asked.headers["authorization"]
            )
            await run.progress()
            await run.take("after")
            run.kill("agent")
            await run.in_service(1)
            assert run.sources() == ["after"]
            counted = await run.end()
            assert counted.problems == []
            assert (counted.rows, counted.reward_mean, counted.restarted) == (4, 1.0, 0)


async def test_the_control_token_is_rotated_while_checkpoints_are_taken(
    collecting: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the least convenient order: the coordinator hears of the new token first, the processes much later."""
    current, previous = tmp_path / "control-token", tmp_path / "control-token-previous"
    put(current, "old-token")
    monkeypatch.setenv(f"{tokens.TOKEN}_FILE", str(current))
    monkeypatch.setenv(f"{tokens.PREVIOUS}_FILE", str(previous))
    async with collecting(steps=20) as run:
        await run.progress()
        controller = run.runner.controller

        def told() -> None:
            controller.settings = replace(controller.settings, token="new-token", previous_token="old-token")

        await run.take("told-meanwhile", "Committing", told)
        await run.take("told")
        put(current, "new-token")
        put(previous, "old-token")
        await run.take("mounted")
        urls = [
            f"http://127.0.0.1:{one['control_port']}{PREFIX}/status" for one in run.runner.host._settings.values()
        ]
        await run.until("the new token is good everywhere", lambda: answers(urls, "new-token") == {200})
        assert answers(urls, "old-token") == {200}, "and the old one still is"

        previous.unlink()
        controller.settings = replace(controller.settings, previous_token="")
        await run.until("the old token is good nowhere", lambda: answers(urls, "old-token") == {401})
        await run.take("alone")
        assert controller.record.attempt == 0, "nothing was started again"
        counted = await run.end()
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean) == (4, 1.0)


def answers(urls: list[str], token: str) -> set[int]:
    headers = {"authorization": f"Bearer {token}"}
    return {httpx.get(url, headers=headers, trust_env=False, timeout=5).status_code for url in urls}
