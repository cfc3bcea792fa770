"""Measures a real operator process against a real API server without nodes, with a proxy between that counts."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from gym_bench import objects
from gym_bench.options import Options
from gym_bench.process import usage
from gym_bench.report import Point, mebibytes, per_minute
from gym_kit import operator_process
from gym_kit.api_proxy import ApiProxy
from gym_kit.bucket import SeaweedFS
from gym_kit.cluster.local.api_only import api_server_only
from gym_kit.errors import KitError
from gym_kit.faulty_s3 import FaultyS3
from gym_kit.ports import free_ports
from gym_kit.progress import Progress
from gym_operator.effects.kube import CHECKPOINTS, SCHEDULES, SECRETS, STACKS, ApiKube, Conflict, connect

AT_ONCE: Final = 16
"""Requests under way while objects are made."""
SETTLE_SECONDS: Final = 40
"""After the start, before the operator counts as being at rest: it lists everything once after half a minute."""
START_SECONDS: Final = 300.0
CHANGE_SECONDS: Final = 60.0


class Bench:
    """The cluster and the operator before it. `points` measures."""

    def __init__(self, options: Options, progress: Progress, folder: Path) -> None:
        self._options, self._progress, self._folder = options, progress, folder
        self._health_port = free_ports(1)[0]
        self._operator: subprocess.Popen[bytes] | None = None
        self._stacks: dict[str, str] = {}
        self._schedules: dict[int, str] = {}
        self._made = 0

    async def points(self) -> list[Point]:
        """With a tenth of the history, and with all of it. Raises KitError."""
        async with self._ready():
            with self._progress.step("an operator without any object"):
                await self._start()
                await self._until("it is ready", self._is_ready, START_SECONDS)
                await asyncio.sleep(min(5, self._options.rest_seconds))
                started = mebibytes(usage(self._pid).rss)
            with self._progress.step(f"making {self._options.stacks} stacks, {self._options.schedules} schedules"):
                await self._make_stacks()
            with self._progress.step("the operator makes what belongs to them, and tries their storage"):
                await self._until("every stack is in order", self._all_in_order, START_SECONDS, interval=3.0)
                await self._stop()
            found = []
            for history in (self._options.checkpoints // 10, self._options.checkpoints):
                with self._progress.step(f"making checkpoints until there are {history}"):
                    await self._make_checkpoints(history)
                found.append(await self._point(started))
            return found

    async def _point(self, started: float) -> Point:
        with self._progress.step("starting the operator, until it has looked at every stack"):
            self._way.calls.clear()
            began, asked_before = time.monotonic(), len(self._s3.asked)
            await self._start()
            await self._until("it is ready", self._is_ready, START_SECONDS)
            ready = time.monotonic() - began
            await self._until("every stack was looked at", self._all_looked_at, START_SECONDS)
            seen = time.monotonic() - began
            loaded, start_calls = usage(self._pid), sum(self._way.calls.values())
            start_s3 = len(self._s3.asked) - asked_before
        with self._progress.step(f"letting it come to rest, {SETTLE_SECONDS} s"):
            await asyncio.sleep(SETTLE_SECONDS)
        with self._progress.step(f"watching it at rest, {self._options.rest_seconds} s"):
            before, asked = usage(self._pid), len(self._s3.asked)
            self._way.calls.clear()
            began = time.monotonic()
            await asyncio.sleep(self._options.rest_seconds)
            seconds = time.monotonic() - began
            calls = Counter({f"{call.verb} {call.resource}": n for call, n in self._way.calls.items()})
            after, asked = usage(self._pid), len(self._s3.asked) - asked
        with self._progress.step(f"{self._options.changes} changes of specs"):
            reconcile = [await self._timed_change(number) for number in range(self._options.changes)]
        with self._progress.step("the operator tries every storage whose spec has changed"):
            # What is left untried the next operator tries, and holds a client for it that none before it held.
            await self._until("every stack is in order", self._all_in_order, START_SECONDS, interval=1.0)
        peak = usage(self._pid).peak
        await self._stop()
        return Point(
            checkpoints=self._made,
            rss_started=started,
            rss_loaded=mebibytes(loaded.rss),
            rss_rest=mebibytes(after.rss),
            rss_peak=mebibytes(peak),
            ready_seconds=round(ready, 2),
            all_seen_seconds=round(seen, 2),
            start_calls=start_calls,
            start_s3_requests=start_s3,
            cpu_start_seconds=round(loaded.cpu, 2),
            cpu_per_minute=round(60 * (after.cpu - before.cpu) / seconds, 2),
            calls=per_minute(calls, seconds),
            s3_requests=round(60 * asked / seconds, 1),
            reconcile=reconcile,
        )

    # ---- the cluster --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _ready(self) -> AsyncIterator[None]:
        server = await asyncio.to_thread(lambda: api_server_only(self._progress))
        with server, ApiProxy(server.kubeconfig, self._folder) as self._way:
            s3 = SeaweedFS(self._folder / "s3")
            s3.start()
            try:
                s3.create_bucket(objects.BUCKET)
                self._kube: ApiKube = await connect(str(server.kubeconfig))
                with FaultyS3(s3.endpoint) as self._s3:
                    await operator_process.install_crds(self._kube)
                    keys = s3.credentials
                    values = {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}
                    secret = {"metadata": {"name": objects.SECRET}, "stringData": values}
                    await self._kube.create(SECRETS, objects.NAMESPACE, secret)
                    yield
            finally:
                await self._stop()
                await self._kube.close()
                s3.kill()

    async def _make_stacks(self) -> None:
        async def make(number: int) -> None:
            made = await self._kube.create(STACKS, objects.NAMESPACE, objects.stack(number, self._s3.endpoint))
            uid = made["metadata"]["uid"]
            self._stacks[made["metadata"]["name"]] = uid
            status = objects.stack_status(uid, number)
            await self._kube.replace_status(STACKS, objects.NAMESPACE, {**made, "status": status})

        async def schedule(number: int) -> None:
            made = await self._kube.create(SCHEDULES, objects.NAMESPACE, objects.schedule(number))
            self._schedules[number] = made["metadata"]["uid"]

        await _each(make, range(self._options.stacks))
        await _each(schedule, range(self._options.schedules))

    async def _make_checkpoints(self, until: int) -> None:
        async def make(number: int) -> None:
            of = number % self._options.stacks
            name = objects.stack_name(of)
            body = objects.checkpoint(number, name, self._schedules.get(of))
            made = await self._kube.create(CHECKPOINTS, objects.NAMESPACE, body)
            status = objects.checkpoint_status(number, self._stacks[name], self._s3.endpoint)
            await self._kube.replace_status(CHECKPOINTS, objects.NAMESPACE, {**made, "status": status})

        await _each(make, range(self._made, until))
        self._made = until

    async def _change(self, name: str) -> int:
        """Change the spec of a stack; the generation that came of it."""
        while True:
            body = await self._kube.get(STACKS, objects.NAMESPACE, name)
            seconds = 60 + body["metadata"]["generation"] % 100
            body["spec"]["checkpoints"]["prepareTimeout"] = f"{seconds}s"
            try:
                changed = await self._kube.replace(STACKS, objects.NAMESPACE, body)
            except Conflict:
                continue  # its status was written meanwhile
            return int(changed["metadata"]["generation"])

    async def _timed_change(self, number: int) -> float:
        name = objects.stack_name(number % self._options.stacks)
        generation = await self._change(name)
        began = time.monotonic()

        async def is_told() -> bool:
            return _observed(await self._kube.get(STACKS, objects.NAMESPACE, name)) >= generation

        await self._until(f"the status of {name} speaks of its change", is_told, CHANGE_SECONDS, interval=0.02)
        return time.monotonic() - began

    async def _all_in_order(self) -> bool:
        listing = await self._kube.list_all(STACKS, objects.NAMESPACE)
        return all(in_order(body) for body in listing.items)

    async def _all_looked_at(self) -> bool:
        return (await asyncio.to_thread(self._health)).get("looked") == self._options.stacks

    # ---- the operator -------------------------------------------------------------------------------------

    @property
    def _pid(self) -> int:
        if self._operator is None or self._operator.poll() is not None:
            raise KitError(f"the operator has ended; it said last:\n{self._last_words()}")
        return self._operator.pid

    async def _start(self) -> None:
        self._operator = operator_process.start(self._way.kubeconfig, self._health_port, self._log)

    async def _stop(self) -> None:
        operator, self._operator = self._operator, None
        if operator is not None:
            operator.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(operator.wait, 60)
            finally:
                operator.kill()

    async def _is_ready(self) -> bool:
        return bool((await asyncio.to_thread(self._health)).get("ok"))

    def _health(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health_port}/healthz", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (urllib.error.URLError, OSError):
            return {}

    async def _until(
        self, what: str, holds: Callable[[], Awaitable[bool]], seconds: float, interval: float = 0.1
    ) -> None:
        give_up = time.monotonic() + seconds
        while not await holds():
            if time.monotonic() > give_up:
                raise KitError(f"{what}: not within {seconds:g} s; the operator said last:\n{self._last_words()}")
            assert self._pid
            await asyncio.sleep(interval)

    @property
    def _log(self) -> Path:
        return self._folder / "operator.log"

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""


def _observed(body: dict[str, Any]) -> int:
    return int((body.get("status") or {}).get("observedGeneration", -1))


def in_order(body: dict[str, Any]) -> bool:
    """Whether the status speaks of the spec as it is, and says that its storage was tried and does."""
    generation = int(body["metadata"]["generation"])
    conditions = (body.get("status") or {}).get("conditions") or ()
    proved = any(
        each["type"] == "StorageReady" and each["status"] == "True" and each.get("observedGeneration") == generation
        for each in conditions
    )
    return proved and _observed(body) >= generation


async def _each(do: Callable[[Any], Awaitable[object]], among: Iterable[Any]) -> None:
    """A few at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(what: Any) -> None:
        async with places:
            await do(what)

    async with asyncio.TaskGroup() as group:
        for each in among:
            group.create_task(one(each))
