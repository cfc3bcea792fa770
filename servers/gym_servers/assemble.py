"""One server process from its settings: the participant, its data application, and its control plane."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_servers.control.writes import Author
from gym_servers.http.apps import base_app
from gym_servers.http.peers import Peers
from gym_servers.journal.client import open_journal
from gym_servers.participants.base import Participant
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import FORMAT
from gym_servers.protocol.digests import digest_of
from gym_servers.registry import check_server, load_class
from gym_servers.stack.render import checkpoint_root
from gym_servers.stack.settings import ServerSettings, SettingsError
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CodeIdentity
from gym_servers.storage.store import ObjectStore

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True)
class Server:
    """A process's parts. `background` runs beside the data application for as long as the process lives; `ending`
    gives what is to be done before it ends, None where nothing is."""

    settings: ServerSettings
    participant: Participant
    author: Author
    app: FastAPI
    peers: Peers
    background: Callable[[], Awaitable[None]] | None = None
    ending: Callable[[], Coroutine[Any, Any, None] | None] = lambda: None

    def open_store(self, uri: str) -> ObjectStore:
        return open_store(uri, self.settings.storage.s3)


def assemble(settings: ServerSettings, cookie_secret: str) -> Server:
    """Build a server. Raises SettingsError for names and configuration that cannot work."""
    check_server(settings.kind, settings.server)
    gate = Gate(
        enabled=settings.checkpoint.enabled,
        coordinated=settings.checkpoint.coordinated,
        attempt_floor=settings.checkpoint.attempt_floor,
    )
    peers = Peers(settings.peers, cookie_secret)
    participant, app, background = _BUILDERS[settings.kind](settings, gate, peers, cookie_secret)
    code = CodeIdentity(
        image=settings.image,
        server=settings.server,
        config_digest=digest_of(settings.config),
        record_format=FORMAT,
    )
    author = Author(settings.kind, settings.name, uuid.uuid4().hex, code)
    return Server(settings, participant, author, app, peers, background)


_Parts = tuple[Participant, "FastAPI", "Callable[[], Awaitable[None]] | None"]


def _environment(settings: ServerSettings, gate: Gate, peers: Peers, secret: str) -> _Parts:
    from gym_servers.environment.app import create_app
    from gym_servers.environment.single_agent_turn import SingleAgentTurn
    from gym_servers.participants.environment import EnvironmentParticipant

    config = _config(settings, {"agent", "resources"})
    participant = EnvironmentParticipant(gate)
    turn = SingleAgentTurn(
        participant,
        peers,
        secret,
        agent=peers.only("agent", config.get("agent")),
        resources=peers.only("resources", config.get("resources")),
    )
    return participant, create_app(participant, turn), None


def _agent(settings: ServerSettings, gate: Gate, peers: Peers, secret: str) -> _Parts:
    from gym_servers.agent.app import create_app
    from gym_servers.agent.simple_agent import SimpleAgent
    from gym_servers.participants.agent import AgentParticipant

    config = _config(settings, {"model", "max_steps"})
    participant = AgentParticipant(gate)
    agent = SimpleAgent(
        participant,
        peers,
        model=peers.only("model", config.get("model")),
        max_steps=int(config.get("max_steps", 64)),
    )
    return participant, create_app(participant, agent, peers, settings.name, secret), None


def _resources(settings: ServerSettings, gate: Gate, _: Peers, secret: str) -> _Parts:
    from gym_servers.resources.app import create_app, participant_of
    from gym_servers.resources.server import ResourcesServer

    kind = load_class(settings.server)
    if not issubclass(kind, ResourcesServer):
        raise SettingsError(f"{settings.server!r} is not a subclass of gym_servers.resources.server.ResourcesServer")
    config = dict(settings.config)
    journal = open_journal(config.pop("journal", None))
    mcp = config.pop("mcp", False)
    if not isinstance(mcp, bool):
        raise SettingsError(f"server {settings.name}: `config.mcp` is true or false")
    try:
        server = kind(config)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"server {settings.name}: `config`: {error}") from error
    participant = participant_of(gate, server)
    return participant, create_app(participant, server, journal, settings.name, secret, mcp=mcp), None


def _model(settings: ServerSettings, gate: Gate, _: Peers, __: str) -> _Parts:
    from gym_servers.model.app import create_app
    from gym_servers.model.engine_client import EngineClient
    from gym_servers.model.scripted_dialect import ScriptedDialect
    from gym_servers.participants.model import ModelParticipant

    config = _config(settings, {"base_url", "model"})
    if not isinstance(config.get("base_url"), str):
        raise SettingsError(f"server {settings.name}: set `config.base_url` to the engine's address")
    model = str(config.get("model", "scripted"))
    participant = ModelParticipant(gate)
    engine = EngineClient(config["base_url"], model)
    return participant, create_app(participant, engine, ScriptedDialect(), model), None


def _collection(settings: ServerSettings, gate: Gate, peers: Peers, _: str) -> _Parts:
    from gym_servers.collection.driver import EnvironmentRun
    from gym_servers.collection.output import BucketOutput, DirectoryOutput
    from gym_servers.collection.tasks import TasksError, load_tasks, rollouts
    from gym_servers.participants.collection import CollectionParticipant, Output
    from gym_servers.storage.cells import use_attempt_up
    from gym_servers.storage.store import StorageError

    job = settings.collection
    if job is None:
        raise SettingsError("a collection needs `collection.tasks` and `collection.output`")
    problem = ""
    try:
        todo = rollouts(load_tasks(job.tasks, settings.storage.s3), job.repeats)
    except (TasksError, StorageError) as error:
        # The process stays up and says so: a crash loop would show the reason to nobody.
        todo, problem = [], str(error)
    store = open_store(job.output, settings.storage.s3)
    output: Output = BucketOutput(store, todo)
    if not job.output.startswith("s3://"):
        output = DirectoryOutput(Path(job.output.removeprefix("file://")), todo)
    cell: ObjectStore | None = None
    if settings.checkpoint.enabled and (settings.storage.s3 or settings.storage.directory):
        root = checkpoint_root(settings.storage, settings.stack, settings.cell)
        cell = open_store(root, settings.storage.s3)

    owner = uuid.uuid4().hex

    async def persist(attempt: int) -> None:
        if cell is not None:
            await asyncio.to_thread(use_attempt_up, cell, attempt, owner)

    participant = CollectionParticipant(
        gate,
        todo,
        output,
        EnvironmentRun(peers, peers.only("environment")),
        persist,
        concurrency=job.concurrency,
        max_failures=job.max_failures,
        problem=problem,
    )
    app = base_app("collection", lambda: gate.is_open or gate.checkpoint_open)
    return participant, app, participant.drive


_BUILDERS: dict[str, Callable[[ServerSettings, Gate, Peers, str], _Parts]] = {
    "environment": _environment,
    "agent": _agent,
    "resources": _resources,
    "model": _model,
    "collection": _collection,
}


def _config(settings: ServerSettings, known: set[str]) -> dict[str, Any]:
    unknown = set(settings.config) - known
    if unknown:
        raise SettingsError(
            f"server {settings.name}: unknown `config` {', '.join(sorted(unknown))}; "
            f"known: {', '.join(sorted(known))}"
        )
    return dict(settings.config)
