"""vLLM with the tiny model, as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from gym_kit.errors import KitError
from gym_servers.local.stack import free_ports
from gym_vllm.journal import BEHIND, HOLD, JOURNAL, Generated, Streams

MODEL = Path(__file__).parent / "model"
NAME = "tiny"
LOOK_SECONDS = 0.05
START_SECONDS = 900.0  # it imports for minutes, and longer where others are at work
PROJECT = Path(__file__).parents[3]
ESTABLISHED = "01"  # as the kernel names it


@dataclass(frozen=True)
class Engine:
    """A running engine. `journal` has what it generated; `storage` is where its middleware stages cuts, for cells
    whose control token is `token`."""

    url: str
    journal: Streams
    storage: Path
    token: str

    def generated(self) -> list[Generated]:
        return self.journal.look()

    def own_count(self) -> int:
        """Tokens that the engine itself says it has generated since it started."""
        return self._metric("vllm:generation_tokens_total")

    def running(self) -> int:
        """Requests that the engine itself says it has, at work or waiting."""
        return self._metric("vllm:num_requests_running") + self._metric("vllm:num_requests_waiting{")

    @asynccontextmanager
    async def held_once(
        self, tokens: int, key: str = "", over: Callable[[], object] = lambda: False, seconds: float = 240.0
    ) -> AsyncIterator[None]:
        """It stands in the middle of a generation, as while a trainer changes weights, when streams of `key` have so
        many tokens in all, or all streams together so many from now on. It may be paused before. Raises
        AssertionError after `seconds`, or where it is `over` before."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60.0, trust_env=False) as client:
            try:
                give_up = time.monotonic() + seconds
                while True:
                    (await client.post(HOLD, params={"tokens": tokens, "key": key})).raise_for_status()
                    (await client.post("/resume")).raise_for_status()
                    while not (await client.get(HOLD)).json()["held"]:
                        assert not over(), "it was over before it could be interrupted"
                        assert time.monotonic() < give_up, "what the engine was to be held for has not come"
                        await asyncio.sleep(LOOK_SECONDS)
                    await self.stands()
                    if self._in_the_middle(key):
                        break
                    tokens = 1  # it has said its last words while it was told to stand
                yield
            finally:
                (await client.post(HOLD)).raise_for_status()
                (await client.post("/resume")).raise_for_status()

    def _in_the_middle(self, key: str) -> bool:
        return any(one.ids and not one.ended and key in ("", one.key) for one in self.generated())

    async def stands(self) -> None:
        """Returns once all that it had generated when it was held has passed."""
        before = None
        while before != (now := (self.own_count(), sum(len(one.ids) for one in self.generated()))):
            before = now
            await asyncio.sleep(LOOK_SECONDS)

    async def has_arrived(self, seconds: float = 60.0) -> None:
        """Returns once whoever is connected has read all that was sent, however busy this machine is."""
        give_up = time.monotonic() + seconds
        while _under_way(urlsplit(self.url).port or 0):
            assert time.monotonic() < give_up, "what the engine has sent is not read"
            await asyncio.sleep(LOOK_SECONDS)

    @contextmanager
    def one_behind(self) -> Iterator[None]:
        """The last message of each stream is on its way as long as the stream goes on."""
        try:
            httpx.post(f"{self.url}{BEHIND}?streams=1", timeout=60.0, trust_env=False).raise_for_status()
            yield
        finally:
            httpx.post(f"{self.url}{BEHIND}?streams=0", timeout=60.0, trust_env=False).raise_for_status()

    def pause(self) -> None:
        """Nothing is generated until it is to be held, or goes on."""
        httpx.post(f"{self.url}/pause?mode=keep", timeout=60.0, trust_env=False).raise_for_status()

    def go_on(self) -> None:
        httpx.post(f"{self.url}/resume", timeout=60.0, trust_env=False).raise_for_status()

    def _metric(self, name: str) -> int:
        text = httpx.get(f"{self.url}/metrics", timeout=30.0, trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return round(sum(float(line.rpartition(" ")[2]) for line in lines))


@contextmanager
def running_engine(
    folder: Path, model: Path = MODEL, *, host: str = "127.0.0.1", python: Path | None = None
) -> Iterator[Engine]:
    """Start it and wait until it serves. `python` is of an environment with vLLM, this one by default. Raises
    KitError with the end of its log where it does not."""
    port = free_ports(1)[0]
    journal = folder / "tokens.jsonl"
    engine = Engine(f"http://{host}:{port}", Streams(journal), folder / "storage", "a-control-token")
    engine.storage.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(PROJECT / part) for part in ("servers", "tests/kit")),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # trainers' routes
        JOURNAL: str(journal),
        "GYM_CUT_STORAGE": str(engine.storage),
        "GYM_CONTROL_TOKEN": engine.token,
    }
    arguments = [
        *("--model", str(model), "--served-model-name", NAME, "--host", host, "--port", str(port)),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32"),
        *("--middleware", "gym_vllm.journal.TokenJournal"),
        *("--middleware", "gym_servers.worker.middleware.GenerationCut"),
        *("--middleware", "gym_vllm.journal.OneBehind"),
    ]
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python or sys.executable), "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait(process, engine.url, log)
        yield engine
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > give_up:
            words = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise KitError(f"vLLM does not serve (exit code {process.returncode}); its log ends with:\n{words}")
        time.sleep(1.0)


def _under_way(port: int) -> bool:
    """Whether an open connection of this machine with this port at an end has bytes that were not read yet."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, queues, *_ = line.split()
        of_port = port in (int(local.partition(":")[2], 16), int(remote.partition(":")[2], 16))
        if of_port and state == ESTABLISHED and int(queues.replace(":", ""), 16):
            return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole session: the engine has workers of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
