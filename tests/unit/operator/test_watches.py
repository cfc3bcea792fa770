"""The framework, which is begun anew whenever it ends, and takes nothing of ours along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import kopf
import pytest

from gym_operator.effects.kube import CHECKPOINTS, NODES, PODS, RESTORES, SCHEDULES, STACKS, Resource
from gym_operator.handlers import watching as module
from gym_operator.handlers.watches import registry, set_up
from gym_operator.handlers.watching import Watching


class Framework:
    """In place of kopf's operator: tells of one pod for each round, and ends as it is told to."""

    def __init__(self, endings: list[BaseException | None]) -> None:
        self.endings, self.rounds = endings, 0

    async def operator(self, *, registry: kopf.OperatorRegistry, stop_flag: asyncio.Event, **_: Any) -> None:
        self.rounds += 1
        event = {"type": "ADDED", "object": {"metadata": {"name": f"round-{self.rounds}"}}}
        for handler in registry._watching.get_all_handlers():
            if handler.id == PODS.plural:
                await handler.fn(event=event)
        ending = self.endings.pop(0) if self.endings else None
        if ending is not None:
            raise ending
        await stop_flag.wait()


@asynccontextmanager
async def watching(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Watching, Any]]:
    told: asyncio.Queue[tuple[Resource, bool, str, bool]] = asyncio.Queue()
    here = threading.get_ident()

    def tell(resource: Resource, deleted: bool, body: Any) -> None:
        told.put_nowait((resource, deleted, body["metadata"]["name"], threading.get_ident() == here))

    monkeypatch.setattr(kopf, "operator", framework.operator)
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
    watches = Watching(tell, None, [])
    running = asyncio.create_task(watches.run())
    yield watches, told
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("error", [RuntimeError("an error inside of a watch"), SystemExit(1), None])
async def test_watches_that_end_are_opened_anew_and_end_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    framework = Framework([error, error])
    beside = asyncio.create_task(asyncio.Event().wait())  # the framework ends all tasks of its loop
    async with watching(framework, monkeypatch) as (watches, told):
        for number in (1, 2, 3):
            assert await asyncio.wait_for(told.get(), 10) == (PODS, False, f"round-{number}", True)
            if error is None:
                watches.reopen()
    assert not beside.done()
    beside.cancel()


async def test_nothing_is_told_of_a_round_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang, and then tell of what is long past."""
    tell: list[Any] = []

    async def hangs(*, registry: kopf.OperatorRegistry, **_: Any) -> None:
        tell.extend(each.fn for each in registry._watching.get_all_handlers() if each.id == PODS.plural)
        begun.set()
        await asyncio.to_thread(over.wait)

    begun, over = threading.Event(), threading.Event()
    framework = Framework([])
    monkeypatch.setattr(framework, "operator", hangs)
    monkeypatch.setattr(module, "END_SECONDS", 0.0)
    async with watching(framework, monkeypatch) as (watches, told):
        await asyncio.to_thread(begun.wait)
        watches.reopen()
        await tell[0](event={"type": "ADDED", "object": {"metadata": {"name": "late"}}})
        await asyncio.sleep(0)
        assert told.empty()
    over.set()


async def test_each_kind_has_a_handler_of_its_own() -> None:
    told = []
    handlers = registry(lambda *event: told.append(event), None, cluster_wide=True, nodes=True)
    for handler in handlers._watching.get_all_handlers():
        await handler.fn(event={"type": "DELETED", "object": {"of": handler.id}})
    assert told == [
        (kind, True, {"of": kind.plural}) for kind in (STACKS, CHECKPOINTS, SCHEDULES, RESTORES, PODS, NODES)
    ]


def test_the_framework_never_gives_an_api_server_up_and_never_waits_long_for_it() -> None:
    """After its last try it ends; its own backoffs grow to minutes."""
    settings = kopf.OperatorSettings()
    set_up(settings, cluster_wide=True)
    backoffs = settings.networking.error_backoffs
    assert not isinstance(backoffs, int | float)
    first = list(islice(backoffs, 10_000))
    assert len(first) == 10_000
    assert max(first) <= 5.0
    assert not hasattr(backoffs, "__len__"), "then it would be taken for finite"
