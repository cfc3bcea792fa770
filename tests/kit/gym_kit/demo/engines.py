"""The vLLM of a demonstration: a process beside the cluster, or a pod that the operator runs.

Either can be held in the middle of a generation, as trainers hold it while they change weights: the tiny model says
all that it has to say in a moment, and a demonstration is to interrupt it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import httpx

from gym_kit import image
from gym_kit.cluster.client import ask
from gym_kit.demo.kube import Kube, ready
from gym_kit.errors import KitError
from gym_kit.image import Extra, Image
from gym_kit.progress import Progress
from gym_operator.api import names
from gym_vllm import journal
from gym_vllm.engine import MODEL, NAME, Engine
from gym_vllm.journal import HOLD, JOURNAL, Generated, Streams

TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
MIDDLE_SECONDS: Final = 120.0
LOOK_SECONDS: Final = 0.1
ASK_SECONDS: Final = 60.0
KEPT: Final = "/tmp/tokens.jsonl"
ARGUMENTS: Final = ("--enforce-eager", "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=32")
NUMA: Final = "libnuma.so.1"  # of this machine: vLLM for a CPU wants it, and no wheel brings it
LIBRARIES: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
ENGINE_STEPS: Final = f"""COPY models {image.MODELS}
COPY --chmod=755 engine/vllm /opt/gym/app/bin/vllm
COPY engine/journal.py engine/__init__.py /opt/gym/app/gym_vllm/
COPY engine/{NUMA} /usr/local/lib/
ENV LD_LIBRARY_PATH=/usr/local/lib {JOURNAL}={KEPT} \\
    VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 \\
    TORCHDYNAMO_DISABLE=1
"""
# In the place of the program of this name, which looks for a package that has another name where vLLM is for a CPU;
# and with what counts the tokens.
WRAPPER: Final = f"""#!/bin/sh
shift
model="$1"
shift
exec /opt/gym/bin/python -m vllm.entrypoints.openai.api_server --model "$model" \\
  --middleware={journal.__name__}.{journal.TokenJournal.__name__} "$@"
