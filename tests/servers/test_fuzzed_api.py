"""Requests made from our own OpenAPI documents, right and wrong: none is a fault of ours, none refused has effects.

schemathesis makes the requests; they are sent in virtual time, one after the other, to one process of each kind.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core import NotSet
from starlette.routing import Mount

from gym_rig.cell import GRACE, TOKEN, Running, cell
from gym_rig.virtual import VirtualLoop, now
from gym_servers.control.app import control_app
from gym_servers.engine.rows import counter_rows
from gym_servers.participants.base import Scope
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError

LONGEST_SECONDS = 600.0  # of virtual time: a call that waits for its peers gives up before
EXAMPLES = 120 * int(os.environ.get("N", "1"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
# What a client can write and Python reads, though no encoding carries it; and numbers beyond what others take.
ODD = st.sampled_from([float("nan"), float("inf"), "\ud800", 10**400, -1, 1e308, "many", "hot", ["x"], [["x"]]])
ANY = JSON | ODD


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields, each as it should be or anything."""
    return st.fixed_dictionaries({}, optional={name: strategy | ANY for name, strategy in fields.items()})


ITEMS = st.just("add 1") | st.lists(some(type=st.just("message"), role=st.just("user"), content=st.text(max_size=4)))
PARAMS = some(
    input=ITEMS, max_output_tokens=st.just(9), temperature=st.just(0.5), model=ANY, tools=ANY, tool_choice=ANY
)
EPISODE = some(rollout_id=st.sampled_from(["r", "q"]), attempt=st.integers(0, 2))
DATA = some(expected_count=st.just(1), initial_count=st.just(0), extra=ANY)
ROWS = some(
    responses_create_params=PARAMS,
    _ng_rollout_id=st.sampled_from(["r", "q"]),
    _ng_task_index=st.integers(0, 1),
    _ng_rollout_index=st.integers(0, 1),
    _ng_attempt_index=st.integers(0, 2),
    expected_count=st.just(1),
)
TASKS = some(
    episode_id=EPISODE, task=some(task_id=ANY, task_input=some(responses_create_params=PARAMS, task_data=DATA))
)
SCORED = some(reward=st.floats(0, 1), _ng_task_index=st.integers(0, 1))
SEEDS = some(resources_session_id=st.sampled_from(["s", "t", ""]), episode_id=EPISODE, task_data=DATA)
BODIES = {  # path -> bodies that say more of what is read there than the document does
    "/v1/responses": PARAMS,
    "/run": ROWS | TASKS,
    "/aggregate_metrics": some(verify_responses=st.lists(SCORED, max_size=3)),
    "/seed_session": SEEDS | ROWS,
    "/verify": st.builds(lambda row, more: {**row, **more}, ROWS, some(response=some(output=ITEMS))),
    "/close_session": SEEDS,
    "/{tool}": some(count=st.integers(0, 2)),
}
# Cut short or failed is not refused: what was begun stands, and can be asked for again.
BEGUN = ("deadline_exceeded", "checkpoint_error")
# An application of somebody else refuses what it was given: then its episode had been let in already.
OF_AN_APPLICATION = ("invalid_request", "session_lost")
KINDS = ("env", "policy", "agent", "counter")
OWN = "an agent's own application"


