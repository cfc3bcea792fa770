"""What was captured of a rollout's model calls, for trainers: `/training-token-capture/control/rollouts/<key>`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from gym_servers.capture.ledger import CallRecord
from gym_servers.control.tokens import ControlTokens
from gym_servers.participants.model import ModelParticipant
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import InvalidIdentity, parse_key

PREFIX = "/training-token-capture/control/rollouts"


def add_capture_routes(app: FastAPI, participant: ModelParticipant, tokens: ControlTokens) -> None:
    """Both routes need one of the stack's control tokens."""

    def checked(request: Request, key: str) -> str:
        if not tokens.admits(request.headers.get("authorization", "").encode()):
            raise ProtocolError("unauthorized", "send the stack's control token as a bearer token")
        try:
            return parse_key(key).key
        except InvalidIdentity as error:
            raise ProtocolError("invalid_request", str(error)) from error

    @app.get(f"{PREFIX}/{{key}}/manifest")
    async def manifest(key: str, request: Request) -> dict[str, Any]:
        known = checked(request, key)
        failures = participant.failures(known)  # of the same moment as the calls, which may be freed meanwhile
        ledger = await participant.ledger(known)
        calls = ledger.calls if ledger is not None else []
        return {
            "rollout_id": known,
            "records": [_record(number, call) for number, call in enumerate(calls)],
            "failures": [vars(failure) for failure in failures],
        }

    @app.delete(f"{PREFIX}/{{key}}")
    async def delete(key: str, request: Request) -> dict[str, Any]:
        known = checked(request, key)
        await participant.gate.wait_checkpoint_closed()  # what a checkpoint holds stays as it was reported
        return {"rollout_id": known, "deleted": participant.delete(known)}


def _record(number: int, call: CallRecord) -> dict[str, Any]:
    return {
        "model_call_id": call.position or f"#{number}",
        "request_digest": call.digest,
        "parent_digest": call.parent,
        "chain_digest": call.chain,
        "prompt_token_ids": call.prompt_ids.tolist(),
        "generation_token_ids": call.ids.tolist(),
        "generation_log_probs": call.logprobs.tolist(),
        "weight_versions": [vars(span) for span in call.spans],
    }
