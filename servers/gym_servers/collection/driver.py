"""Assembles the driver: tasks, output, and `/run` at the environment."""

from __future__ import annotations

from typing import Any

from gym_servers.http.peers import PeerFailed, Peers, PeerUnreachable
from gym_servers.participants.collection import NotAnswered, Rollout, RunResult
from gym_servers.protocol.identity import Episode

TASKSET = "collection"
_UNREADABLE = {
    "failure_kind": "agent_request_failed",
    "failure_reason": "the environment answered neither a row nor a failure",
}


class EnvironmentRun:
    """Sends one `/run`. Raises ProtocolError for refusals, NotAnswered where no answer came."""

    def __init__(self, peers: Peers, environment: str) -> None:
        self._peers, self._environment = peers, environment

    async def __call__(self, episode: Episode, rollout: Rollout) -> RunResult:
        body = {
            "episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt},
            "task": task_of(rollout),
        }
        try:
            reply = await self._peers.post(self._environment, "/run", body, wait_admission=False)
        except PeerUnreachable as error:
            raise NotAnswered(str(error)) from error
        except PeerFailed as error:
            return RunResult(None, {"failure_reason": str(error), "failure_kind": "agent_request_failed"})
        answer = reply.body if isinstance(reply.body, dict) else {}
        row, failure = answer.get("result"), answer.get("failure")
        if isinstance(row, dict):
            return RunResult(row)
        return RunResult(None, failure if isinstance(failure, dict) else _UNREADABLE)


def task_of(rollout: Rollout) -> dict[str, Any]:
    """The environment's task for a row: the model's parameters, and everything else as the verifier's data."""
    data = {name: value for name, value in rollout.row.items() if name != "responses_create_params"}
    return {
        "task_id": {"taskset": TASKSET, "task_id": str(rollout.task_index)},
        "task_input": {"responses_create_params": rollout.row["responses_create_params"], "task_data": data},
    }
