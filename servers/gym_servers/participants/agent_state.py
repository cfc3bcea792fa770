"""What the agent participant keeps of a session, and how it becomes a record.

A record names tools by peer and unsigned session contents, never by address or signature, and leaves out what the
activation's request brings again: the environment sends it when the episode continues. Nothing is built or serialised
before an export.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_servers.participants.base import RestorePlan
from gym_servers.participants.records import from_bytes, reading
from gym_servers.protocol.identity import Episode, parse_key

Items = list[dict[str, Any]]


@dataclass(eq=False)
class Activation:
    """A session's `ordinal`-th request to its turn loop; 0 where nothing tells it from another.

    `items` is the output so far; the loop appends whole turns to it, without an await in between. `failed` while its
    error waits for a checkpoint to end."""

    index: int | None
    digest: str
    since: float
    ordinal: int = 1
    items: Items = field(default_factory=list)
    model_calls: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    task: asyncio.Task[Any] | None = None
    standing: bool = True
    failed: bool = False
    where: str = "boundary"


@dataclass(frozen=True)
class Reply:
    """The last completed activation: bound to its request, given again when its index is repeated."""

    index: int
    digest: str
    response: dict[str, Any]


@dataclass(frozen=True)
class RowRun:
    """A session that serves a whole row: the tool session that was seeded for it."""

    digest: str
    resources_session: str
    verify_replays: bool


@dataclass(eq=False)
class Session:
    """One agent session. `accesses` name tools by peer and unsigned session contents, never by address. Headers that
    come with them may be secrets and are in memory alone, so a session that has any starts over: `restart`."""

    id: str
    episode: Episode
    accesses: list[dict[str, Any]]
    reply: Reply | None = None
    activation: Activation | None = None
    restored: Activation | None = None
    activations: int = 0
    closing: bool = False
    closing_since: float = 0.0
    ending: asyncio.Task[Any] | None = None
    restart: bool = False
    anonymous: bool = False
    row: RowRun | None = None
    state: Any = None

    @property
    def next_index(self) -> int:
        return 1 if self.reply is None else self.reply.index + 1

    @property
    def named(self) -> Episode | None:
        """The episode as calls carry it: none where the caller gave none, which only is with checkpointing off."""
        return None if self.anonymous else self.episode

    @property
    def failed(self) -> bool:
        return self.activation is not None and self.activation.failed


@dataclass(frozen=True)
class AgentHooks:
    """How an agent carries what it keeps of its own, by capture key. `restore` validates all, then installs all;
    `retire` ends one session's own state - such as a sandbox - and may be repeated."""

    export: Callable[[Sequence[str]], Awaitable[Mapping[str, Any]]]
    restore: Callable[[Mapping[str, Any]], Awaitable[None]]
    retire: Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class AnsweredRow:
    """A row that was answered in full; its caller may not have got the answer."""

    episode: Episode
    digest: str
    result: Any


ANSWERED = "answered"  # tells its record from a session's


def answered_record(row: AnsweredRow) -> dict[str, Any]:
    return {ANSWERED: row.episode.key, "digest": row.digest, "result": row.result}


async def _nothing(_: Any) -> Any:
    return {}


NO_HOOKS = AgentHooks(_nothing, _nothing, _nothing)


def session_record(session: Session, state: Any) -> dict[str, Any]:
    """A session as it stands. `state`: what the agent keeps of its own."""
    active = session.activation or session.restored
    return {
        "session": session.id,
        "episode": session.episode.key,
        "accesses": [_recorded(access) for access in session.accesses],
        "activations": session.activations,
        "reply": session.reply
        and {
            "index": session.reply.index,
            "digest": session.reply.digest,
            "response": session.reply.response,
        },
        "activation": active
        and {
            "index": active.index,
            "ordinal": active.ordinal,
            "digest": active.digest,
            "items": list(active.items),  # the loop appends to its own
            "model_calls": active.model_calls,
            "usage": active.usage,
        },
        "row": session.row
        and {
            "digest": session.row.digest,
            "session": session.row.resources_session,
            "verify_replays": session.row.verify_replays,
        },
        "state": state,
    }


def _recorded(access: Mapping[str, Any]) -> dict[str, Any]:
    return {"peer": access["peer"], "jar": access["jar"], "tools": access.get("tools")}


def read_record(name: str, data: bytes, plan: RestorePlan) -> Session | AnsweredRow | None:
    """What a record holds, None where its episode is not restored. Raises `invalid_checkpoint_state`."""
    record = from_bytes(name, data)
    with reading(name):
        if ANSWERED in record:
            episode = plan.restored(parse_key(record[ANSWERED]).key)
            return None if episode is None else AnsweredRow(episode, str(record["digest"]), record["result"])
        episode = plan.restored(parse_key(record["episode"]).key)
        if episode is None:
            return None
        session = Session(record["session"], episode, [dict(access) for access in record["accesses"]])
        session.activations = int(record["activations"])
        session.state = record.get("state")
        if (reply := record["reply"]) is not None:
            session.reply = Reply(int(reply["index"]), reply["digest"], dict(reply["response"]))
        if (active := record["activation"]) is not None:
            session.restored = Activation(
                active["index"],
                active["digest"],
                0.0,
                int(active["ordinal"]),
                items=list(active["items"]),
                model_calls=int(active["model_calls"]),
                usage=dict(active["usage"]),
            )
        if (row := record.get("row")) is not None:
            session.row = RowRun(row["digest"], row["session"], bool(row["verify_replays"]))
        return session
