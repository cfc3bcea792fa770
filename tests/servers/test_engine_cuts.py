"""Cuts beside the engine: the middleware follows what passes, and a cut there loses nothing that is on its way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig
from gym_rig.guarded import BEARER, CELL, RATE, guarded
from gym_rig.network import Fault, Seen
from gym_servers.capture.inventory import PATH, InventoryCall, inventory_of
from gym_servers.capture.staging import digest, unpack
from gym_servers.engine.app import create_app as engine_app
from gym_servers.participants.cutting import CUT_SECONDS
from gym_servers.protocol.identity import parse_key
from gym_servers.stack.settings import SettingsError
from gym_servers.worker.middleware import GenerationCut


def inventory(*tickets: str, checkpoint_id: str = "cp", folder: str = CELL) -> dict[str, Any]:
    named = [InventoryCall(ticket=ticket, episode="r", model_call_id="1.1") for ticket in tickets]
    return inventory_of(checkpoint_id, folder, named).model_dump(mode="json")


async def test_a_receipt_covers_each_call_once_and_its_tokens_are_durable_by_then(tmp_path: Path) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        asked = [asyncio.ensure_future(engine.ask(ticket)) for ticket in ("a", "b")]
        await asyncio.sleep(1.1)
        late = asyncio.ensure_future(engine.ask("late"))
        await asyncio.sleep(0.05)
        receipt = (await engine.cut(inventory("a", "b", "late", "never"))).json()
        states = {call["ticket"]: (call["state"], call["tokens"]) for call in receipt["calls"]}
        assert states == {
            "a": ("kept", 20),
            "b": ("kept", 20),
            "late": ("empty", 0),
            "never": ("unknown", 0),
        }
        stored = engine.store.get(receipt["key"])
        staged = unpack(stored)
        assert {ticket: len(tokens.ids) for ticket, tokens in staged.items()} == {"a": 20, "b": 20}
        digests = {call["ticket"]: call["sha256"] for call in receipt["calls"]}
        assert digests == {"a": digest(staged["a"]), "b": digest(staged["b"]), "late": "", "never": ""}
        assert json.loads(stored.partition(b"\n")[0])["others"] == {"late": "empty", "never": "unknown"}
        # Cut is not stopped: every stream comes to its end.
        for one in [*asked, late]:
            assert (await one).text.endswith("data: [DONE]\n\n")
        again = (await engine.cut(inventory("a", "b", "late", "never"))).json()
        assert again == receipt
        other = await engine.cut(inventory("a"))
        assert (other.status_code, other.json()["error"]["code"]) == (409, "checkpoint_conflict")
        ended = (await engine.cut(inventory("a", checkpoint_id="cq"))).json()
        assert unpack(engine.store.get(ended["key"]))["a"].finish == "stop"


async def test_that_nothing_could_be_kept_is_durable_as_well(tmp_path: Path) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        receipt = (await engine.cut(inventory("never"))).json()
        stored = json.loads(engine.store.get(receipt["key"]))
        assert (stored["streams"], stored["others"]) == ([], {"never": "unknown"})


async def test_cells_of_one_engine_cut_for_one_checkpoint_each_its_own_calls(tmp_path: Path) -> None:
    """A GymCheckpoint has one id in all cells of its stack."""
    other = CELL.replace("cell-0", "cell-1")
    async with guarded(tmp_path, collection=None) as (_, engine):
        asked = [asyncio.ensure_future(engine.ask(ticket)) for ticket in ("a", "b")]
        await asyncio.sleep(1.1)
        for ticket, folder in (("a", CELL), ("b", other)):
            receipt = (await engine.cut(inventory(ticket, folder=folder))).json()
            assert [(call["ticket"], call["state"]) for call in receipt["calls"]] == [(ticket, "kept")]
            assert receipt["key"].startswith(f"{folder}/")
            assert unpack(engine.store.get(receipt["key"])).keys() == {ticket}
        assert (await engine.cut(inventory("a", folder=other))).status_code == 409
        await asyncio.gather(*asked)


@pytest.mark.parametrize(
    ("body", "extra", "method", "status"),
    [
        (inventory("a"), {}, "POST", 401),
        (inventory("a"), {"authorization": "Bearer other"}, "POST", 401),
        (inventory("a"), BEARER, "GET", 422),
        (b"no json", BEARER, "POST", 422),
        ({}, BEARER, "POST", 422),
        ({**inventory("a"), "digest": "0"}, BEARER, "POST", 422),
        (b"[" * (33 * 1024 * 1024), BEARER, "POST", 422),
    ],
)
async def test_what_is_no_inventory_of_the_stack_s_owner_cuts_nothing(
    tmp_path: Path, body: Any, extra: dict[str, str], method: str, status: int
) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        response = await engine.cut(body, extra, method)
        assert response.status_code == status
        assert not (Path(engine.store.uri) / CELL / "generation-cuts").exists()


async def test_a_staging_that_failed_is_told_and_may_be_asked_for_again(tmp_path: Path) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        asked = asyncio.ensure_future(engine.ask("a"))
        await asyncio.sleep(1.1)
        engine.store.full = True
        response = await engine.cut(inventory("a"))
        assert (response.status_code, response.json()["error"]["code"]) == (409, "checkpoint_error")
        engine.store.full = False
        receipt = (await engine.cut(inventory("a"))).json()
        assert unpack(engine.store.get(receipt["key"]))
        await asked


async def test_a_cell_that_cuts_at_the_engine_goes_on_behind_all_that_was_generated(tmp_path: Path) -> None:
    """Messages are slow, so there are always tokens on their way: they are not generated again either."""
    async with guarded(tmp_path) as (rig, engine):
        rig.network.latency = 0.15
        at_the_cut: list[tuple[dict[str, int], int]] = []

        def noted(seen: Seen) -> None:
            # What the engine says before this has reached it comes on top.
            if (seen.host, seen.path) == ("engine", PATH):
                arrived = sum(len(call.tokens) for call in rig.participant("policy")._calls)
                at_the_cut.append((_generated(rig, rig.controller.record.attempt), arrived))

        rig.network.on_request = noted
        for number in range(2):
            await rig.until(lambda attempt=number: rig.running(attempt))
            policy = rig.participant("policy")
            await rig.until(lambda policy=policy: sum(len(c.tokens) > 0 for c in policy._calls) == 3)
            await rig.checkpoint(f"cut-{number}")
            generations = policy.generations()
            assert generations["cut_kept"] == 3
            assert "cut_engine_failed" not in generations
            ((generated, arrived),) = at_the_cut
            at_the_cut.clear()
            assert sum(generated.values()) > arrived, "nothing was on its way: this proves nothing"
            await asyncio.sleep(0.5)
            rig.kill("policy")
            await rig.until(lambda attempt=number + 1: len(_begun(rig, attempt)) == 3)
            begun = _begun(rig, number + 1)
            # One that ended while it was cut is not begun again.
            assert len(begun.keys() & generated.keys()) >= 2
            assert all(begun.get(prompt, tokens) >= tokens for prompt, tokens in generated.items())
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.continued) == (3, 1.0, 3)
        assert counted.tokens_kept > 0
        assert list((Path(engine.store.uri) / CELL / "generation-cuts").iterdir())


def _last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        pytest.param(lambda _: None, 3, id="gone"),
        pytest.param(lambda data: data[:-1], 3, id="cut short"),
        pytest.param(_last_bit, 1, id="another number in one call"),
    ],
)
async def test_staged_tokens_that_are_not_what_the_receipt_says_are_not_taken(
    tmp_path: Path, spoil: Callable[[bytes], bytes | None], failed: int
) -> None:
    """What has arrived is kept all the same; what is damaged of one call costs that call."""
    async with guarded(tmp_path) as (rig, engine):
        rig.network.latency = 0.15
        engine.store.spoil = spoil
        await rig.until(lambda: sum(len(call.tokens) > 0 for call in rig.participant("policy")._calls) == 3)
        await rig.checkpoint("cut")
        generations = rig.participant("policy").generations()
        assert (generations["cut_engine_failed"], generations["cut_kept"]) == (failed, 3)
        rig.kill("policy")
        await rig.until(rig.complete)
        assert rig.account(3).problems == []
        assert rig.account(3).continued == 3


def _tokens(rig: Rig, attempt: int) -> list[dict[str, Any]]:
    """What the engine has journaled of calls under an attempt."""
    entries = [entry for entry in rig.journal() if entry["kind"] == "tokens"]
    return [one for one in entries if parse_key(one["request"].partition("/")[0]).attempt == attempt]


def _generated(rig: Rig, attempt: int) -> dict[str, int]:
    """How many tokens there are of each generation that has not ended, by its prompt."""
    found: dict[str, int] = {}
    for one in _tokens(rig, attempt):
        found[one["prompt"]] = one["from"] + one["count"]
        if one["last"]:
            del found[one["prompt"]]
    return found


def _begun(rig: Rig, attempt: int) -> dict[str, int]:
    """Behind how many tokens each generation began."""
    found: dict[str, int] = {}
    for one in _tokens(rig, attempt):
        found.setdefault(one["prompt"], one["from"])
    return found


@pytest.mark.parametrize("what", ["away", "refuses", "silent", "full", "another receipt"])
async def test_c9_an_engine_that_does_not_cut_is_counted_and_holds_no_checkpoint_up(
    tmp_path: Path, what: str
) -> None:
    """What has arrived is kept all the same."""
    async with guarded(tmp_path) as (rig, engine):
        await rig.until(lambda: sum(len(call.tokens) > 0 for call in rig.participant("policy")._calls) == 3)
        wrong = inventory("other")
        answers: dict[str, Any] = {
            "refuses": (403, {}),
            "another receipt": (
                200,
                {
                    "checkpoint_id": wrong["checkpoint_id"],
                    "inventory_digest": wrong["digest"],
                    "worker": "w",
                    "key": "",
                    "calls": [],
                },
            ),
        }
        if what == "away":
            rig.network.faults.append(Fault("unreachable", "engine", PATH))
        elif what == "full":
            engine.store.full = True
        else:
            inner = rig.network._hosts["engine"]

            async def answers_otherwise(scope: Any, receive: Any, send: Any) -> None:
                from starlette.responses import JSONResponse

                if scope["path"] != PATH:
                    await inner[0](scope, receive, send)
                    return
                if what == "silent":
                    await asyncio.sleep(1000)
                status, body = answers[what]
                await JSONResponse(body, status)(scope, receive, send)

            rig.network._hosts["engine"] = (answers_otherwise, inner[1])
        before = rig.wall()
        await rig.checkpoint("cut")
        assert rig.wall() - before < CUT_SECONDS + 2
        generations = rig.participant("policy").generations()
        assert (generations["cut_engine_failed"], generations["cut_kept"]) == (3, 3)
        engine.store.full = False
        rig.kill("agent")
        await rig.until(rig.complete)
        assert rig.account(3).problems == []
        assert rig.account(3).continued == 3


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "GYM_CONTROL_TOKEN"),
        ({"GYM_CONTROL_TOKEN": "t"}, "set GYM_CUT_STORAGE"),
        ({"GYM_CONTROL_TOKEN": "t", "GYM_CUT_STORAGE": "ftp://x"}, "GYM_CUT_STORAGE or GYM_CUT_S3"),
        (
            {"GYM_CONTROL_TOKEN": "t", "GYM_CUT_STORAGE": "s3://b/p", "GYM_CUT_S3": "{"},
            "GYM_CUT_STORAGE or GYM_CUT_S3",
        ),
        ({"GYM_CONTROL_TOKEN": "t", "GYM_CUT_STORAGE": "s3://b/p", "GYM_CUT_S3": "{}"}, "bucket"),
    ],
)
async def test_a_middleware_that_cannot_work_says_so_when_the_engine_starts(
    environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GYM_CONTROL_TOKEN", "GYM_CUT_STORAGE", "GYM_CUT_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=says):
        GenerationCut(engine_app(RATE, None))  # type: ignore[arg-type]


async def test_c9_a_stream_that_the_engine_has_lost_is_counted_and_one_on_its_way_is_not(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (rig, engine):
        await rig.until(rig.running)
        policy = rig.participant("policy")
        await rig.until(lambda: sum(len(call.tokens) > 0 for call in policy._calls) == 3)
        lost = next(iter(policy._calls))
        engine.app._streams._running.pop(lost.stream.ticket)
        engine.app._streams.begin(lost.stream.ticket)  # as if it had begun anew
        await rig.checkpoint("cut")
        generations = policy.generations()
        assert (generations["cut_kept"], generations["cut_engine_failed"]) == (3, 1)
        rig.network.latency = 1.0
        await rig.until(lambda: any(call.stream is not None and not call.tokens for call in policy._calls))
        await rig.checkpoint("under-way")
        assert policy.generations()["cut_engine_failed"] == 1
