"""The environment server's routes: `/run`, for a task or for a whole row, and where its driver asks what became of
it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_servers.environment.server import EnvironmentServer, EpisodeFailed
from gym_servers.http.apps import base_app, json_object
from gym_servers.http.row_identity import row_episode, without_attempt
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import MAX_ROLLOUT_ID, Episode, InvalidIdentity
from gym_servers.protocol.rollouts import (
    FORGET_PATH,
    MAX_PAGE,
    PAGE,
    STATE_PATH,
    Forget,
    Forgetting,
    RolloutPage,
    RolloutState,
)
from gym_servers.resources.metrics import AggregateRequest, aggregate
from gym_servers.stack.settings import describe

PARAMS = "responses_create_params"


class EpisodeId(BaseModel):
    rollout_id: str
    attempt: int = Field(0, ge=0)

    def episode(self) -> Episode:
        try:
            return Episode(self.rollout_id, self.attempt)
        except InvalidIdentity as error:
            raise ProtocolError("invalid_request", str(error)) from error


class TaskInput(BaseModel):
    model_config = ConfigDict(extra="allow")
    responses_create_params: dict[str, Any]
    task_data: dict[str, Any] = {}


class Task(BaseModel):
    task_id: dict[str, Any] | None = None
    task_input: TaskInput


class RunRequest(BaseModel):
    episode_id: EpisodeId
    task: Task


def create_app(
    participant: EnvironmentParticipant,
    server: EnvironmentServer,
    cell: int = 0,
    leaves: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """`cell`: the number of the cell, and `leaves`, which blocks, whether it is to go: for drivers that ask."""
    app = base_app("environment", lambda: participant.gate.is_open or participant.gate.checkpoint_open)

    async def outcome_of(
        episode: Episode, task: dict[str, Any], digest: str, *, anonymous: bool = False
    ) -> dict[str, Any]:
        async def drive(live: Live, restored: Unclaimed | None) -> dict[str, Any]:
            return await server.run(live, restored, task)

        try:
            return {"result": await participant.run(episode, digest, drive, anonymous=anonymous)}
        except EpisodeFailed as failed:
            return {"failure": failed.failure}

    @app.post("/run")
    async def run(request: Request) -> Any:
        body = await json_object(request)
        # A row is its own request: its parameters are at the top, and it may have any field beside them.
        if PARAMS in body:
            return await run_row(body)
        try:
            asked = RunRequest.model_validate(body)
        except ValidationError as error:
            raise ProtocolError("invalid_request", describe(error)[:2000]) from error
        episode, task = asked.episode_id.episode(), asked.task.model_dump()
        outcome = await outcome_of(episode, task, digest_of(task))
        return {
            "episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt},
            "task_id": task["task_id"],
            **outcome,
        }

    async def run_row(row: dict[str, Any]) -> Any:
        if not isinstance(row[PARAMS], dict):
            raise ProtocolError("invalid_request", f"`{PARAMS}` is not a JSON object")
        episode = row_episode(row)
        if episode is None and participant.gate.enabled:
            raise ProtocolError(
                "rollout_id_required",
                "name the rollout: `_ng_rollout_id` in the row, or call below /ng-rollout/<rollout id>/",
            )
        task = {
            "task_id": None,
            "task_input": {PARAMS: row[PARAMS], "task_data": {k: v for k, v in row.items() if k != PARAMS}},
        }
        outcome = await outcome_of(
            episode or Episode(f"anonymous.{uuid.uuid4().hex}", 0),
            task,
            digest_of(without_attempt(row)),
            anonymous=episode is None,
        )
        # A failure is no row: a caller that reads rows must not take it for one.
        return outcome["result"] if "result" in outcome else JSONResponse(outcome, 502)

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(body: AggregateRequest) -> dict[str, Any]:
        return aggregate(body.verify_responses)

    if participant.gate.enabled:
        _add_rollout_state(app, participant, cell, leaves)
    if participant.gate.enabled and participant.external_driver:

        @app.post(FORGET_PATH, status_code=202)
        async def forget(body: Forget) -> Forgetting:
            for rollout in body.rollout_ids:
                EpisodeId(rollout_id=rollout).episode()  # refused as in /run where it is no name
            participant.done_with(body.rollout_ids)
            return Forgetting(cell=cell, rollout_ids=body.rollout_ids)

    return app


def _add_rollout_state(
    app: FastAPI, participant: EnvironmentParticipant, cell: int, leaves: Callable[[], bool]
) -> None:
    gate = participant.gate

    async def of_cell() -> dict[str, Any]:
        leaving = await asyncio.to_thread(leaves)
        return {
            "cell": cell,
            "in_service": gate.is_open or gate.checkpoint_open,
            "leaving": leaving,
            "cell_attempt": gate.fence.floor,
            "attempt_floor": gate.fence.enforce_floor,
            "origin": participant.origin,
        }

    @app.get(STATE_PATH)
    async def page(
        after: Annotated[str, Query(max_length=MAX_ROLLOUT_ID)] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
    ) -> RolloutPage:
        of_all = await of_cell()
        known = sorted(rollout for rollout in participant.rollouts() if rollout > after)
        return RolloutPage(
            **of_all,
            rollouts=[participant.standing(rollout) for rollout in known[:limit]],
            next=known[limit - 1] if len(known) > limit else None,
        )

    @app.get(f"{STATE_PATH}/{{rollout_id}}")
    async def one(rollout_id: str) -> RolloutState:
        try:
            Episode(rollout_id, 0)
        except InvalidIdentity as error:
            raise ProtocolError("invalid_request", str(error)) from error
        return RolloutState(**await of_cell(), rollout=participant.standing(rollout_id))
