"""A collection of counter rows with the tiny model on real processes, and what was generated for it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx

from gym_kit.local_run import LocalRun, followed
from gym_servers.capture.ledger import Ledger, decode
from gym_servers.coordination.cell_host import Process
from gym_servers.coordination.client import ParticipantClient
from gym_servers.local.demo import account_of
from gym_servers.proof.account import Account
from gym_servers.protocol.identity import Episode, parse_key
from gym_servers.protocol.messages import Status
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.packs import load_manifest, load_records
from gym_vllm.engine import MODEL, NAME, Engine
from gym_vllm.journal import Generated


def manifest(folder: Path, engine: Engine, rollouts: int, *, cut_at_engine: bool) -> dict[str, Any]:
    policy = {
        "base_url": engine.url,
        "model": NAME,
        "tokenizer": str(MODEL),
        "sampling": {"temperature": 0},
        "max_tokens": 256,
        "return_token_ids": True,
        "cut_at_engine": cut_at_engine,
    }
    return {
        "apiVersion": "gymops.dev/v1alpha1",
        "kind": "GymStack",
        "metadata": {"name": "tiny"},
        "spec": {
            "servers": [
                {"name": "env", "kind": "environment", "server": "single-agent-turn"},
                {"name": "policy", "kind": "model", "server": "vllm", "config": policy},
                {"name": "agent", "kind": "agent", "server": "simple-agent"},
                {
                    "name": "counter",
                    "kind": "resources",
                    "server": "counter",
                    "config": {"journal": str(folder / "journal.jsonl")},
                },
            ],
            "collection": {
                "tasks": str(folder / "tasks.jsonl"),
                "output": str(folder / "output"),
                "concurrency": rollouts,
            },
            "checkpoints": {"storage": {"directory": str(folder / "checkpoints")}},
        },
    }


@dataclass
class Collection(LocalRun):
    """A run, and what a test does to it."""

    patience: ClassVar[float] = 240.0
    pause: ClassVar[float] = 0.02

    engine: Engine
    earlier: int  # streams of runs before this one
    _told: dict[str, dict[str, int]] = field(default_factory=dict)  # by each policy server that there was

    def own(self) -> list[Generated]:
        return self.engine.generated()[self.earlier :]

    async def kill(self, names: tuple[str, ...]) -> None:
        await self.generations()  # a policy server takes what it has counted along
        for name in names:
            self.runner.host.kill(name)

    async def generations(self) -> Counter[str]:
        """What policy servers have said has become of calls, all that there were."""
        status = await self._ask_policy()
        self._told[str(self._policy.incarnation)] = status.generations
        counted: Counter[str] = Counter()
        for generations in self._told.values():
            counted.update(generations)
        return counted

    async def _ask_policy(self) -> Status:
        policy = self._policy
        assert policy.control_url is not None
        token = (self.folder / "control-token").read_text()
        async with httpx.AsyncClient(trust_env=False) as http:
            client = ParticipantClient("policy", "model", policy.control_url, token, http)
            return await client.status_by(time.time() + 60.0)

    @property
    def _policy(self) -> Process:
        return self.runner.host._process("policy")

    async def arrived(self) -> None:
        """Returns once the policy server has whatever the engine, which stands, had sent to it."""
        await self.engine.stands()
        await self.engine.has_arrived()
        await self._ask_policy()  # what was read before it asked us is counted before it answers

    def account(self) -> Account:
        return account_of(self.folder, self.runner.controller.record, self.rollouts)

    def cuts(self) -> dict[int, dict[str, Ledger]]:
        """The ledgers that each recovery continued from, by its attempt and by capture key."""
        found = {}
        for recovery in self.runner.controller.record.recoveries:
            if recovery.checkpoint is not None:
                found[recovery.attempt] = ledgers_of(recovery.checkpoint.uri)
        return found


def ledgers_of(checkpoint: str) -> dict[str, Ledger]:
    """What a checkpoint has of model calls, by capture key."""
    store = open_store(checkpoint)
    publication = read_publication(store.get(CHECKPOINT))
    member = next(one for one in publication.members if one.kind == "model")
    known, _ = load_manifest(store, f"model/{member.instance}", member.manifest_digest)
    return dict(decode(*record) for record in load_records(store, known).items())


def _prepared(folder: Path, engine: Engine, rows: list[Mapping[str, Any]], *, cut_at_engine: bool) -> dict[str, Any]:
    """The run's manifest; its folder has what it refers to."""
    folder.mkdir(parents=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = manifest(folder, engine, len(rows), cut_at_engine=cut_at_engine)
    if cut_at_engine:
        # The engine was started before the cell: both have to know one storage and one token.
        (folder / "control-token").write_text(engine.token)
        document["spec"]["checkpoints"]["storage"] = {"directory": str(engine.storage)}
    return document


@asynccontextmanager
async def collecting(
    folder: Path, engine: Engine, rows: list[Mapping[str, Any]], *, cut_at_engine: bool = False
) -> AsyncIterator[Collection]:
    """Start a collection of these rows, all at once."""
    earlier = len(engine.generated())
    document = _prepared(folder, engine, rows, cut_at_engine=cut_at_engine)
    async with followed(document, folder) as cell:
        run = Collection(folder, cell, len(rows), engine, earlier)
        await run.in_service(0)
        yield run


@dataclass(frozen=True)
class Turn:
    """One model call of a trajectory."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def trajectories(folder: Path) -> dict[str, list[Turn]]:
    """The tokens of each rollout's row, turn by turn."""
    found = {}
    for line in (folder / "output" / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        found[row["_ng_rollout_id"]] = [
            Turn(item["prompt_token_ids"], item["generation_token_ids"], item["generation_log_probs"])
            for item in row["response"]["output"]
            if "generation_token_ids" in item
        ]
    return found


def not_kept(
    cut: Mapping[str, Ledger],
    before: Mapping[str, Ledger],
    streams: Sequence[Generated],
    said: Callable[[Generated], Sequence[int]],
) -> list[str]:
    """Of which streams a checkpoint has less, or something else, than they had `said` by then. `before`: the
    checkpoint that they may have gone on from."""
    went_on = {whole for ledger in before.values() for whole in _wholes(ledger)}
    found = []
    for one in streams:
        whole = (*one.prompt, *said(one))
        known = _wholes(cut[one.key]) if one.key in cut else set()
        if (said(one) or whole in went_on) and whole not in known:
            found.append(f"{one.key} {one.position}: {len(said(one))} tokens behind {len(one.prompt)}")
    return found


def _wholes(ledger: Ledger) -> set[tuple[int, ...]]:
    """Prompts and what was said behind them: of delivered calls, and of those in progress."""
    calls = {(*call.prompt_ids, *call.ids) for call in ledger.calls}
    return calls | {(*prefix.prompt_ids, *prefix.tokens.ids) for prefix in ledger.prefixes}


def generated_again(cuts: Mapping[int, Mapping[str, Ledger]], streams: Sequence[Generated]) -> list[str]:
    """Whatever was generated for a recovery although its checkpoint held it: tokens of kept prefixes, and delivered
    calls."""
    found = []
    for attempt, ledgers in cuts.items():
        for key, ledger in ledgers.items():
            episode = Episode(parse_key(key).rollout_id, attempt)
            own = [one for one in streams if one.key == episode.key]
            for prefix in ledger.prefixes:
                prompt, kept = list(prefix.prompt_ids), list(prefix.tokens.ids)
                for one in own:
                    same = prompt and not prefix.skipped and one.prompt[: len(prompt)] == prompt
                    if same and one.prompt[: len(prompt) + len(kept)] != [*prompt, *kept]:
                        found.append(f"{episode.key} {prefix.position}: kept {len(kept)} tokens")
            delivered = [list(call.prompt_ids) for call in ledger.calls]
            found += [f"{episode.key} {one.position}: a delivered call" for one in own if one.prompt in delivered]
    return found
