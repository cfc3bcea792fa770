"""Sends `/run` to the environments of a stack and goes on where a call breaks off.

refused with stale_attempt     replaced, retired, or of before a recovery: ask, and send what the answer says
refused with admission_closed  a checkpoint or a recovery: ask until the cell is in service
no answer                      the environment died, or the connection did: ask, since it may run all the same

NotInService   a cell gave nothing to go on with for longer than the client's patience
RunFailed      the environment answered with an error that a repeat does not mend
ProtocolError  the request itself is refused, such as another task under the same rollout
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from gym_servers.client.next_send import Send, next_send
from gym_servers.protocol.errors import ProtocolError, refusal_of
from gym_servers.protocol.identity import Episode, next_attempt
from gym_servers.protocol.rollouts import FORGET_PATH, MAX_PAGE, STATE_PATH, CellState, RolloutPage, RolloutState
from gym_servers.protocol.routing import cell_of

log = logging.getLogger("gym_servers.client")

RETRY_SECONDS = 0.5  # between questions to a cell that is not in service
ASK_SECONDS = 5.0  # for one question
PATIENCE_SECONDS = 900.0  # longer than pods take to come up on a busy cluster
PROXY_ERRORS = frozenset({502, 503, 504})  # of something between: whether the call arrived is not known

S = TypeVar("S", bound=CellState)


class NotInService(Exception):
    """A cell gave nothing to go on with for too long; the message says which, and what it said last."""


class RunFailed(Exception):
    """An environment answered with an error that is no refusal; its log says more."""


class _Lost(Exception):
    """No answer; the text says how that showed. `sent`: the call may have arrived all the same."""

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True)
class Answer:
    """What became of a rollout: its `result`, or a `failure` that may be tried again with `done=attempt`."""

    rollout_id: str
    attempt: int
    cell: int
    result: Mapping[str, Any] | None
    failure: Mapping[str, Any] | None


class RolloutClient:
    """Runs rollouts on a stack. `environments`: the data addresses of its environment, one for each cell, in their
    order.

    `patience_seconds`: how long one rollout waits for a cell that is not in service. An own `http` client is not
    closed."""

    def __init__(
        self,
        environments: Sequence[str],
        http: httpx.AsyncClient | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        if not environments:
            raise ValueError("give the address of at least one environment")
        self._environments = [url.rstrip("/") for url in environments]
        self._own = http is None
        self._http = http or httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=128), trust_env=False
        )
        self._patience = patience_seconds
        self._floors = dict.fromkeys(
            range(len(environments)), 0
        )  # as last heard: spares a call that would be refused
        self._leaving = set[int]()  # cells that were to go when they were last heard of

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._own:
            await self._http.aclose()

    async def run(
        self, rollout_id: str, task: Mapping[str, Any], *, done: int | None = None, cell: int | None = None
    ) -> Answer:
        """Run a rollout to its answer, over any number of recoveries: `task` is as in `/run`, and the same each time.

        Each attempt number is used for one start at most. `done`: the highest attempt of this rollout that was
        answered already, such as with a failure; it starts over above that. Whoever has lost count - a driver that
        was started again - leaves it out: what still runs is joined. `cell`: where it began, if there were more or
        fewer cells then; without it, as `place` says. Raises NotInService, RunFailed, ProtocolError.
        """
        cell = await self.place(rollout_id) if cell is None else cell
        spent, episode = done, Episode(rollout_id, next_attempt(done, self._floors[cell]))
        loop = asyncio.get_running_loop()
        give_up: float | None = None
        while True:
            began = loop.time()
            try:
                return await self._send(cell, episode, task)
            except _Lost as lost:
                reason, ran = str(lost), lost.sent
            except ProtocolError as refusal:
                if refusal.code not in ("stale_attempt", "admission_closed"):
                    raise
                reason, ran = str(refusal), refusal.code == "stale_attempt"
            if ran:
                spent = episode.attempt if spent is None else max(spent, episode.attempt)
            # Patience is for a cell that gives nothing to go on with: whatever it worked on for a while was progress.
            if give_up is None or loop.time() - began > 2 * ASK_SECONDS:
                give_up = loop.time() + self._patience
            log.info("%s: %s; asking cell %d where it stands", episode.key, reason, cell)
            episode = episode.under(await self._whence(cell, rollout_id, done, spent, give_up, reason))

    async def place(self, rollout_id: str) -> int:
        """The cell to run a rollout in: its own by its id; where that is to go, and knows nothing of the rollout, its
        own of those below, as if there were no more. A cell that does not answer is taken to stay, unless it was to
        go when it last did. Raises ProtocolError."""
        cells = len(self._environments)
        while (cell := cell_of(rollout_id, cells)) > 0 and await self._leaves(cell, rollout_id):
            cells = cell  # the highest go, so those above leave too
        return cell

    async def _leaves(self, cell: int, rollout_id: str) -> bool:
        try:
            state = await self._ask(cell, f"{STATE_PATH}/{rollout_id}", {}, RolloutState)
        except _Lost:
            return cell in self._leaving
        except RunFailed:
            return False  # `/run` itself says what is wrong
        self._heard(cell, state)
        return state.leaving and state.rollout.attempt is None

    def _heard(self, cell: int, state: CellState) -> None:
        self._floors[cell] = state.cell_attempt if state.attempt_floor else 0
        if state.leaving:
            self._leaving.add(cell)
        else:
            self._leaving.discard(cell)

    async def state(self, rollout_id: str, *, cell: int | None = None) -> RolloutState:
        """Where a rollout stands in its own cell by its id, or in `cell`. One question. Raises NotInService,
        ProtocolError."""
        cell = cell_of(rollout_id, len(self._environments)) if cell is None else cell
        try:
            return await self._ask(cell, f"{STATE_PATH}/{rollout_id}", {}, RolloutState)
        except _Lost as lost:
            raise NotInService(str(lost)) from lost

    async def pages(self, cell: int, limit: int = MAX_PAGE) -> AsyncIterator[RolloutPage]:
        """All that a cell knows, a page at a time; there is at least one. Raises NotInService, ProtocolError."""
        after: str | None = ""
        while after is not None:
            try:
                page = await self._ask(cell, STATE_PATH, {"after": after, "limit": str(limit)}, RolloutPage)
            except _Lost as lost:
                raise NotInService(str(lost)) from lost
            yield page
            after = page.next

    async def forget(self, rollout_ids: Iterable[str], *, cell: int | None = None) -> None:
        """Nothing of these rollouts is needed any more, since their answers are kept or nobody wants them: what
        stands of them is ended, and the stack keeps nothing for them.

        Can be repeated, and has to be after a recovery: that brings back what stood when its checkpoint was taken.
        Sent again afterwards, a rollout begins anew. `cell`: as for `run`. Raises NotInService, RunFailed,
        ProtocolError.
        """
        of_cell: dict[int, list[str]] = {}
        for rollout in rollout_ids:
            index = cell_of(rollout, len(self._environments)) if cell is None else cell
            of_cell.setdefault(index, []).append(rollout)
        for index, rollouts in of_cell.items():
            for first in range(0, len(rollouts), MAX_PAGE):
                await self._forget(index, rollouts[first : first + MAX_PAGE])

    async def _forget(self, cell: int, rollouts: Sequence[str]) -> None:
        url = f"{self._environments[cell]}{FORGET_PATH}"
        try:
            response = await self._http.post(url, json={"rollout_ids": list(rollouts)}, timeout=ASK_SECONDS)
            if response.status_code == 404:
                raise RunFailed(f"{url} is not there: a stack without checkpoints, or with a collection, needs none")
            _answered(response)
        except (httpx.TransportError, _Lost) as error:
            raise NotInService(f"{url} does not answer: {type(error).__name__}") from error

    async def _whence(
        self, cell: int, rollout_id: str, done: int | None, spent: int | None, give_up: float, reason: str
    ) -> int:
        """Ask until the cell is in service: the attempt to go on under."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(RETRY_SECONDS)  # also before the first: what was refused just now will be again
            try:
                state = await self._ask(cell, f"{STATE_PATH}/{rollout_id}", {}, RolloutState)
            except _Lost as lost:
                reason = str(lost)
            else:
                self._heard(cell, state)
                move = next_send(state, done, spent)
                if isinstance(move, Send) and loop.time() < give_up:
                    return move.attempt
                reason = reason if state.in_service else "it is not in service"
            if loop.time() >= give_up:
                raise NotInService(f"cell {cell} for {rollout_id}, after {self._patience:g} s: {reason}")

    async def _send(self, cell: int, episode: Episode, task: Mapping[str, Any]) -> Answer:
        """One `/run`. Raises ProtocolError, RunFailed, _Lost."""
        body = {"episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt}, "task": dict(task)}
        try:
            # As long as it takes: a rollout may run for hours, and closing the connection would not end it.
            timeout = httpx.Timeout(None, connect=ASK_SECONDS)
            response = await self._http.post(f"{self._environments[cell]}/run", json=body, timeout=timeout)
        except httpx.TransportError as error:
            sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise _Lost(f"no answer: {type(error).__name__}", sent=sent) from error
        answer = _answered(response)
        if not isinstance(answer, dict) or not ({"result", "failure"} & answer.keys()):
            raise RunFailed(f"the environment of cell {cell} answered /run in another form")
        return Answer(episode.rollout_id, episode.attempt, cell, answer.get("result"), answer.get("failure"))

    async def _ask(self, cell: int, path: str, query: Mapping[str, str], form: type[S]) -> S:
        """One question. Raises ProtocolError, RunFailed, _Lost."""
        url = f"{self._environments[cell]}{path}"
        try:
            response = await self._http.get(url, params=dict(query), timeout=ASK_SECONDS)
        except httpx.TransportError as error:
            raise _Lost(f"{url} does not answer: {type(error).__name__}") from error
        if response.status_code == 404:
            raise RunFailed(f"{url} is not there: without checkpoints a stack cannot say where its rollouts stand")
        try:
            return form.model_validate(_answered(response))
        except ValidationError as error:
            raise RunFailed(f"{url} answered in another form: is it an environment with checkpoints?") from error


def _answered(response: httpx.Response) -> Any:
    """The body of an answer. Raises ProtocolError, RunFailed, _Lost."""
    try:
        body = response.json()
    except ValueError as error:
        if response.is_success or response.status_code in PROXY_ERRORS:
            raise _Lost(
                f"an answer {response.status_code} that was cut short, or is not the environment's"
            ) from error
        body = None
    if response.is_success:
        return body
    if (refusal := refusal_of(response.status_code, body)) is not None:
        raise refusal
    if response.status_code in PROXY_ERRORS:
        raise _Lost(f"something between answered {response.status_code}")
    raise RunFailed(f"{response.request.url} answered {response.status_code}")