"""


class DemoEngine(Protocol):
    """What a demonstration wants of an engine."""

    def values(self, stack: str, release: str) -> dict[str, Any]:
        """What the chart has to know of it, for the stack that is demonstrated and for others."""

    def generated(self) -> list[Generated]:
        """What it has generated so far."""

    def get(self, path: str) -> Any:
        """JSON that its API server answers."""

    def post(self, path: str) -> None:
        """Ask its API server to do something; returns when that is done."""


@contextmanager
def in_mid_generation(engine: DemoEngine, more: int) -> Iterator[None]:
    """It stands where some generation is in its middle, `more` tokens from now or a few later. Raises KitError where
    that does not come."""
    give_up = time.monotonic() + MIDDLE_SECONDS
    engine.post(f"{HOLD}?tokens={more}")
    try:
        while True:
            while not engine.get(HOLD)["held"]:
                if time.monotonic() > give_up:
                    raise KitError("no generation was seen in its middle: the rollouts may have ended already")
                time.sleep(LOOK_SECONDS)
            if any(stream.ids and not stream.ended for stream in engine.generated()):
                break
            # The only one said its last words while the engine was told to stand.
            engine.post(f"{HOLD}?tokens=1")
            engine.post("/resume")
        yield
    finally:
        engine.post(HOLD)
        engine.post("/resume")


@dataclass(frozen=True)
class EngineBeside:
    """A process of this machine."""

    engine: Engine

    def values(self, stack: str, release: str) -> dict[str, Any]:
        where = {"base_url": self.engine.url, "model": NAME, "tokenizer": image.MODELS}
        return {"servers": _servers(release, where)}

    def generated(self) -> list[Generated]:
        return self.engine.generated()

    def get(self, path: str) -> Any:
        return self._ask("GET", path).json()

    def post(self, path: str) -> None:
        self._ask("POST", path)

    def _ask(self, method: str, path: str) -> httpx.Response:
        url = f"{self.engine.url}{path}"
        try:
            return httpx.request(method, url, timeout=ASK_SECONDS, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise KitError(f"vLLM beside the cluster does not do what it is asked for: {error}") from error


class EnginePod:
    """A pod of `spec.inference` of the stack that is demonstrated, with cuts at the engine."""

    def __init__(self, kubeconfig: Path, kube: Kube, reference: str, stack: str, folder: Path) -> None:
        self._kubeconfig, self._kube, self._reference, self._stack = kubeconfig, kube, reference, stack
        self._copy = folder / "tokens.jsonl"
        self._streams = Streams(self._copy)

    def values(self, stack: str, release: str) -> dict[str, Any]:
        if release != stack:  # as a stack uses an engine that somebody else runs
            where = {"base_url": f"http://{names.engine(stack)}:{names.ENGINE_PORT}", "model": image.MODELS}
            return {"servers": _servers(release, where)}
        vllm = {
            "image": self._reference,
            "model": image.MODELS,
            "args": list(ARGUMENTS),
            "resources": {"requests": {"memory": "2Gi"}},
            "cutAtEngine": True,
        }
        others: dict[str, Any] = {"networkPolicy": {"engineFrom": [{"podSelector": {}}]}}
        return {"servers": _servers(release, {}), "inference": {"vllm": vllm}, **others}

    def generated(self) -> list[Generated]:
        pods = self._kube.pods(f"{names.STACK_LABEL}={self._stack},{names.SERVER_LABEL}={names.ENGINE}")
        if pods and ready(pods[0]):
            command = ("exec", pods[0]["metadata"]["name"], "--", "sh", "-c", f"test ! -e {KEPT} || cat {KEPT}")
            self._copy.write_text(ask(self._kubeconfig, "--namespace", self._kube.namespace, *command))
        return self._streams.look()

    def get(self, path: str) -> Any:
        return json.loads(ask(self._kubeconfig, "get", "--raw", self._raw(path), timeout=ASK_SECONDS))

    def post(self, path: str) -> None:
        empty = ("--filename", "/dev/null")
        ask(self._kubeconfig, "create", "--raw", self._raw(path), *empty, timeout=ASK_SECONDS)

    def _raw(self, path: str) -> str:
        """Through the API server: it can reach the pod from wherever this runs."""
        service = f"{names.engine(self._stack)}:{names.ENGINE_PORT}"
        return f"/api/v1/namespaces/{self._kube.namespace}/services/{service}/proxy{path}"


def tokenizer() -> Extra:
    """What a policy server's image needs of the model."""
    return image.models({name: (MODEL / name).read_bytes() for name in TOKENIZER})


def engine_image(progress: Progress) -> Image:
    """An image with vLLM for this machine's processor, our package, the whole model and the journal of tokens."""
    source = Path(journal.__file__).read_bytes()
    files: dict[str, bytes] = {f"models/{file.name}": file.read_bytes() for file in sorted(MODEL.iterdir())}
    files |= {"engine/vllm": WRAPPER.encode(), "engine/journal.py": source, "engine/__init__.py": b""}
    numa = next((found for folder in LIBRARIES if (found := Path(folder) / NUMA).is_file()), None)
    if numa is None:
        raise KitError(f"{NUMA} is missing on this machine: install it, as by apt-get install libnuma1")
    files[f"engine/{NUMA}"] = numa.read_bytes()
    return image.build(progress, requirements="vllm", extra=Extra(files, ENGINE_STEPS))


def _servers(release: str, where: Mapping[str, str]) -> list[dict[str, Any]]:
    """The demonstration's servers, with a policy that vLLM serves. `where` it is, if the operator does not run it."""
    policy = {**where, "sampling": {"temperature": 0}, "max_tokens": 256}
    journal_of_calls = {"journal": f"http://{release}-journal:8000"}
    return [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "vllm", "config": policy},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {"name": "counter", "kind": "resources", "server": "counter", "config": journal_of_calls},
    ]
