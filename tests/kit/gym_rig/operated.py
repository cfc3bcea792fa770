"""A whole stack under the real operator's workers in one event loop: a fake API server, real servers, virtual time.

    async with operated(tmp_path, rows) as rig:
        await rig.until(rig.in_service)
        rig.checkpoint("one")
        await rig.until(lambda: rig.final("one"))
        rig.kill_operator(); rig.start_operator()

A kubelet of a few lines keeps a pod for every StatefulSet, and a process of `gym_rig.cell` in every pod. Pods of a
Deployment, which is an engine's, have no process: `engines_ready` says how they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import httpx

from gym_operator.api import names
from gym_operator.api.checkpoint import TERMINAL
from gym_operator.api.objects import format_time, parse_time
from gym_operator.effects.cache import Cache
from gym_operator.effects.events import Events
from gym_operator.effects.fleet import Fleet
from gym_operator.effects.kube import (
    CHECKPOINTS,
    CHILDREN,
    EVENTS,
    NODES,
    PODS,
    SECRETS,
    STACKS,
    Body,
    Kube,
    Resource,
)
from gym_operator.effects.resync import watched
from gym_operator.effects.services import Services
from gym_operator.effects.transport import PodTransport
from gym_operator.rules.workloads import StackContext, build_control_secret
from gym_rig.cell import COOKIES, IDENTITY, LONGEST_SECONDS, TOKEN, Rig, rig_settings
from gym_rig.fake_kube import FakeKube, Session
from gym_rig.network import Alive
from gym_rig.virtual import end_all, now
from gym_servers.control.departure import Departure
from gym_servers.http import peers
from gym_servers.stack.spec import parse_spec

LOOK_SECONDS = 0.05


class Operator:
    """One operator: its fleet and what it stands on. Killed, nothing of it has any effect any more."""

    def __init__(self, rig: OperatedRig, cluster: str | None) -> None:
        self.alive = Alive()
        self.session = Session(rig.kube)
        transport = PodTransport(rig.cell.network.transport(self.alive))
        kube = cast("Kube", self.session)
        clock = asyncio.get_running_loop().time
        services = Services(
            kube,
            Cache(transport),
            Events(kube, clock),
            httpx.AsyncClient(transport=transport),
            "gym-system",
            clock,
            clock,
            cluster,
            watches_nodes=rig.nodes_are_watched,
        )
        self.fleet = Fleet(services)
        self._metrics = services.metrics
        self._metrics.watch(lambda: iter(services.cache.stacks.values()), self.fleet.health, self.fleet.generations)
        self.beside = asyncio.create_task(self.fleet.run())

    def kill(self) -> None:
        """As SIGKILL does: nobody hears of it, and what would go on by itself ends."""
        self.session.cut = True
        self.alive.kill()
        self.beside.cancel()
        workers = list(self.fleet._workers.values())
        self.fleet._workers.clear()
        for _, task in workers:
            task.cancel()

    def numbers(self) -> dict[str, float]:
        """What Prometheus gets: values by series, as they are written."""
        lines = [line for line in self._metrics.text().decode().splitlines() if not line.startswith("#")]
        return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}

    def told(self, resource: Resource, deleted: bool, body: Body) -> None:
        """What its watches tell."""
        if resource in watched(nodes=self.fleet._s.watches_nodes):
            self.fleet.event(resource, deleted, body)


class OperatedRig:
    """The stack `local/rig`. `cells` have its processes, `cell` is the first of them; their own coordinators are not
    used."""

    def __init__(self, folder: Path, rows: Iterable[Mapping[str, Any]], rate: float, spec: Mapping[str, Any]) -> None:
        self.folder, self._rows, self._rate = folder, list(rows), rate
        self._cells_file, self._cells_told = folder / "cells", ""
        self._tell_cells("1\n")  # until the operator has said how many there are
        self.spec = _spec(folder, spec)
        self.cells: dict[int, Rig] = {}
        self.cell = self._rig_of(0)
        self.kube = FakeKube(asyncio.get_running_loop().time)
        self.operator: Operator | None = None
        self._containers: dict[str, tuple[int, str, str]] = {}
        self._kubelet = asyncio.create_task(self._run_pods())
        self.pods_may_start = True
        self.engines_ready = True
        self.held_back: set[int] = set()  # cells whose pods do not come up once they are gone
        self.lasting: set[int] = set()  # cells whose processes nobody ends, though they are told to
        self.absent_images: set[str] = set()  # nobody has them
        self.broken_images: set[str] = set()  # their servers end at once
        self.node = "node-1"  # of pods to come, where nodes are watched
        self.nodes_are_watched = False
        self._departures: dict[str, asyncio.Task[None] | None] = {}

    def _rig_of(self, index: int) -> Rig:
        """The processes of a cell. Addresses of the first cell are its servers' names."""
        if index not in self.cells:
            suffix = f"-{index}" if index else ""
            settings, root = rig_settings(
                self.folder,
                self._rows,
                index=index,
                suffix=suffix,
                cells_file=self._cells_file,
                collection=self.spec.get("collection"),
            )
            beside = self.cells.get(0)
            self.cells[index] = Rig(self.folder, settings, root, rate=self._rate, beside=beside, suffix=suffix)
        return self.cells[index]

    # ---- the cluster --------------------------------------------------------------------------------------

    def create(self) -> None:
        """The stack, and its Secret with the tokens that the cell's processes know."""
        context = StackContext(IDENTITY, parse_spec(self.spec), "gym-system")
        self.kube.put(SECRETS, IDENTITY.namespace, build_control_secret(context, TOKEN, COOKIES))
        metadata = {"name": IDENTITY.name, "uid": IDENTITY.uid}
        self.kube.put(STACKS, IDENTITY.namespace, {"metadata": metadata, "spec": self.spec})

    def change(self, **spec: Any) -> None:
        """Change the spec."""
        self.spec = {**self.spec, **spec}
        found = self.kube.objects[STACKS, IDENTITY.namespace, IDENTITY.name]
        metadata = {**found["metadata"], "generation": found["metadata"]["generation"] + 1}
        self.kube.set(STACKS, IDENTITY.namespace, IDENTITY.name, spec=self.spec, metadata=metadata)

    def checkpoint(self, name: str, **spec: Any) -> None:
        body = {"metadata": {"name": name}, "spec": {"stackRef": {"name": IDENTITY.name}, **spec}}
        self.kube.put(CHECKPOINTS, IDENTITY.namespace, body)

    def pods(self, cell: int | None = None) -> dict[str, str]:
        """The UIDs of the pods by name, of one cell or of all."""
        return {
            name: body["metadata"]["uid"]
            for (resource, _, name), body in self.kube.objects.items()
            if resource == PODS and _is_ours(body) and (cell is None or name.endswith(f"-{cell}"))
        }

    def engines(self) -> dict[str, str]:
        """The UIDs of the engine's pods by name."""
        return {
            name: body["metadata"]["uid"]
            for (resource, _, name), body in self.kube.objects.items()
            if resource == PODS and _is_engine(body)
        }

    async def _run_pods(self) -> None:
        while True:
            self._see_to_pods()
            await asyncio.sleep(LOOK_SECONDS)

    def _see_to_pods(self) -> None:
        """A pod for each cell of each StatefulSet that wants one, and a process in each pod."""
        config = self.kube.objects.get((CHILDREN["ConfigMap"], IDENTITY.namespace, names.config_map(IDENTITY.name)))
        if config is not None:
            self._tell_cells(config["data"]["cells"])
        wanted = {
            f"{body['metadata']['name']}-{index}": body
            for (resource, _, _), body in self.kube.objects.items()
            if resource == CHILDREN["StatefulSet"] and self.pods_may_start and _is_ours(body)
            for index in range(body["spec"]["replicas"])
        }
        pods = {
            name: body
            for (resource, _, name), body in self.kube.objects.items()
            if resource == PODS and _is_ours(body)
        }
        self._see_to_engines({name: body for name, body in pods.items() if _is_engine(body)})
        present = {name: body for name, body in pods.items() if not _is_engine(body)}
        for name in set(self._containers) - set(present):
            index, server, _ = self._containers.pop(name)
            self.cells[index].kill(server)
        for name in set(present) - set(wanted):
            pod = present[name]
            if pod["metadata"].get("deletionTimestamp"):
                self._see_out(name, pod)
            else:  # as the controller of StatefulSets does
                self.leave(name, grace=pod["spec"]["terminationGracePeriodSeconds"])
        for name, stateful_set in wanted.items():
            if name not in present:
                if int(name.rpartition("-")[2]) in self.held_back:
                    continue
                template = stateful_set["spec"]["template"]
                labels = {**template["metadata"]["labels"], names.POD_INDEX_LABEL: name.rpartition("-")[2]}
                metadata = {"name": name, **template["metadata"], "labels": labels}
                spec = {**template["spec"], **({"nodeName": self.node} if self.nodes_are_watched else {})}
                self.kube.put(PODS, IDENTITY.namespace, {"metadata": metadata, "spec": spec})
            else:
                self._see_to_process(name, present[name])

    def _tell_cells(self, cells: str) -> None:
        """As a kubelet does, only where it is another: a write at each look would cost more than all else."""
        if cells != self._cells_told:
            self._cells_file.write_text(cells)
            self._cells_told = cells

    def _see_to_engines(self, present: Mapping[str, Body]) -> None:
        wanted = {
            f"{body['metadata']['name']}-7d9f-{index:05}": body
            for (resource, _, _), body in self.kube.objects.items()
            if resource == CHILDREN["Deployment"] and _is_ours(body)
            for index in range(body["spec"]["replicas"])
        }
        for name in set(present) - set(wanted):
            self.kube.remove(PODS, IDENTITY.namespace, name)
        for name, deployment in wanted.items():
            template = deployment["spec"]["template"]
            if name not in present:
                metadata = {"name": name, "labels": template["metadata"]["labels"]}
                self.kube.put(PODS, IDENTITY.namespace, {"metadata": metadata, "spec": template["spec"]})
            status = {
                "phase": "Running",
                "containerStatuses": [{"name": "server", "containerID": name, "state": {"running": {}}}],
                "conditions": [{"type": "Ready", "status": "True" if self.engines_ready else "False"}],
            }
            if self.kube.objects[PODS, IDENTITY.namespace, name].get("status") != status:
                self.kube.set(PODS, IDENTITY.namespace, name, status=status)

    def _see_to_process(self, name: str, pod: Body) -> None:
        server, index = pod["metadata"]["labels"][names.SERVER_LABEL], int(name.rpartition("-")[2])
        if pod["spec"].get("nodeName") in self.kube.silent_nodes:
            return  # whatever its kubelet does
        if pod["metadata"].get("deletionTimestamp"):
            self._see_out(name, pod)
            return
        if self._cannot_start(name, pod):
            return
        cell, known = self._rig_of(index), self._containers.get(name)
        if known is not None and known[2].startswith(pod["metadata"]["uid"]):
            running = cell.processes_by_name[server]
            if not running.alive.died.is_set():
                return
            if "running" in pod["status"]["containerStatuses"][0]["state"]:
                ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
                self._tell(name, cell.control_host(server), running.incarnation, ended)
                return  # started again at the next look, as a kubelet does in place
        if known is not None and not cell.processes_by_name[server].alive.died.is_set():
            cell.kill(server)  # the one of the pod before
        started = cell.start(server)
        self._containers[name] = (index, server, f"{pod['metadata']['uid']}/{started.incarnation}")
        self._tell(name, cell.control_host(server), started.incarnation, {"running": {}})

    def _see_out(self, name: str, pod: Body) -> None:
        """As a kubelet does with a pod that is deleted: its process is told to end, and is ended when its time is
        over."""
        uid, until = pod["metadata"]["uid"], parse_time(pod["metadata"]["deletionTimestamp"])
        found = self._containers.get(name)
        running = self.cells[found[0]].processes_by_name[found[1]] if found is not None else None
        if uid not in self._departures:
            waits = Departure(running.plane, patient=True).told() if running and running.plane else None
            self._departures[uid] = None if waits is None else asyncio.ensure_future(waits)
        departure = self._departures[uid]
        if found is not None and found[0] in self.lasting:
            return
        if departure is None or departure.done() or now() >= until:
            self.kube.remove(PODS, IDENTITY.namespace, name)

    def _cannot_start(self, name: str, pod: Body) -> bool:
        """Whether its image keeps it from that."""
        image = pod["spec"]["containers"][0]["image"]
        state: Body = {"waiting": {"reason": "ImagePullBackOff", "message": f"Back-off pulling image {image}"}}
        if image in self.broken_images:
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}}
        elif image not in self.absent_images:
            return False
        status = {"phase": "Pending", "containerStatuses": [{"name": "server", "state": state}]}
        if pod.get("status") != status:
            self.kube.set(PODS, IDENTITY.namespace, name, status=status)
        return True

    def leave(self, *names: str, grace: float = 200.0) -> None:
        """Delete pods as kubectl does, and an eviction."""
        for name in names:
            metadata = self.kube.objects[PODS, IDENTITY.namespace, name]["metadata"]
            until = {"deletionTimestamp": format_time(now() + grace), "deletionGracePeriodSeconds": int(grace)}
            told = {**metadata, **until}
            self.kube.set(PODS, IDENTITY.namespace, name, metadata=told)

    def cordon(self, node: str, cordoned: bool = True) -> None:
        """Nothing new comes to a node from now on; it is in good health."""
        self.node_is(node, "True", cordoned=cordoned)

    def node_is(self, node: str, ready: str, *, cordoned: bool = False) -> None:
        """How a node is; `ready` is Unknown where nobody hears of it."""
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        fields: Body = {"spec": {"unschedulable": cordoned}, "status": status}
        if (NODES, None, node) in self.kube.objects:
            self.kube.set(NODES, None, node, **fields)  # type: ignore[arg-type]
        else:
            self.kube.put(NODES, None, {"metadata": {"name": node}, **fields})  # type: ignore[arg-type]

    def images(self, cell: int | None = None) -> set[str]:
        """What the pods run, of one cell or of all."""
        pods = self.pods(cell)
        return {
            body["spec"]["containers"][0]["image"]
            for (resource, _, name), body in self.kube.objects.items()
            if resource == PODS and name in pods
        }

    def events(self, reason: str) -> list[str]:
        """What was said for a reason."""
        return [
            str(body["message"])
            for (resource, _, _), body in self.kube.objects.items()
            if resource == EVENTS and body["reason"] == reason
        ]

    def _tell(self, name: str, address: str, container: str, state: Body) -> None:
        status = {
            "phase": "Running",
            "podIP": address,
            "containerStatuses": [{"name": "server", "containerID": container, "state": state}],
            "conditions": [{"type": "Ready", "status": "True" if "running" in state else "False"}],
        }
        self.kube.set(PODS, IDENTITY.namespace, name, status=status)

    # ---- the operator -------------------------------------------------------------------------------------

    def start_operator(self, cluster: str | None = None) -> Operator:
        operator = self.operator = Operator(self, cluster)
        operator.session.on_cut = self.kill_operator
        for (resource, _, _), body in list(self.kube.objects.items()):
            operator.told(resource, False, body)
        self.kube.watch = operator.told
        return operator

    def start_another_operator(self) -> Operator:
        """One beside the one that runs, by mistake; watches tell both. The first, which `kill_operator` does not
        reach any more."""
        first = self.operator
        assert first is not None
        second = self.start_operator()

        def both(resource: Resource, deleted: bool, body: Body) -> None:
            first.told(resource, deleted, body)
            second.told(resource, deleted, body)

        self.kube.watch = both
        return first

    def kill_operator(self) -> None:
        """As SIGKILL does."""
        if self.operator is not None:
            self.operator.kill()
            self.kube.watch = lambda resource, deleted, body: None
            self.operator = None

    async def replace_operator(
        self,
        write: int,
        begin: Callable[[], object] = lambda: None,
        *,
        after: bool = False,
        ended: Callable[[], object] = lambda: False,
    ) -> None:
        """Kill the operator at its n-th write from now on, before that landed or `after`, or once it has `ended` what
        `begin` begins, with less writes; then start another."""
        assert self.operator is not None
        self.operator.session.cut_at(write, after=after)
        begin()
        await self.until(lambda: self.operator is None or ended(), "killed, or done")
        self.kill_operator()
        self.start_operator()

    async def stop_operator(self) -> None:
        """As SIGTERM does."""
        if self.operator is not None:
            await self.operator.fleet.close()
            self.kill_operator()

    # ---- looking ------------------------------------------------------------------------------------------

    def status(self, resource: Resource = STACKS, name: str = IDENTITY.name) -> Body:
        body = self.kube.objects.get((resource, IDENTITY.namespace, name)) or {}
        status: Body = body.get("status") or {}
        return status

    def conditions(self) -> dict[str, Body]:
        return {each["type"]: each for each in self.status().get("conditions", ())}

    def part(self, cell: int = 0) -> Body:
        """What the status says of a cell."""
        cells: list[Body] = self.status().get("cells") or []
        return next((each for each in cells if each["index"] == cell), {})

    def record(self, cell: int = 0) -> Body:
        record: Body = self.part(cell).get("record") or {}
        return record

    def in_service(self, attempt: int = 0, cell: int = 0) -> bool:
        record = self.record(cell)
        return record.get("stage") == "running" and record.get("attempt", 0) >= attempt

    def all_in_service(self) -> bool:
        """Whether each cell that the spec has is."""
        return all(self.in_service(cell=index) for index in range(self.spec.get("cells", 1)))

    def final(self, checkpoint: str) -> bool:
        return self.status(CHECKPOINTS, checkpoint).get("phase") in TERMINAL

    def complete(self) -> bool:
        return self.status().get("phase") == "Completed"

    def phases(self) -> set[str]:
        """Where the participants stand."""
        return {
            str(one.server.participant.gate.phase)
            for cell in self.cells.values()
            for one in cell.processes_by_name.values()
            if not one.alive.died.is_set()
        }

    async def reaches(self, checkpoint: str, phase: str) -> None:
        """Wait until a checkpoint is in a phase, however short that is."""
        reached = asyncio.Event()
        told = self.kube.watch

        def watch(resource: Resource, deleted: bool, body: Body) -> None:
            told(resource, deleted, body)
            if body["metadata"]["name"] == checkpoint and (body.get("status") or {}).get("phase") == phase:
                reached.set()

        self.kube.watch = watch
        await asyncio.wait_for(reached.wait(), LONGEST_SECONDS)
        self.kube.watch = told

    async def until(self, holds: Callable[[], object], what: str = "") -> None:
        give_up = now() + LONGEST_SECONDS
        while not holds():
            if self._kubelet.done():
                self._kubelet.result()
            if now() > give_up:
                raise AssertionError(f"not yet: {what or holds}; the stack: {json.dumps(self.status(), indent=1)}")
            await asyncio.sleep(LOOK_SECONDS)

    async def end(self) -> None:
        self.kill_operator()
        self._kubelet.cancel()
        for cell in self.cells.values():
            cell.kill()
        await end_all()
        for cell in self.cells.values():
            cell.give_back()


