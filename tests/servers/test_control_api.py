"""The control API over HTTP: who may call, in what form, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gym_rig.stub import VERBS, Control, Stub, answer, refused
from gym_rig.virtual import settle
from gym_servers.participants.base import Survey
from gym_servers.protocol.messages import Status
from gym_servers.protocol.phases import Phase

# ---- who may call, and in what form ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "bearer the-token", "the-token", "Bearer the-token2"]
)
async def test_without_the_token_nothing_is_told_or_done(idle: Callable[[], Control], header: str | None) -> None:
    control = idle()
    headers = {} if header is None else {"authorization": header}
    del control.http.headers["authorization"]
    for verb, fields in VERBS.items():
        response = await control.http.post(f"/{verb}", json=control.body("cp", **fields), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthorized")
    assert (await control.http.get("/status", headers=headers)).status_code == 401
    assert control.gate.phase is Phase.IDLE


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"checkpoint_id": "../x"},
        {"checkpoint_id": ""},
        {"checkpoint_id": None},
        {"deadline_ts": "soon"},
        {"deadline_ts": -1},
        {"deadline_ts": None},
    ],
)
async def test_a_body_of_another_form_is_refused_by_field(
    idle: Callable[[], Control], verb: str, change: dict[str, Any]
) -> None:
    control = idle()
    response = await control.http.post(f"/{verb}", json={**control.body("cp", **VERBS[verb]), **change})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "invalid_request"
    assert next(iter(change)) in response.json()["error"]["detail"]
    assert control.gate.phase is Phase.IDLE


async def test_a_refusal_never_repeats_what_was_sent(idle: Callable[[], Control]) -> None:
    response = await idle().http.post("/prepare", json={"checkpoint_id": "a b SECRET", "deadline_ts": "SECRET"})
    assert "SECRET" not in response.text


@pytest.mark.parametrize("deadline", ["Infinity", "NaN"])
async def test_a_deadline_is_a_time(idle: Callable[[], Control], deadline: str) -> None:
    body = f'{{"checkpoint_id": "cp", "deadline_ts": {deadline}}}'
    response = await idle().http.post("/prepare", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422


@pytest.mark.parametrize("verb", ["retire", "forget"])
async def test_an_empty_list_is_refused(idle: Callable[[], Control], verb: str) -> None:
    empty = {name: [] for name in VERBS[verb]}
    await refused(idle().call(verb, **empty), "invalid_request")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b'{"checkpoint_id": 3}', b"x" * 100_000])
async def test_whatever_comes_without_the_token_is_unauthorized_before_it_is_read(
    idle: Callable[[], Control], body: bytes
) -> None:
    control = idle()
    del control.http.headers["authorization"]
    for path in (*VERBS, "status", "no-such-verb"):
        response = await control.http.post(f"/{path}", content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthorized"), path


async def test_with_the_token_a_body_that_is_no_json_is_refused_as_such(idle: Callable[[], Control]) -> None:
    response = await idle().http.post("/prepare", content=b"{", headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


# ---- status ------------------------------------------------------------------------------------------------


async def test_status_is_answered_at_once_whatever_waits(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.block("r")
    waiting = asyncio.create_task(control.call("prepare"))
    await settle()
    began = control.time()
    status = answer(await control.http.get("/status"))
    await control.call("renew")
    assert control.time() == began
    assert (status["kind"], status["instance"], status["session"]) == ("environment", "env", "session-1")
    assert (status["phase"], status["checkpoint_id"]) == ("preparing", "cp")
    assert status["report"]["blockers"][0]["id"] == "r"
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_the_bytes_of_a_secret_are_in_no_reply(idle: Callable[[], Control]) -> None:
    control = idle()
    assert "the-token" not in (await control.http.get("/status")).text


async def test_restarts_and_episodes_are_never_capped(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()
    many = frozenset(f"e{n}" for n in range(5000))
    monkeypatch.setattr(Stub, "survey", lambda self: Survey((), {}, restarts=many, episodes=many))
    report = (await control.call("prepare"))["report"]
    assert (len(report["restarts"]), len(report["episodes"])) == (5000, 5000)


async def test_an_answer_may_say_more_than_its_reader_knows(idle: Callable[[], Control]) -> None:
    """A coordinator and its participants are not upgraded at the same moment."""
    status = await idle().status()
    status["report"]["news"] = status["news"] = 1
    assert Status.model_validate(status).phase == "idle"
