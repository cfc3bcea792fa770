"""A node without containers: runs the pods of stacks as processes of this machine, on loopback addresses.

To the operator it is a kubelet: pods get a container id, an address and readiness, a container that dies is started
again in place, a deleted pod is told to end and has the time that it was given. So a real API server and real Gym
servers can be tried without root and without an image. `kill` is what the kernel does to a container that needs too
much memory.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx

from gym_operator.api import names
from gym_operator.effects.kube import CHILDREN, PODS, SECRETS, Conflict, Kube, KubeError, NotFound, Resource

NODE: Final = "hollow"
OTHER_NODE: Final = "hollow-other"
"""Where pods come to while the first is cordoned: it is the same machine."""
LOOK_SECONDS: Final = 0.05
RESTART_SECONDS: Final = 0.5
HEARTBEAT_SECONDS: Final = 10.0
NODES: Final = Resource("", "v1", "nodes")


@dataclass
class _Container:
    """One pod's process. `id` is new at each start."""

    pod: Mapping[str, Any]
    address: str
    process: asyncio.subprocess.Process | None = None
    id: str = ""
    restarts: int = 0
    ready: bool = False
    last: dict[str, Any] = field(default_factory=dict)
    ended_at: float = 0.0
    told_to_end: bool = False


class HollowNode:
    """Runs until cancelled; `folder` keeps settings and logs of each server."""

    def __init__(self, kube: Kube, folder: Path, network: int) -> None:
        self._kube, self._folder, self._network = kube, folder, network
        self._addresses: dict[tuple[str, str, int], str] = {}
        self._containers: dict[str, _Container] = {}
        self._numbers = itertools.count(1)
        self._http = httpx.AsyncClient(trust_env=False, timeout=1.0)
        self.paused = False

    async def run(self) -> None:
        beat = asyncio.create_task(self._heartbeat())
        try:
            while True:
                if not self.paused:
                    with contextlib.suppress(NotFound, Conflict):
                        await self._look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            beat.cancel()
            for container in self._containers.values():
                await _kill(container)
            await self._http.aclose()

    def kill(self, server: str, number: int = signal.SIGKILL, *, cell: int = 0) -> None:
        """Kill the process of a server, as if its container had died."""
        for container in self._containers.values():
            meant = _label(container.pod, names.SERVER_LABEL) == server and _cell(container.pod) == cell
            if meant and container.process is not None:
                container.process.send_signal(number)

    def address(self, stack: str, server: str, cell: int = 0) -> str:
        """The loopback address of a server in a cell: the same over all its pods, since there is no name service
        here."""
        key = (stack, server, cell)
        if key not in self._addresses:
            self._addresses[key] = f"127.77.{self._network}.{10 + len(self._addresses)}"
        return self._addresses[key]

    async def _look(self) -> None:
        listing = await self._kube.list_all(PODS, None, names.STACK_LABEL)
        pods = {pod["metadata"]["uid"]: pod for pod in listing.items}
        for uid in set(self._containers) - set(pods):
            await _kill(self._containers.pop(uid))
        # All are waited for: a second look at a pod before the first has ended would start a second process.
        results = await asyncio.gather(*(self._see_to(uid, pod) for uid, pod in pods.items()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, NotFound | Conflict):
                raise result

    async def _see_to(self, uid: str, pod: Mapping[str, Any]) -> None:
        container = self._containers.get(uid)
        if pod["metadata"].get("deletionTimestamp"):
            if container is not None:
                if not _has_ended(container, pod["metadata"]["deletionTimestamp"]):
                    return
                await _kill(container)
                del self._containers[uid]
            await self._kube.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], uid, 0)
            return
        if container is None:
            server, stack = _label(pod, names.SERVER_LABEL), _label(pod, names.STACK_LABEL)
            await self._bind(pod)
            container = self._containers[uid] = _Container(pod, self.address(stack, server, _cell(pod)))
        pause = RESTART_SECONDS if container.id else 0.0
        if container.process is None and time.monotonic() - container.ended_at >= pause:
            await self._start(container)
        elif container.process is not None and container.process.returncode is not None:
            code = container.process.returncode
            container.last = {
                "terminated": {
                    "exitCode": code if code >= 0 else 128 - code,
                    "reason": "Error",
                    "containerID": container.id,
                }
            }
            container.process, container.ready = None, False
            container.ended_at = time.monotonic()
            container.restarts += 1
            await self._tell(container, container.last)
        elif container.process is not None:
            ready = await self._is_ready(container)
            if ready != container.ready:
                container.ready = ready
                await self._tell(container, {"running": {"startedAt": _now()}})

    async def _bind(self, pod: Mapping[str, Any]) -> None:
        metadata = pod["metadata"]
        binding: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        }
        if ((await self._kube.get(NODES, None, NODE)).get("spec") or {}).get("unschedulable"):
            binding["target"]["name"] = OTHER_NODE
        place = Resource("", "v1", f"pods/{metadata['name']}/binding")
        if not pod["spec"].get("nodeName"):
            await self._kube.create(place, metadata["namespace"], binding)

    async def _start(self, container: _Container) -> None:
        pod = container.pod
        namespace = pod["metadata"]["namespace"]
        stack, server, cell = _label(pod, names.STACK_LABEL), _label(pod, names.SERVER_LABEL), _cell(pod)
        config = await self._kube.get(CHILDREN["ConfigMap"], namespace, names.config_map(stack))
        text = re.sub(
            r"http://([a-z0-9-]+)-\{cell\}:8000",
            lambda match: f"http://{self.address(stack, match[1].removeprefix(f'{stack}-'), cell)}:8000",
            config["data"][f"{server}.json"],
        )
        folder = self._folder / pod["metadata"]["name"]
        folder.mkdir(parents=True, exist_ok=True)
        settings = {**json.loads(text), "host": container.address}
        if "cells_file" in settings:
            (folder / "cells").write_text(config["data"]["cells"])
            settings["cells_file"] = str(folder / "cells")
        (folder / "settings.json").write_text(json.dumps(settings))
        environment = {**os.environ, **await self._mounted(pod, folder), "GYM_CELL": str(cell)}
        with (folder / "log").open("ab") as log:
            container.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gym_servers", "serve", "--settings", str(folder / "settings.json")),
                env=environment,
                stdout=log,
                stderr=log,
            )
        container.id = f"hollow://{next(self._numbers)}"
        await self._tell(container, {"running": {"startedAt": _now()}})

    async def refresh_secrets(self) -> None:
        """Bring what the pods have mounted up to date, as a kubelet does about every minute."""
        for container in self._containers.values():
            await self._mounted(container.pod, self._folder / container.pod["metadata"]["name"])

    async def _mounted(self, pod: Mapping[str, Any], folder: Path) -> dict[str, str]:
        """The pod's Secrets as files below `folder`; its variables, with the paths where the files are here."""
        container = pod["spec"]["containers"][0]
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        environment = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
        for volume in pod["spec"]["volumes"]:
            if "secret" not in volume:
                continue
            here, place = folder / volume["name"], places[volume["name"]]
            secret = await self._kube.get(SECRETS, pod["metadata"]["namespace"], volume["secret"]["secretName"])
            _write_all(here, secret.get("data") or {})
            for name, value in environment.items():
                if value == place or value.startswith(f"{place}/"):
                    environment[name] = f"{here}{value.removeprefix(place)}"
        return environment

    async def _is_ready(self, container: _Container) -> bool:
        try:
            answer = await self._http.get(f"http://{container.address}:{names.DATA_PORT}/readyz")
        except httpx.TransportError:
            return False
        return answer.is_success

    async def _tell(self, container: _Container, state: dict[str, Any]) -> None:
        metadata = container.pod["metadata"]
        for _ in range(5):
            pod = await self._kube.get(PODS, metadata["namespace"], metadata["name"])
            if pod["metadata"]["uid"] != metadata["uid"]:
                return
            value = "True" if container.ready else "False"
            pod["status"] = {
                **pod.get("status", {}),
                "phase": "Running",
                "podIP": container.address,
                "podIPs": [{"ip": container.address}],
                "conditions": [
                    {"type": kind, "status": value, "lastTransitionTime": _now()}
                    for kind in ("Ready", "ContainersReady")
                ],
                "containerStatuses": [
                    {
                        "name": "server",
                        "image": "hollow",
                        "imageID": "hollow",
                        "ready": container.ready,
                        "restartCount": container.restarts,
                        "containerID": container.id,
                        "state": state,
                        "lastState": container.last,
                    }
                ],
            }
            try:
                await self._kube.replace_status(PODS, metadata["namespace"], pod)
                return
            except Conflict:
                continue

    async def _heartbeat(self) -> None:
        """The nodes' own life, without which their pods would be taken for lost."""
        for name in (NODE, OTHER_NODE):
            with contextlib.suppress(Conflict):
                await self._kube.create(NODES, "", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        while True:
            for name in (NODE, OTHER_NODE):
                with contextlib.suppress(KubeError):
                    await self._beat(name)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _beat(self, name: str) -> None:
        node = await self._kube.get(NODES, None, name)
        node["status"]["conditions"] = [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Hollow",
                "message": "",
                "lastHeartbeatTime": _now(),
                "lastTransitionTime": _now(),
            }
        ]
        await self._kube.replace_status(NODES, "", node)


def _has_ended(container: _Container, until: str) -> bool:
    """Whether the process of a deleted pod is gone, or its time is over. It is told to end once."""
    if container.process is None or container.process.returncode is not None:
        return True
    if not container.told_to_end:
        container.told_to_end = True
        container.process.send_signal(signal.SIGTERM)
    return time.time() >= datetime.fromisoformat(until).timestamp()


async def _kill(container: _Container) -> None:
    if container.process is not None and container.process.returncode is None:
        container.process.kill()
        await container.process.wait()


def _label(pod: Mapping[str, Any], label: str) -> str:
    return str(pod["metadata"]["labels"][label])


def _cell(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _write_all(folder: Path, data: Mapping[str, str]) -> None:
    """Exactly these files, none of which is ever seen half written."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, value in data.items():
        fresh = folder / f".{name}"
        fresh.write_bytes(base64.b64decode(value))
        fresh.replace(folder / name)
    for path in folder.iterdir():
        if path.name not in data:
            path.unlink()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
