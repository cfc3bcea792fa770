"""A participant that does nothing by itself, behind a real control plane over HTTP: for tests of the verbs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_servers.control.app import control_app
from gym_servers.control.plane import ControlPlane
from gym_servers.control.writes import Author
from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.messages import PREFIX, Blocker
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import CodeIdentity
from gym_servers.storage.store import ObjectStore

CODE = CodeIdentity(image="", server="stub", config_digest="", record_format=1)
TOKEN = "the-token"
GRACE = 60.0
VERBS: dict[str, dict[str, Any]] = {  # with the fields that each must have
    "prepare": {},
    "renew": {},
    "commit": {"checkpoint_dir": "x"},
    "restore": {"checkpoint_dir": "x", "episode_ids": []},
    "resume": {},
    "retire": {"episode_ids": ["r"]},
    "forget": {"rollout_ids": ["r"]},
}


class Stub(Participant):
    """Blocked while `blockers` is not empty; exports `records` once `exporting` is set."""

    kind = "environment"

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self.blockers: list[Blocker] = []
        self.records: dict[str, bytes] = {"r": b"record of r", "s": b"record of s"}
        self.installed: dict[str, bytes] | None = None
        self.exporting = asyncio.Event()
        self.exporting.set()
        self.retiring = asyncio.Event()
        self.retiring.set()
        self.retired: list[Episode] = []
        self.forgotten: list[str] = []
        self.told_restarts: frozenset[str] = frozenset()
        self.resumes = 0

    def block(self, *where: str, age: float = 1.0) -> None:
        self.blockers = [Blocker(id=one, where=one, age_seconds=age * n) for n, one in enumerate(where)]
        self.gate.touch()

    def survey(self) -> Survey:
        return Survey(list(self.blockers), {"live": len(self.records)}, episodes=frozenset(self.records))

    async def export(self, scope: Scope) -> dict[str, bytes]:
        await self.exporting.wait()
        return {key: data for key, data in self.records.items() if scope.covers(key)}

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> dict[str, bytes]:
        missing = set(plan.episodes) - set(records)
        if missing:
            raise ProtocolError("invalid_checkpoint_state", f"no record of {sorted(missing)}")
        return {episode.key: records[key] for key, episode in plan.episodes.items()}

    def install(self, staged: dict[str, bytes]) -> list[str]:
        self.installed = staged
        return list(staged)

    def uninstall(self) -> None:
        self.installed = None

    async def retire(self, episodes: Sequence[Episode]) -> None:
        await self.retiring.wait()
        self.retired += episodes

    def closing(self, restarts: frozenset[str]) -> None:
        self.told_restarts = restarts

    def resumed(self) -> None:
        self.resumes += 1

    def forget(self, rollout_ids: Any) -> None:
        self.forgotten += rollout_ids


class Refused(Exception):
    """The control API's error, as a test reads it."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.status, self.code, self.detail = status, code, detail


class Control:
    """A stub and the client that commands it. `session` names the process that writes."""

    def __init__(self, folder: Path, *, coordinated: bool = True, session: str = "session-1", **gate: Any) -> None:
        self.time = asyncio.get_running_loop().time
        self.folder = folder
        self.gate = Gate(coordinated=coordinated, clock=self.time, **gate)
        self.stub = Stub(self.gate)
        author = Author("environment", "env", session, CODE)
        self.plane = ControlPlane(self.stub, author, self.open_store, grace=GRACE, wall=self.time)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(control_app(self.plane, TOKEN)),
            base_url=f"http://control{PREFIX}",
            headers={"authorization": f"Bearer {TOKEN}"},
        )

    def open_store(self, uri: str) -> ObjectStore:
        return DirectoryStore(Path(uri))

    def body(self, checkpoint_id: str, seconds: float = 30.0, **fields: Any) -> dict[str, Any]:
        return {"checkpoint_id": checkpoint_id, "deadline_ts": self.time() + seconds, **fields}

    async def call(
        self, verb: str, checkpoint_id: str = "cp", seconds: float = 30.0, **fields: Any
    ) -> dict[str, Any]:
        """Raises Refused."""
        response = await self.http.post(f"/{verb}", json=self.body(checkpoint_id, seconds, **fields))
        return answer(response)

    async def status(self) -> dict[str, Any]:
        return answer(await self.http.get("/status"))

    @property
    def uri(self) -> str:
        return str(self.folder / "cp")

    async def commit(self, checkpoint_id: str = "cp", **fields: Any) -> dict[str, Any]:
        return await self.call("commit", checkpoint_id, **{"checkpoint_dir": self.uri, **fields})

    async def restore(self, checkpoint_id: str = "restore", **fields: Any) -> dict[str, Any]:
        wanted = {"checkpoint_dir": self.uri, "episode_ids": ["r"], "cell_attempt": 1, **fields}
        return await self.call("restore", checkpoint_id, **wanted)


def answer(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()
    if not response.is_success:
        raise Refused(response.status_code, body["error"]["code"], body["error"]["detail"])
    return body


async def written(control: Control, **fields: Any) -> dict[str, Any]:
    """A checkpoint on disk, and the process back in service."""
    await control.call("prepare")
    reply = await control.commit(**fields)
    await control.call("resume")
    return reply


async def refused(call: Awaitable[Any], code: str) -> Refused:
    """How it was refused: with this code."""
    with pytest.raises(Refused) as error:
        await call
    assert error.value.code == code, error.value
    return error.value