@asynccontextmanager
async def alone(folder: Path, name: str) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    """One process in service whose peers do not answer."""
    more = {}
    if name == OWN:
        name, config = "agent", {"folder": str(folder / "scratch")}
        more["servers"] = [
            {"name": "env", "kind": "environment", "server": "single-agent-turn"},
            {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://engine/v1"}},
            {"name": "agent", "kind": "agent", "server": "scratch-agent", "config": config},
            {"name": "counter", "kind": "resources", "server": "counter"},
        ]
    async with cell(folder, counter_rows(1, 1), collection=None, **more) as rig:
        running = rig.start(name)
        client = rig.network.client(timeout=None)
        resume = {"checkpoint_id": "start", "deadline_ts": rig.wall() + 10, "cell_attempt": 0}
        reply = await client.post(
            f"http://{name}-control/ng-control/v1/checkpoint/resume", json=resume, headers=bearer()
        )
        assert reply.is_success
        try:
            yield running, client
        finally:
            await client.aclose()


def bearer() -> dict[str, str]:
    return {"authorization": f"Bearer {TOKEN}"}


async def state(running: Running) -> Any:
    """All that a refused call must leave as it was."""
    assert running.plane is not None
    status = running.plane.status().model_dump(exclude={"lease_expires_at"})
    for blocker in status["report"]["blockers"]:
        del blocker["age_seconds"]
    exported = await running.server.participant.export(Scope(None))
    # A call that was let in and could not make sense of its arguments has been on its session all the same.
    records = {key: data.replace(b'"touched":true', b'"touched":false') for key, data in exported.items()}
    fence = running.server.participant.gate.fence
    return status, records, fence.floor, dict(fence.marks), running.server.participant.gate.control


@st.composite
def requests(draw: st.DrawFn, document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A request to one of the document's operations, as the client's arguments. What it writes goes to `folder`."""
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    told = [one for one in operations if one.path in BODIES and one.method.upper() == "POST"]
    operation = draw(st.sampled_from([*operations, *told, *told]))
    mode = draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    if not (operation.body or operation.path_parameters or operation.query):
        mode = GenerationMode.POSITIVE  # there is nothing to be wrong
    case: Case = draw(operation.as_strategy(generation_mode=mode))
    content: bytes | None = None
    known = BODIES.get(operation.path) if case.method == "POST" else None
    if known is not None and draw(st.integers(0, 3)):
        content = json.dumps(draw(known)).encode()
    elif isinstance(case.body, bytes):
        content = case.body
    elif not isinstance(case.body, NotSet):
        body = case.body
        if isinstance(body, dict) and isinstance(body.get("checkpoint_dir"), str):
            body = {**body, "checkpoint_dir": str(folder / digest_of(body["checkpoint_dir"]))}
        content = json.dumps(body).encode()
    elif case.method != "GET":
        # The operation reads any JSON: what it makes of it is its own affair.
        content = draw(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=8))
    prefix = draw(st.sampled_from(["", "/ng-rollout/r", "/ng-rollout/r-a1", "/ng-rollout/q/training-token-capture"]))
    return {"method": case.method, "path": case.formatted_path, "content": content, "prefix": prefix}


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    asyncio.set_event_loop(made)
    yield made
    pending = asyncio.all_tasks(made)
    for task in pending:
        task.cancel()
    made.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
    made.run_until_complete(made.shutdown_default_executor())
    asyncio.set_event_loop(None)
    made.close()


@pytest.mark.parametrize("name, port", [*itertools.product(KINDS, ["control", "data"]), (OWN, "data")])
def test_no_request_is_a_fault_of_ours_and_a_refused_one_changes_nothing(
    tmp_path: Path, name: str, port: str, loop: VirtualLoop
) -> None:
    process = alone(tmp_path, name)
    running, client = loop.run_until_complete(process.__aenter__())
    app = documented(running, port)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(app, tmp_path), st.sampled_from([0.0, GRACE + 1]))
    def send(request: dict[str, Any], seconds: float) -> None:
        loop.run_until_complete(sent(running, client, port, request, seconds))

    try:
        send()
    finally:
        loop.run_until_complete(process.__aexit__(None, None, None))


async def sent(
    running: Running, client: httpx.AsyncClient, port: str, request: dict[str, Any], seconds: float
) -> None:
    assert running.plane is not None
    if running.plane._write is not None:
        with suppress(ProtocolError):
            await running.plane._write.result()  # it goes on by itself, whatever is asked meanwhile
    before, began = await state(running), now()
    name = running.settings.name
    host = f"http://{name}-control" if port == "control" else f"http://{name}{request['prefix']}"
    headers = {"content-type": "application/json", **(bearer() if port == "control" else {})}
    async with asyncio.timeout(LONGEST_SECONDS):
        reply = await client.request(
            request["method"], host + request["path"], content=request["content"], headers=headers
        )
    # A row that could not be had is no fault: whoever asked reads of it in the reply.
    assert reply.status_code < 500 or (reply.status_code == 502 and "failure" in reply.json()), reply.text
    if reply.status_code >= 400:
        error = reply.json().get("error") or reply.json().get("failure")
        code = error.get("code") if isinstance(error, dict) else None
        begun = (*BEGUN, *OF_AN_APPLICATION) if brought(running) else BEGUN
        # What took time had been let in, and time alone changes things: leases end.
        assert code in begun or now() > began or await state(running) == before, code
    await asyncio.sleep(seconds)  # what was closed opens again when nobody renews its lease


def documented(running: Running, port: str) -> dict[str, Any]:
    """The application's own OpenAPI document."""
    if port == "data":
        # What an agent brings itself is served behind the project's own application.
        brought = [
            route.app._app for route in running.server.app.routes if isinstance(route, Mount) and not route.path
        ]
        found: dict[str, Any] = (brought or [running.server.app])[0].openapi()
    else:
        assert running.plane is not None
        found = control_app(running.plane, TOKEN).openapi()
    assert found["paths"]
    return found


def brought(running: Running) -> FastAPI | None:
    """The application that an agent brings: it is served behind the project's own."""
    found: list[FastAPI] = [
        route.app._app for route in running.server.app.routes if isinstance(route, Mount) and not route.path
    ]
    return found[0] if found else None


@pytest.mark.parametrize("depth", [100, 400, 900, 20_000])
@pytest.mark.parametrize("name", [*KINDS, OWN])
async def test_a_body_that_is_nested_without_end_is_refused_or_read(tmp_path: Path, name: str, depth: int) -> None:
    nested = '{"a": ' * depth + "1" + "}" * depth
    async with alone(tmp_path, name) as (running, client):
        for path in documented(running, "data")["paths"]:
            for body in (nested, f'{{"responses_create_params": {nested}, "task_data": {nested}}}'):
                reply = await client.post(
                    f"http://{running.settings.name}/ng-rollout/r{path}",
                    content=body,
                    headers={"content-type": "application/json"},
                )
                assert reply.status_code < 500 or "failure" in reply.json(), (path, reply.text)
