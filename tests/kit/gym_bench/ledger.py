"""`make bench-ledger`: what the capture ledger of a policy server costs at 1,000 and at 10,000 rollouts.

Each size is measured in a process of its own: memory, open files, bytes on disk, how long a call takes to be captured
and a manifest to be answered, and what an idle process costs. Writes build/bench/ledger.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.ledger import CallRecord
from gym_servers.capture.store import CACHE_BYTES, LedgerStore
from gym_servers.capture.tokens import Span
from gym_servers.control.tokens import only
from gym_servers.http.apps import base_app
from gym_servers.model.capture_routes import PREFIX, add_capture_routes
from gym_servers.participants.gate import Gate
from gym_servers.participants.model import ModelParticipant
from gym_servers.participants.model_call import Asked, Call
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.identity import Episode

SIZES = (1_000, 10_000)
CALLS = 6  # of each rollout: a turn each
GENERATED, BETWEEN, FIRST = 200, 60, 400  # tokens of a reply, of what comes between two, of the first prompt
AT_ONCE = 64
MANIFESTS = 300
IDLE_SECONDS = 5.0
SURVEYS = 200
OUTPUT = Path(__file__).parents[3] / "build" / "bench" / "ledger.json"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of rollouts")
    options.add_argument("--output", type=Path, default=OUTPUT, help="where the figures go")
    options.add_argument("--one", type=int, help="measure one number of rollouts here, and print it")
    options.add_argument("--cache-bytes", type=int, default=CACHE_BYTES)
    options.add_argument("--training", action="store_true", help="replies bring token ids along (return_token_ids)")
    chosen = options.parse_args()
    if chosen.one is not None:
        print(json.dumps(asyncio.run(measured(chosen.one, chosen.cache_bytes, training=chosen.training))))
        return 0
    found = []
    for training in (False, True):
        for rollouts in chosen.sizes:
            words = ["--one", str(rollouts), *(["--training"] if training else [])]
            done = subprocess.run(
                [sys.executable, "-m", "gym_bench.ledger", *words], check=True, stdout=subprocess.PIPE, text=True
            )
            found.append(json.loads(done.stdout))
            print(told(found[-1]))
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    cores, load = os.cpu_count(), os.getloadavg()
    whole = {"machine": {"cores": cores, "load": load}, "calls_of_a_rollout": CALLS, "sizes": found}
    chosen.output.write_text(json.dumps(whole, indent=2) + "\n")
    print(f"load {load[0]:.1f} on {cores} cores; {chosen.output}")
    return 0


def told(one: dict[str, Any]) -> str:
    return (
        f"{one['rollouts']:>6} rollouts{' with token ids in replies' if one['training'] else ''}: "
        f"{one['rss_mib']:.0f} MiB ({one['kib_a_rollout']:.1f} KiB a rollout), {one['open_files']} open files, "
        f"{one['disk_mib']:.0f} MiB in {one['disk_files']} files; append {one['append_ms']}, "
        f"manifest {one['manifest_ms']}; idle {one['idle_cpu_percent']:.2f} % of a core, "
        f"a look {one['survey_us']:.0f} us"
    )


class Rollout:
    """Calls of one rollout, each going on from the one before it. Deterministic."""

    def __init__(self, number: int, *, training: bool) -> None:
        self.episode, self._training = Episode(f"{number}-0", 0), training
        self._source = random.Random(number)
        self._prompt = int32(self._some(FIRST))
        self._turns: tuple[str, ...] = (digest_of([number]),)

    def _some(self, count: int) -> array[int]:
        return int32(self._source.choices(range(150_000), k=count))

    def asked(self, turn: int) -> Asked:
        return Asked(f"1.{turn + 1}", digest_of([self.episode.key, turn]), self._turns)

    async def generate(self, call: Call) -> CallRecord:
        ids = self._some(GENERATED)
        logprobs = float32([-self._source.random() for _ in range(GENERATED)])
        text = "".join(self._source.choices("abcdefgh ", k=4 * GENERATED))
        content = [{"type": "output_text", "text": text, "annotations": []}]
        item: dict[str, Any] = {"type": "message", "id": "msg", "role": "assistant", "content": content}
        if self._training:
            item["prompt_token_ids"] = self._prompt.tolist()
            item["generation_token_ids"], item["generation_log_probs"] = ids.tolist(), logprobs.tolist()
        turn = digest_of([call.key, call.position])
        record = CallRecord(
            call.position,
            call.digest,
            self._prompt,
            ids,
            logprobs,
            (Span("step-1", 0, GENERATED),),
            {"id": "resp", "object": "response", "output": [item], "usage": {"total_tokens": 1}},
            call.parent_chain,
            turn,
        )
        self._prompt = self._prompt + ids + self._some(BETWEEN)
        self._turns = (*self._turns, turn, digest_of([turn]))
        return record


async def measured(
    rollouts: int, cache_bytes: int, *, training: bool, idle_seconds: float = IDLE_SECONDS
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gym-bench-ledger-") as folder:
        store = LedgerStore(cache_bytes, Path(folder))
        participant = ModelParticipant(Gate(coordinated=False), store)
        app = base_app("policy-model", lambda: True)
        add_capture_routes(app, participant, only("token"))
        empty = rss_kib()
        appends = await captured(participant, rollouts, training=training)
        await asyncio.sleep(1.0)  # what is being written is written
        manifests = await asked_for(app, rollouts)
        began = time.process_time()
        await asyncio.sleep(idle_seconds)
        idle = time.process_time() - began
        began = time.perf_counter()
        for _ in range(SURVEYS):
            participant.survey()
            participant.generations()
        survey = (time.perf_counter() - began) / SURVEYS
        blocks = used_blocks(Path(folder))
        return {
            "rollouts": rollouts,
            "training": training,
            "cache_bytes": cache_bytes,
            "rss_mib": round(rss_kib() / 1024, 1),
            "peak_rss_mib": round(rss_kib("VmHWM") / 1024, 1),
            "rss_before_mib": round(empty / 1024, 1),
            "kib_a_rollout": round((rss_kib() - empty) / rollouts, 2),
            "open_files": open_files(),
            "disk_mib": round(sum(blocks) * 512 / 1024**2, 1),
            "disk_files": len(blocks),
            "append_ms": percentiles(appends),
            "manifest_ms": percentiles(manifests),
            "idle_cpu_percent": round(100 * idle / idle_seconds, 3),
            "survey_us": round(survey * 1e6, 1),
        }


async def captured(participant: ModelParticipant, rollouts: int, *, training: bool) -> list[float]:
    """Seconds of each call, its generation apart, which takes no time here but that of making it up."""
    numbers, taken = iter(range(rollouts)), list[float]()

    async def drive() -> None:
        for number in numbers:
            rollout = Rollout(number, training=training)
            for turn in range(CALLS):
                generating = 0.0

                async def generate(call: Call, rollout: Rollout = rollout) -> CallRecord:
                    nonlocal generating
                    began = time.perf_counter()
                    record = await rollout.generate(call)
                    generating = time.perf_counter() - began
                    return record

                began = time.perf_counter()
                await participant.call(rollout.episode, rollout.asked(turn), generate)
                taken.append(time.perf_counter() - began - generating)
                await asyncio.sleep(0)

    # One after the other, or a call would be charged for what the others make up meanwhile.
    await drive()
    return taken


async def asked_for(app: Any, rollouts: int) -> list[float]:
    """Seconds of manifests of rollouts here and there, over HTTP in this process."""
    source, taken = random.Random(1), list[float]()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://policy") as client:
        for _ in range(MANIFESTS):
            key = f"{source.randrange(rollouts)}-0"
            began = time.perf_counter()
            reply = await client.get(f"{PREFIX}/{key}/manifest", headers={"authorization": "Bearer token"})
            taken.append(time.perf_counter() - began)
            assert len(reply.raise_for_status().json()["records"]) == CALLS
    return taken


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"p{part}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * part // 100)], 3) for part in (50, 99)
    }


def used_blocks(folder: Path) -> list[int]:
    """Of each file, in 512 bytes."""
    return [file.stat().st_blocks for file in folder.rglob("*") if file.is_file()]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def rss_kib(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())
