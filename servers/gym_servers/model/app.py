"""The policy model server's routes: `/v1/responses` and `/v1/chat/completions`, whole or streamed."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gym_servers.capture.arrays import int32
from gym_servers.capture.inventory import MODEL_CALL_ID
from gym_servers.capture.ledger import CallRecord
from gym_servers.http.apps import base_app, json_object
from gym_servers.http.episode_path import current_episode
from gym_servers.model import chat_api, responses_api
from gym_servers.model.context import Context
from gym_servers.model.conversation import Conversation, after, thought
from gym_servers.model.dialect import Dialect
from gym_servers.model.engine_client import EngineClient
from gym_servers.model.generation import LENGTH, Outages, generate
from gym_servers.model.reply import Head, Reply, Writer
from gym_servers.model.streaming import Growing, streamed
from gym_servers.participants.model import ModelParticipant
from gym_servers.participants.model_call import Asked, Call
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.unattended import unattended

T = TypeVar("T")

MAX_TOKENS = 4096  # of a call that does not say how many it wants


@dataclass(frozen=True)
class Policy:
    """What generates, and how where a caller leaves it open. `context`: tokens of prompt and generation together,
    None for what the engine says; `sampling`: options under the caller's own; `training`: replies bring token ids and
    log-probabilities."""

    engine: EngineClient
    dialect: Dialect
    max_tokens: int = MAX_TOKENS
    context: int | None = None
    bounded: bool = False  # the engine refuses what does not fit: never ask it for more
    sampling: Mapping[str, Any] = field(default_factory=dict)
    training: bool = False


@dataclass(frozen=True)
class Api:
    """One of the two ways to ask: how a request is read, and how a reply is written."""

    read: Callable[[Mapping[str, Any], Mapping[str, Any]], Conversation]
    write: Callable[[Mapping[str, Any], Reply], dict[str, Any]]
    writer: Callable[[Mapping[str, Any], Head], Writer]
    head_of: Callable[[Mapping[str, Any]], Head]


RESPONSES = Api(
    responses_api.conversation_of,
    responses_api.body_of,
    responses_api.ResponsesWriter,
    responses_api.head_of,
)
CHAT = Api(chat_api.conversation_of, chat_api.body_of, chat_api.ChatWriter, chat_api.head_of)


def create_app(participant: ModelParticipant, policy: Policy) -> FastAPI:
    gate = participant.gate
    app = base_app("policy-model", lambda: gate.is_open or gate.checkpoint_open)

    def tell(problem: str) -> None:
        participant.problem = problem

    generator = _Generator(policy, Outages(tell, lambda: gate.clock()))

    async def answer(request: Request, api: Api) -> Response:
        params = await json_object(request)
        try:
            conversation = api.read(params, policy.sampling)
            digest = digest_of({name: params[name] for name in params if name not in ("stream", "stream_options")})
            turns = conversation.turns()
        except (ValueError, OverflowError) as error:
            raise ProtocolError("invalid_request", f"the request cannot be given to the model: {error}") from error
        episode, position = current_episode(), request.headers.get(headers.MODEL_CALL, "")
        if not re.fullmatch(MODEL_CALL_ID, position):
            raise ProtocolError(
                "invalid_request", f"the header {headers.MODEL_CALL} must be printable ASCII, at most 240 characters"
            )
        if episode is None and gate.enabled:
            raise ProtocolError("rollout_id_required", "the policy is called below /ng-rollout/<rollout id>/")
        budget, why = conversation.sampling.max_tokens or policy.max_tokens, conversation.sampling.unfaithful
        asked = Asked(position, digest, turns, budget, why, conversation.thoughts())

        async def work(call: Call) -> CallRecord:
            return await generator.record(call, conversation, lambda reply: api.write(params, reply))

        async def call(joined: Callable[[Call], None]) -> CallRecord:
            if episode is not None and gate.enabled:
                return await participant.call(episode, asked, work, joined)
            alone = Call(episode or Episode(f"anonymous.{uuid.uuid4().hex}", 0), asked, budget=budget)
            joined(alone)
            return await work(alone)

        if not params.get("stream"):
            record = await _while_connected(request, call(lambda _: None))
            return JSONResponse(record.response)
        growing = Growing(policy.dialect, conversation)
        parts = streamed(
            call,
            growing,
            gate,
            lambda call: api.writer(params, _head(call, policy.engine.model)),
            lambda body: api.writer(params, api.head_of(body)),
        )
        first = await _while_connected(request, anext(parts))

        async def body() -> AsyncIterator[bytes]:
            async with aclosing(parts):
                yield first
                async for part in parts:
                    yield part

        return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await answer(request, RESPONSES)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, CHAT)

    return app


class _Generator:
    """Makes the record of a call: prompt, tokens, reply."""

    def __init__(self, policy: Policy, outages: Outages) -> None:
        self._policy, self._outages = policy, outages
        self._context = Context(policy.engine, outages, policy.context, bounded=policy.bounded)

    async def record(
        self, call: Call, conversation: Conversation, write: Callable[[Reply], dict[str, Any]]
    ) -> CallRecord:
        policy, asked = self._policy, call.asked
        if call.prompt is None:
            try:
                call.prompt = int32(policy.dialect.render(conversation, call.parent))
            except ValueError as error:
                raise ProtocolError(
                    "invalid_request", f"the conversation cannot be given to the model: {error}"
                ) from error
        tokens, head = call.tokens, _head(call, policy.engine.model)
        prompt, wanted, name = len(call.prompt), call.budget, f"{_name(call)}/{asked.position or '-'}"

        async def budget(refused: ProtocolError | None = None) -> int:
            call.budget = await self._context.budget(prompt, wanted, refused)
            return call.budget

        await generate(
            policy.engine,
            call.prompt,
            conversation.sampling,
            budget,
            tokens,
            name,
            self._outages,
            call.begin_stream,
            call.grew,
            call.begun_anew,
        )
        message = policy.dialect.parse(tokens.ids, call.prompt, conversation, head.stem)
        training: dict[str, Any] = {}
        if policy.training:
            training = {
                "prompt_token_ids": call.prompt.tolist(),
                "generation_token_ids": tokens.ids.tolist(),
                "generation_log_probs": tokens.logprobs.tolist(),
            }
        reply = Reply(
            head,
            message,
            len(call.prompt),
            len(tokens),
            tokens.finish == LENGTH,
            training,
        )
        whole = tokens.frozen()
        turns, known = asked.turns, 0
        if call.parent is not None:
            known = turns.index(call.parent.turn) + 1
        return CallRecord(
            asked.position,
            asked.digest,
            call.prompt,
            whole.ids,
            whole.logprobs,
            whole.spans,
            write(reply),
            call.parent_chain,
            after(turns[-1], message) if turns else "",
            thoughts=(*asked.thoughts[known:], thought(message)),
        )


def _name(call: Call) -> str:
    """Whose call it is, for the engine's logs."""
    return "-" if call.episode.rollout_id.startswith("anonymous.") else call.key


def _head(call: Call, model: str) -> Head:
    """What is known of a call's reply before it is there."""
    return Head(_stem(call), model, call.created)


def _stem(call: Call) -> str:
    """Names the call, not the attempt: an uninterrupted and a continued rollout have equal ids."""
    rollout, asked = call.episode.rollout_id, call.asked
    if rollout.startswith("anonymous."):
        return rollout.removeprefix("anonymous.")[:24]
    if asked.position:
        return digest_of([rollout, asked.position])[:24]
    return digest_of([rollout, call.parent_chain, asked.digest, call.repeat])[:24]


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is told to end when the caller goes away."""
    task = unattended(work)
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    except asyncio.CancelledError:
        task.cancel()
        if left.done() and not _cancelled_from_outside():
            raise ProtocolError("checkpoint_error", "the caller has gone away") from None
        raise
    finally:
        left.cancel()


def _cancelled_from_outside() -> bool:
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
