"""The environment server's routes: `/run` and `/aggregate_metrics`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from gym_servers.environment.single_agent_turn import SingleAgentTurn
from gym_servers.http.apps import base_app
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, InvalidIdentity
from gym_servers.resources.metrics import aggregate


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


class AggregateRequest(BaseModel):
    verify_responses: list[dict[str, Any]]


def create_app(participant: EnvironmentParticipant, turn: SingleAgentTurn) -> FastAPI:
    app = base_app("environment", lambda: participant.gate.is_open or participant.gate.checkpoint_open)

    @app.post("/run")
    async def run(body: RunRequest) -> dict[str, Any]:
        episode = body.episode_id.episode()
        task = body.task.model_dump()

        async def drive(live: Live, restored: Unclaimed | None) -> dict[str, Any]:
            return await turn.run(live, restored, task)

        outcome = await participant.run(episode, digest_of(task), drive)
        return {
            "episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt},
            "task_id": task["task_id"],
            **outcome,
        }

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(body: AggregateRequest) -> dict[str, Any]:
        return aggregate(body.verify_responses)

    return app
