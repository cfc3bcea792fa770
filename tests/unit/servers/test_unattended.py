"""A failure that nobody waits for any more is not logged with its traceback; who waits is told."""

from __future__ import annotations

import ast
import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from gym_servers.unattended import unattended

ROOT = Path(__file__).parents[3]


async def test_what_fails_when_everybody_has_left_goes_to_its_end_and_is_no_fault() -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        ended.set()
        raise ConnectionError("nobody hears this")

    async def wait() -> None:
        await asyncio.shield(unattended(work()))

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_end.set()
    await ended.wait()
    await asyncio.sleep(0)
    gc.collect()  # asyncio tells of a failure when its task is thrown away
    assert faults == []


async def test_who_still_waits_is_told() -> None:
    async def work() -> None:
        raise ConnectionError("somebody hears this")

    with pytest.raises(ConnectionError, match="somebody"):
        await asyncio.shield(unattended(work()))


def test_what_is_shielded_is_either_known_to_others_or_unattended() -> None:
    """A coroutine that is shielded where it is called is nobody's when its caller has been broken off."""
    nobodys = []
    for root in ("servers", "operator"):
        for path in (ROOT / root).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.shield":
                    (shielded,) = node.args
                    if isinstance(shielded, ast.Call) and ast.unparse(shielded.func) != "unattended":
                        nobodys.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not nobodys
