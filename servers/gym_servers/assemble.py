"""One server process from its settings: the participant, its data application, and its control plane."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_servers.control.tokens import ControlTokens
from gym_servers.control.writes import Author
from gym_servers.http.apps import base_app
from gym_servers.http.peers import Peers
from gym_servers.journal.client import open_journal
from gym_servers.participants.base import Participant
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import FORMAT
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.registry import check_server, load_class
from gym_servers.stack.render import cell_folder, checkpoint_root
from gym_servers.stack.settings import ServerSettings, SettingsError, describe
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


def assemble(settings: ServerSettings, cookie_secret: str, tokens: ControlTokens | None = None) -> Server:
    """Build a server. `tokens` open what only the stack's owner may read, to nobody where there are none. Raises
    SettingsError for names and configuration that cannot work."""
    check_server(settings.kind, settings.server)
    gate = Gate(
        enabled=settings.checkpoint.enabled,
        coordinated=settings.checkpoint.coordinated,
        attempt_floor=settings.checkpoint.attempt_floor,
    )
    peers = Peers(settings.peers, cookie_secret, extended=settings.checkpoint.enabled)
    secrets = _Secrets(cookie_secret, tokens)
    participant, app, background = _BUILDERS[settings.kind](settings, gate, peers, secrets)
    code = CodeIdentity(
        image=settings.image,
        server=settings.server,
        config_digest=digest_of(settings.config),
        record_format=FORMAT,
    )
    author = Author(settings.kind, settings.name, uuid.uuid4().hex, code)
    return Server(settings, participant, author, app, peers, background)


@dataclass(frozen=True)
class _Secrets:
    cookie: str = field(repr=False)
    control: ControlTokens | None


_Parts = tuple[Participant, "FastAPI", "Callable[[], Awaitable[None]] | None"]


def _cell_root(settings: ServerSettings, index: int) -> ObjectStore | None:
    """Where a cell of this stack keeps its checkpoints, and the attempt numbers it has used up."""
    if not settings.checkpoint.enabled or not (settings.storage.s3 or settings.storage.directory):
        return None
    return open_store(checkpoint_root(settings.storage, settings.stack, index), settings.storage.s3)


def _attempts(settings: ServerSettings, owner: str) -> Callable[[int], Awaitable[None]]:
    """Makes attempt numbers durable as used up by `owner`. Raises StorageError, ObjectConflict."""
    from gym_servers.storage.cells import use_attempt_up

    cell = _cell_root(settings, settings.cell)

    async def use_up(attempt: int) -> None:
        if cell is not None:
            await asyncio.to_thread(use_attempt_up, cell, attempt, owner)

    return use_up


def _environment(settings: ServerSettings, gate: Gate, peers: Peers, secrets: _Secrets) -> _Parts:
    from pydantic import ValidationError

    from gym_servers.environment.app import create_app
    from gym_servers.environment.config import EnvironmentConfig
    from gym_servers.environment.legacy_agent import LegacyAgent
    from gym_servers.environment.server import EnvironmentServer
    from gym_servers.environment.single_agent_turn import SingleAgentTurn
    from gym_servers.participants.environment import EnvironmentParticipant

    try:
        config = EnvironmentConfig.model_validate(settings.config)
    except ValidationError as error:
        raise SettingsError(f"server {settings.name}: `config` is not valid: {describe(error)}") from error
    kind = LegacyAgent if settings.server == "legacy-agent" else SingleAgentTurn
    boundaries = kind.checkpoint_boundaries and config.checkpoint_boundaries is not False
    use_up = _attempts(settings, uuid.uuid4().hex) if settings.checkpoint.external_driver else None
    participant = EnvironmentParticipant(gate, boundaries=boundaries, limits=config.limits(), use_up=use_up)
    agent = peers.only("agent", config.agent)
    server: EnvironmentServer
    if kind is LegacyAgent:
        server = LegacyAgent(participant, peers, agent=agent)
    else:
        resources = peers.only("resources", config.resources)
        server = SingleAgentTurn(participant, peers, secrets.cookie, agent=agent, resources=resources)
    return participant, create_app(participant, server, settings.cell, _leaves(settings)), None


def _leaves(settings: ServerSettings) -> Callable[[], bool]:
    """Whether the cell of this process is to go. Blocks."""
    from gym_servers.stack.cells import counted_in

    if not settings.cells_file:
        return lambda: False
    count = counted_in(Path(settings.cells_file))
    return lambda: settings.cell >= count().wanted


def _agent(settings: ServerSettings, gate: Gate, peers: Peers, secrets: _Secrets) -> _Parts:
    from gym_servers.agent.app import create_app
    from gym_servers.agent.own_app import guarded
    from gym_servers.agent.row_run import RowRuns
    from gym_servers.agent.server import AgentServer, AgentSetup, hooks_of
    from gym_servers.participants.agent import AgentParticipant

    kind = load_class(settings.server)
    if not issubclass(kind, AgentServer):
        raise SettingsError(f"{settings.server!r} is not a subclass of gym_servers.agent.server.AgentServer")
    config = dict(settings.config) if ":" in settings.server else _config(settings, _AGENT_CONFIG[settings.server])
    # The participant is made first: an agent's loop stands at its boundaries.
    made: list[AgentServer] = []
    exportable = kind.checkpoint_sessions_supported
    participant = AgentParticipant(gate, hooks_of(made), exportable=exportable)
    try:
        agent = kind(AgentSetup(settings.name, config, participant, peers, secrets.cookie))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"server {settings.name}: `config`: {error}") from error
    made.append(agent)
    own = agent.setup_webserver()
    if own is not None:
        return participant, guarded(own, participant, settings.name), None
    resources = None
    if config.get("resources") or len(settings.peers_of("resources")) == 1:
        resources = peers.only("resources", config.get("resources"))
    rows = None
    if resources is not None:
        verified = not config.get("skip_verification", False)
        rows = RowRuns(participant, agent, peers, resources, verified=verified)
    return participant, create_app(agent, rows, resources), None


_AGENT_CONFIG = {
    "simple-agent": {"model", "max_steps", "resources", "skip_verification"},
    "scratch-agent": {"model", "folder"},
}


def _resources(settings: ServerSettings, gate: Gate, _: Peers, secrets: _Secrets) -> _Parts:
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
    return participant, create_app(participant, server, journal, settings.name, secrets.cookie, mcp=mcp), None


def _model(settings: ServerSettings, gate: Gate, _: Peers, secrets: _Secrets) -> _Parts:
    from pydantic import ValidationError

    from gym_servers.capture.store import LedgerStore
    from gym_servers.model.app import Policy, create_app
    from gym_servers.model.capture_routes import add_capture_routes
    from gym_servers.model.config import EngineConfig, VllmConfig
    from gym_servers.model.dialect import Dialect
    from gym_servers.model.engine_client import EngineClient
    from gym_servers.model.scripted_dialect import ScriptedDialect
    from gym_servers.participants.model import ModelParticipant

    kind = VllmConfig if settings.server == "vllm" else EngineConfig
    try:
        config = kind.model_validate(settings.config)
    except ValidationError as error:
        raise SettingsError(f"server {settings.name}: `config` is not valid: {describe(error)}") from error
    dialect: Dialect = ScriptedDialect()
    sampling: dict[str, Any] = {"temperature": 0.0}
    if isinstance(config, VllmConfig):
        from gym_servers.model.vllm_dialect import open_dialect

        try:
            dialect, sampling = open_dialect(config), config.sampling
        except SettingsError as error:
            raise SettingsError(f"server {settings.name}: `config`: {error}") from error
    guarded = config.cut_at_engine and gate.enabled and secrets.control is not None
    folder = cell_folder(settings.stack, settings.cell)
    engine = EngineClient(
        config.base_url,
        config.model,
        os.environ.get("GYM_ENGINE_API_KEY", ""),
        says_version=config.weight_versions,
        headers_of=lambda: {headers.ENGINE_ATTEMPT: f"{folder};{gate.fence.floor}"} if guarded else {},
    )
    policy = Policy(
        engine,
        dialect,
        max_tokens=config.max_tokens,
        context=config.max_model_len if isinstance(config, VllmConfig) else None,
        bounded=isinstance(config, VllmConfig),
        sampling=sampling,
        training=config.return_token_ids,
    )
    cut = None
    if guarded and secrets.control is not None:
        from gym_servers.model.worker_cut import WorkerCut

        if not (settings.storage.s3 or settings.storage.directory):
            raise SettingsError(f"server {settings.name}: `config.cut_at_engine` needs a storage for checkpoints")
        shared = checkpoint_root(settings.storage, settings.stack, settings.cell).removesuffix(f"/{folder}")
        cut = WorkerCut(engine, lambda: open_store(shared, settings.storage.s3), folder, secrets.control.bearer)
    participant = ModelParticipant(gate, LedgerStore(config.cache_bytes), cut, cut.begins if cut else None)
    app = create_app(participant, policy)
    if gate.enabled and secrets.control is not None:
        add_capture_routes(app, participant, secrets.control)
    return participant, app, None


def _collection(settings: ServerSettings, gate: Gate, peers: Peers, _: _Secrets) -> _Parts:
    from gym_servers.collection.driver import EnvironmentRun
    from gym_servers.collection.output import BucketOutput, DirectoryOutput
    from gym_servers.collection.shares import Shares
    from gym_servers.collection.tasks import load_tasks, rollouts
    from gym_servers.participants.collection import Alone, Assignment, CollectionParticipant, Job, Output, Rollout
    from gym_servers.stack.cells import counted_in
    from gym_servers.storage.cells import reserve_attempt

    wanted = settings.collection
    if wanted is None:
        raise SettingsError("a collection needs `collection.tasks` and `collection.output`")
    store = open_store(wanted.output, settings.storage.s3)
    owner = uuid.uuid4().hex

    def unused(index: int) -> int:
        root = _cell_root(settings, index)
        return reserve_attempt(root, 0, owner) if root is not None else 0

    def output(todo: list[Rollout]) -> Output:
        if wanted.output.startswith("s3://") or settings.cells_file:
            return BucketOutput(store, todo)
        return DirectoryOutput(Path(wanted.output.removeprefix("file://")), todo)

    def assignment(todo: list[Rollout]) -> Assignment:
        if not settings.cells_file:
            return Alone()
        count = counted_in(Path(settings.cells_file))
        return Shares(store, settings.stack.uid, todo, settings.cell, count, unused)

    async def find() -> Job:
        todo = rollouts(await asyncio.to_thread(load_tasks, wanted.tasks, settings.storage.s3), wanted.repeats)
        return Job(todo, output(todo), assignment(todo))

    participant = CollectionParticipant(
        gate,
        find,
        EnvironmentRun(peers, peers.only("environment")),
        _attempts(settings, owner),
        concurrency=wanted.concurrency,
        max_failures=wanted.max_failures,
    )
    app = base_app("collection", lambda: gate.is_open or gate.checkpoint_open)
    return participant, app, participant.drive


_BUILDERS: dict[str, Callable[[ServerSettings, Gate, Peers, _Secrets], _Parts]] = {
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