def _is_ours(body: Body) -> bool:
    """Whether an object is of the stack `local/rig`: others are looked after elsewhere (gym_rig.beside)."""
    return bool(body["metadata"]["labels"].get(names.STACK_LABEL) == IDENTITY.name)


def _is_engine(pod: Body) -> bool:
    return bool(pod["metadata"]["labels"].get(names.COMPONENT_LABEL) == names.ENGINE_COMPONENT)


def _spec(folder: Path, changes: Mapping[str, Any]) -> Body:
    """The spec that the cell's settings were rendered from, as its stack would have it. A change to None leaves a
    part out."""
    spec = {
        "image": "rig:1",
        "servers": [
            {"name": "env", "kind": "environment", "server": "single-agent-turn"},
            {"name": "policy", "kind": "model", "server": "scripted"},
            {"name": "agent", "kind": "agent", "server": "simple-agent"},
            {"name": "counter", "kind": "resources", "server": "counter"},
        ],
        "collection": {"tasks": str(folder / "tasks.jsonl"), "output": str(folder / "output"), "concurrency": 64},
        "checkpoints": {"storage": {"directory": str(folder / "checkpoints")}},
        **changes,
    }
    return {name: value for name, value in spec.items() if value is not None}


@asynccontextmanager
async def operated(
    folder: Path, rows: Iterable[Mapping[str, Any]], *, rate: float = 100.0, nodes: bool = False, **spec: Any
) -> AsyncIterator[OperatedRig]:
    """A stack with an operator at work, which may watch `nodes` or not; everything ends on the way out."""
    with mock.patch.object(peers, "time", SimpleNamespace(monotonic=now)):
        rig = OperatedRig(folder, rows, rate, spec)
        try:
            rig.nodes_are_watched = nodes
            rig.create()
            rig.start_operator()
            yield rig
        finally:
            await rig.end()


class Reopened:
    """In place of the framework's opening of the watches anew: they tell of all there is, to whom they tell now;
    `times` that was done."""

    def __init__(self, rig: OperatedRig) -> None:
        self._kube, self._told, self.times = rig.kube, rig.kube.watch, 0

    def __call__(self) -> None:
        self.times += 1
        self._kube.watch = self._told
        for (resource, _, _), body in list(self._kube.objects.items()):
            self._told(resource, False, body)
