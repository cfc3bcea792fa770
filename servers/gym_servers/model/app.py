"""The policy model server's routes: `/v1/responses`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request

from gym_servers.capture.ledger import CallRecord, float32, int32
from gym_servers.http.apps import base_app, json_object
from gym_servers.http.episode_path import current_episode
from gym_servers.model.dialect import Dialect
from gym_servers.model.engine_client import EngineClient
from gym_servers.participants.model import ModelParticipant
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError

DEFAULT_MAX_TOKENS = 4096


def create_app(participant: ModelParticipant, engine: EngineClient, dialect: Dialect, model: str) -> FastAPI:
    gate = participant.gate
    app = base_app("policy-model", lambda: gate.is_open or gate.checkpoint_open)

    @app.post("/v1/responses")
    async def responses(request: Request) -> dict[str, Any]:
        params = await json_object(request)
        try:
            prompt = dialect.render(params)
            max_tokens, temperature = _sampling(params)
        except (ValueError, OverflowError) as error:
            raise ProtocolError("invalid_request", f"the request cannot be given to the model: {error}") from error
        episode, position = current_episode(), request.headers.get(headers.MODEL_CALL, "")
        if episode is None and gate.enabled:
            raise ProtocolError("rollout_id_required", "the policy is called below /ng-rollout/<rollout id>/")
        digest = digest_of(params)

        async def generate() -> CallRecord:
            # The stem names the call, not the attempt: an uninterrupted and a continued rollout have equal ids.
            stem = digest_of([episode.rollout_id, position])[:24] if episode and position else uuid.uuid4().hex[:24]
            ids, logprobs, finish = int32([]), float32([]), None
            request_id = f"{episode.key if episode else '-'}/{position or '-'}/{uuid.uuid4().hex[:8]}"
            async for delta in engine.generate(
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                request_id=request_id,
            ):
                ids.extend(delta.ids)
                logprobs.extend(delta.logprobs)
                finish = delta.finish_reason or finish
            response = _response(params, model, stem, dialect.parse(ids, stem), len(prompt), len(ids), finish)
            return CallRecord(position, digest, int32(prompt), ids, logprobs, "", response)

        if episode is None or not gate.enabled:
            return dict((await generate()).response)
        return dict((await participant.call(episode, position, digest, generate)).response)

    return app


def _sampling(params: Mapping[str, Any]) -> tuple[int, float]:
    """How many tokens to generate at most, and at which temperature. Raises ValueError."""
    most, temperature = params.get("max_output_tokens"), params.get("temperature")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError("`max_output_tokens` must be a whole number above 0")
    if temperature is not None and (isinstance(temperature, bool) or not isinstance(temperature, int | float)):
        raise ValueError("`temperature` must be a number")
    return most or DEFAULT_MAX_TOKENS, float(temperature or 0.0)


def _response(
    params: Mapping[str, Any],
    model: str,
    stem: str,
    output: list[dict[str, Any]],
    prompt_tokens: int,
    generated: int,
    finish: str | None,
) -> dict[str, Any]:
    incomplete = finish == "length"
    return {
        "id": f"resp_{stem}",
        "object": "response",
        "created_at": time.time(),
        "model": params.get("model") or model,
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
        "usage": {
            "input_tokens": prompt_tokens,
            "output_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        },
    }
