"""A real operator process against a real API server, with stacks whose pods are processes of this machine.

    with OperatorRig(folder, progress) as rig:
        rig.start_operator()
        rig.apply("demo", rollouts=8)
        rig.until("it runs", lambda: rig.phase("demo") == "Running", 60)

Everything asynchronous lives in one loop in a thread, so that tests read from top to bottom.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import boto3
from botocore.config import Config

from gym_kit import operator_process, tools
from gym_kit.beside import serving
from gym_kit.bucket import SeaweedFS
from gym_kit.cluster.local.api_only import api_server_only
from gym_kit.hollow_node import HollowNode
from gym_kit.ports import free_ports
from gym_kit.progress import Progress
from gym_operator.api import names
from gym_operator.effects.kube import (
    CHECKPOINTS,
    PODS,
    SECRETS,
    STACKS,
    ApiKube,
    Conflict,
    NotFound,
    Resource,
    connect,
)
from gym_servers.engine.rows import counter_rows
from gym_servers.stack.settings import S3Settings
from gym_servers.storage.locate import open_store
from gym_servers.storage.s3 import S3Credentials
from gym_servers.storage.store import ObjectStore

NAMESPACE: Final = "default"
BUCKET: Final = "gym"
T = TypeVar("T")


class OperatorRig:
    """The API server, the bucket, the engine, the journal and the hollow node; an operator when asked for."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder, self._progress = folder, progress
        self._network = os.getpid() % 254 + 1  # of the loopback addresses: two rigs may run side by side
        self._exit = ExitStack()
        self._loop = asyncio.new_event_loop()
        self._operator: subprocess.Popen[bytes] | None = None
        self._running_node: Future[None] | None = None
        self.health_port = free_ports(1)[0]
        self.log = folder / "operator.log"

    def __enter__(self) -> Self:
        with ExitStack() as building:
            thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            thread.start()
            building.callback(self._end_loop, thread)
            server = building.enter_context(api_server_only(self._progress, controllers=True))
            self.kubeconfig = Path(server.kubeconfig)
            self.s3 = SeaweedFS(self.folder / "s3")
            self.s3.start()
            building.callback(self.s3.kill)  # nothing of it is wanted again
            self.s3.create_bucket(BUCKET)
            self.kube: ApiKube = self.run(connect(str(self.kubeconfig)))
            building.callback(lambda: self.run(self.kube.close()))
            written = ("--file", str(self.folder / "journal.jsonl"))
            self.journal = building.enter_context(serving(self.folder, "journal", *written)).url
            speed = ("--tokens-per-second", "120", "--journal", self.journal)
            self.engine = building.enter_context(serving(self.folder, "engine", *speed)).url
            self.run(operator_process.install_crds(self.kube))
            self.node = HollowNode(self.kube, self.folder / "pods", self._network)
            self._running_node = asyncio.run_coroutine_threadsafe(self.node.run(), self._loop)
            building.callback(self._end_node)
            self.secret("s3-keys", self.s3.credentials.access_key, self.s3.credentials.secret_key)
            building.callback(self.kill_operator)
            self._exit = building.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._exit.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    # ---- the operator -------------------------------------------------------------------------------------

    def start_operator(
        self, *options: str, health_port: int | None = None, kubeconfig: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start an operator process; it is the one that `kill_operator` ends. `kubeconfig` is another way to the API
        server."""
        way = kubeconfig or self.kubeconfig
        self._operator = operator_process.start(way, health_port or self.health_port, self.log, *options)
        return self._operator

    @property
    def operator_runs(self) -> bool:
        return self._operator is not None and self._operator.poll() is None

    def kill_operator(self, number: int = signal.SIGKILL) -> None:
        """Kill the operator, and wait until it is gone."""
        if self._operator is not None:
            self._operator.send_signal(number)
            self._operator.wait(60)
            self._operator = None

    # ---- stacks and checkpoints ---------------------------------------------------------------------------

    def manifest(self, name: str, rollouts: int = 8, **spec: Any) -> dict[str, Any]:
        """A stack that collects `rollouts` counter rows; `spec` replaces parts of its spec."""
        rows = "".join(json.dumps(row) + "\n" for row in counter_rows(rollouts, 7))
        self._s3().put_object(Bucket=BUCKET, Key=f"{name}/tasks.jsonl", Body=rows.encode())
        storage = {
            "bucket": BUCKET,
            "prefix": "checkpoints",
            "endpoint": self.s3.endpoint,
            "addressingStyle": "path",
            "credentialsSecret": "s3-keys",
        }
        whole = {
            "image": "hollow:1",
            "servers": [
                {"name": "env", "kind": "environment", "server": "single-agent-turn"},
                {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": self.engine}},
                {"name": "agent", "kind": "agent", "server": "simple-agent"},
                {"name": "counter", "kind": "resources", "server": "counter", "config": {"journal": self.journal}},
            ],
            "collection": {"tasks": f"s3://{BUCKET}/{name}/tasks.jsonl", "output": f"s3://{BUCKET}/{name}/rows"},
            "checkpoints": {"storage": {"s3": storage}},
        }
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.STACK_KIND,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {**whole, **copy.deepcopy(spec)},
        }

    def apply(self, name: str, rollouts: int = 8, **spec: Any) -> None:
        self.run(self.kube.create(STACKS, NAMESPACE, self.manifest(name, rollouts, **spec)))

    def change(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the spec of a stack, as `kubectl edit` does: again where its status was written meanwhile."""
        while True:
            body = self.run(self.kube.get(STACKS, NAMESPACE, name))
            change(body["spec"])
            with suppress(Conflict):
                self.run(self.kube.replace(STACKS, NAMESPACE, body))
                return

    def delete(self, resource: Resource, name: str) -> None:
        self.run(self.kube.delete(resource, NAMESPACE, name))

    def kubectl(self, *words: str) -> subprocess.Popen[str]:
        """The real kubectl, as a process; what it says goes to one pipe."""
        return subprocess.Popen(
            [str(tools.kubectl()), f"--kubeconfig={self.kubeconfig}", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def checkpoint(self, name: str, stack: str, **spec: Any) -> None:
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.CHECKPOINT_KIND,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"stackRef": {"name": stack}, **spec},
        }
        self.run(self.kube.create(CHECKPOINTS, NAMESPACE, body))

    def secret(self, name: str, access_key: str, secret_key: str) -> None:
        values = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}
        self.run(self.kube.create(SECRETS, NAMESPACE, body))

    # ---- looking ------------------------------------------------------------------------------------------

    def status(self, resource: Resource, name: str) -> dict[str, Any]:
        """The status, empty where the object or its status is not there."""
        try:
            status: dict[str, Any] = self.run(self.kube.get(resource, NAMESPACE, name)).get("status") or {}
        except NotFound:
            return {}
        return status

    def phase(self, stack: str) -> str:
        return str(self.status(STACKS, stack).get("phase", ""))

    def cell(self, stack: str, index: int = 0) -> dict[str, Any]:
        cells: list[dict[str, Any]] = self.status(STACKS, stack).get("cells") or []
        return next((cell for cell in cells if cell["index"] == index), {})

    def rows(self, stack: str) -> int:
        return int((self.status(STACKS, stack).get("collection") or {}).get("rows", 0))

    def condition(self, resource: Resource, name: str, kind: str) -> dict[str, Any]:
        conditions = self.status(resource, name).get("conditions") or ()
        found: dict[str, Any] = next((each for each in conditions if each["type"] == kind), {})
        return found

    def store(self, uri: str) -> ObjectStore:
        """The bucket's objects below a URI."""
        settings = S3Settings(bucket=BUCKET, endpoint=self.s3.endpoint, addressing_style="path")
        credentials = S3Credentials(self.s3.credentials.access_key, self.s3.credentials.secret_key)
        return open_store(uri, settings, credentials)

    def until(self, what: str, holds: Callable[[], object], seconds: float, interval: float = 0.05) -> float:
        """Wait until it holds; the seconds that took. AssertionError names `what`, with the operator's last words."""
        began = time.monotonic()
        while not holds():
            if self._running_node is not None and self._running_node.done():
                self._running_node.result()  # nothing comes up any more
            if time.monotonic() - began > seconds:
                raise AssertionError(f"{what}: not within {seconds:g} s\n{self._picture()}")
            time.sleep(interval)
        return time.monotonic() - began

    def _picture(self) -> str:
        """Where everything stands, for a test that has waited in vain."""
        words = self.log.read_text()[-2000:] if self.log.exists() else ""
        found = [f"the operator says:\n{words}"]
        for resource in (STACKS, CHECKPOINTS, PODS):
            for body in self.run(self.kube.list_all(resource, NAMESPACE)).items:
                found.append(f"{resource.plural} {body['metadata']['name']}: {json.dumps(body.get('status'))[:1500]}")
        return "\n".join(found)

    # ---- parts --------------------------------------------------------------------------------------------

    def _s3(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.s3.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.s3.credentials.access_key,
            aws_secret_access_key=self.s3.credentials.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )

    def _end_node(self) -> None:
        if self._running_node is not None:
            self._running_node.cancel()
        # Its processes are ended in the loop; nothing else runs there by now.
        self.run(asyncio.sleep(0.5))

    def _end_loop(self, thread: threading.Thread) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(10)
        self._loop.close()
