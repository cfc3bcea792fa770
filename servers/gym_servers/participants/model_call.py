"""A call to the policy as its caller made it, and as whoever generates it sees it."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gym_servers.capture.ledger import CallRecord
from gym_servers.capture.tokens import Tokens
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode


@dataclass(frozen=True)
class Asked:
    """A call as its caller made it. `turns`: digests of its conversation after each message. `budget`: tokens it may
    generate. `unfaithful`: why a prefix of it cannot be continued; empty where it can. `thoughts`: digests of each
    message's reasoning, empty where none came along."""

    position: str
    digest: str
    turns: tuple[str, ...] = ()
    budget: int = 4096
    unfaithful: str = ""
    thoughts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A call that ended without a reply."""

    position: str
    digest: str
    reason: str


@dataclass(frozen=True)
class Stream:
    """An engine's stream for a call: its ticket, and how many tokens the call had when it began."""

    ticket: str
    start: int


@dataclass(eq=False)
class Call:
    """A call in progress: `prompt` and `tokens` may hold what an earlier process had, and grow from there. `repeat`
    counts delivered calls with the same parent and request. `begun_anew` is told why `tokens` are dropped. `created`
    is Unix seconds."""

    episode: Episode
    asked: Asked
    parent_chain: str = ""
    parent: CallRecord | None = None
    repeat: int = 0
    prompt: array[int] | None = None
    tokens: Tokens = field(default_factory=Tokens)
    budget: int = 0
    waiters: int = 0
    stopping: bool = False
    stream: Stream | None = None
    abandoned: asyncio.TimerHandle | None = None
    begun_anew: Callable[[str], None] = lambda reason: None
    created: float = field(default_factory=time.time)
    _growth: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[CallRecord] | None = None

    @property
    def key(self) -> str:
        return self.episode.key

    @property
    def position(self) -> str:
        return self.asked.position

    @property
    def digest(self) -> str:
        return self.asked.digest

    @property
    def unfaithful(self) -> str:
        return self.asked.unfaithful

    def begin_stream(self, start: int) -> str:
        """A stream is about to begin, when there are so many tokens; its ticket."""
        self.stream = Stream(uuid.uuid4().hex, start)
        return self.stream.ticket

    def grew(self) -> None:
        """There are more tokens, or other ones."""
        self._growth.set()
        self._growth = asyncio.Event()

    @property
    def growth(self) -> asyncio.Event:
        """Set once there are other tokens than now."""
        return self._growth

    def stands_for(self, episode: Episode, asked: Asked) -> bool:
        """Whether this is the call at that place of the episode."""
        return not self.stopping and self.episode == episode and self.position == asked.position

    @property
    def task(self) -> asyncio.Task[CallRecord]:
        assert self._task is not None  # set where the call is made
        return self._task


Generate = Callable[[Call], Awaitable[CallRecord]]


def same_request(episode: Episode, asked: Asked, known: str) -> None:
    """Raise `checkpoint_conflict` where a place of an episode comes with another request than before."""
    if asked.digest != known:
        raise ProtocolError(
            "checkpoint_conflict", f"call {asked.position} of {episode.key} was made with another request"
        )
