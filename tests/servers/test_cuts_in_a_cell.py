"""Generations that are cut in a whole cell, on virtual time: nothing that was generated before a cut is generated
again, and what goes on behind it is what an uninterrupted rollout says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_rig.network import Fault
from gym_rig.wire import ok, serving
from gym_servers.capture.ledger import decode
from gym_servers.capture.tokens import Span
from gym_servers.engine.rows import counter_rows
from gym_servers.engine.script import next_text
from gym_servers.participants.model import ABANDONED_SECONDS
from gym_servers.protocol import headers
from gym_servers.protocol import messages as m
from gym_servers.storage.packs import load_manifest, load_records

SLOW = 20.0  # tokens a second: a turn takes three seconds, in groups of four tokens
TURN = len(next_text([{"role": "user", "content": "add 5 then add 7 then get the count"}]))
ASK = {"input": [{"role": "user", "content": "add 5 then add 7 then get the count"}]}


def tokens(rig: Rig, key: str = "") -> list[dict[str, Any]]:
    found = [entry for entry in rig.journal() if entry["kind"] == "tokens"]
    return [entry for entry in found if not key or entry["request"].partition("/")[0] == key]


def under_way(rig: Rig) -> int:
    """Calls that have generated something and are not at their end."""
    calls = rig.participant("policy")._calls
    return sum(0 < len(call.tokens) < TURN - 8 for call in calls)


def trajectories(folder: Path) -> dict[str, Any]:
    rows = map(json.loads, (folder / "output/rollouts.jsonl").read_text().splitlines())
    return {row["_ng_rollout_id"]: row["response"]["output"] for row in rows}


@pytest.mark.parametrize("victim", ["policy", "agent", "all"])
async def test_a_kill_inside_of_a_generation_costs_nothing_of_what_the_checkpoint_holds(
    tmp_path: Path, victim: str
) -> None:
    rows = counter_rows(3, 1)
    async with cell(tmp_path / "killed", rows, rate=SLOW) as rig:
        for round_ in range(3):
            await rig.until(lambda: under_way(rig) == 3)
            await rig.checkpoint(f"cut-{round_}")
            kept = rig.participant("policy").generations()["cut_kept"]
            assert kept == 3
            await asyncio.sleep(0.5)
            rig.kill(*(() if victim == "all" else (victim,)))
            await rig.until(lambda attempt=round_ + 1: rig.running(attempt))
        await rig.until(lambda: rig.participant("policy").generations().get("continued") == 3)
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.continued) == (3, 1.0, 3)
        assert counted.tokens_kept > 0
    async with cell(tmp_path / "whole", rows, rate=SLOW) as rig:
        await rig.until(rig.complete)
    assert trajectories(tmp_path / "killed") == trajectories(tmp_path / "whole")


async def test_checkpoints_without_a_death_cost_no_token(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(3, 1), rate=SLOW) as rig:
        for number in range(4):
            await rig.until(lambda: under_way(rig) == 3)
            await rig.checkpoint(f"cut-{number}")
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert counted.problems == []
        assert counted.tokens_generated == counted.tokens_needed
        assert rig.participant("policy").generations()["cut_kept"] >= 12


async def test_the_report_of_a_checkpoint_counts_what_was_cut(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(3, 1), rate=SLOW) as rig:
        await rig.until(lambda: under_way(rig) == 3)
        client = rig.client("policy")
        prepare = m.PrepareRequest(checkpoint_id="by-hand", deadline_ts=rig.wall() + 10)
        reply = await client.call("prepare", prepare, m.PhaseReply)
        assert reply.report is not None
        counts = reply.report.counts
        assert (counts["cut_kept"], counts["cut_skipped"], counts["cut_failed"]) == (3, 0, 0)
        assert counts["cut_tokens"] == sum(entry["count"] for entry in tokens(rig))
        resume = m.ResumeRequest(checkpoint_id="by-hand", deadline_ts=rig.wall() + 10)
        await client.call("resume", resume, m.PhaseReply)
        status = await client.status()
        assert "cut_kept" not in status.report.counts
        assert status.generations["cut_kept"] == 3


async def test_c14_tokens_of_several_weight_versions_are_told_apart_after_a_restore(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(1, 1), rate=SLOW) as rig:
        await ok(rig, "engine", "/update_weight_version", {"new_version": "one"})
        await rig.until(lambda: under_way(rig))
        await ok(rig, "engine", "/update_weight_version", {"new_version": "two"})
        before = len(tokens(rig))
        await rig.until(lambda: len(tokens(rig)) > before + 1)
        taken = await rig.checkpoint("cut")
        (call,) = rig.participant("policy")._calls
        rig.kill("policy")
        await ok(rig, "engine", "/update_weight_version", {"new_version": "three"})
        await rig.until(lambda: rig.running(1))
        await rig.until(lambda: len(rig.participant("policy")._ledgers.calls("0-0-a1")) >= 1)
        ledger = await rig.participant("policy").ledger("0-0-a1")
        spans = ledger.calls[0].spans
        assert [span.version for span in spans] == ["one", "two", "three"]
        store = rig.opener(rig.processes_by_name["policy"].alive)(taken.uri)
        manifest, _ = load_manifest(store, "model/policy", None)
        (record,) = load_records(store, manifest).values()
        (prefix,) = decode("record", record)[1].prefixes
        assert spans[:1] == prefix.tokens.spans[:1]
        assert spans[1].end == len(prefix.tokens.ids)
        assert spans[2] == Span("three", spans[1].end, len(ledger.calls[0].ids))
        assert call.tokens.spans[0] == spans[0]


async def test_c10_a_budget_is_of_all_attempts_together(tmp_path: Path) -> None:
    budget = 30
    async with cell(tmp_path, counter_rows(1, 1), rate=SLOW, collection=None) as rig:
        await serving(rig)
        body = {**ASK, "max_output_tokens": budget}
        path, position = "/ng-rollout/x/v1/responses", {headers.MODEL_CALL: "1.1"}
        asked = asyncio.ensure_future(ok(rig, "policy", path, body, **position))
        await rig.until(lambda: under_way(rig))
        prefix = sum(entry["count"] for entry in tokens(rig))
        records = await cut(rig)
        asked.cancel()
        rig.kill("policy")
        fresh = rig.start("policy")
        restored = await put_back(rig, records)
        assert restored == ["x-a1"]
        reply, _ = await ok(rig, "policy", "/ng-rollout/x-a1/v1/responses", body, **position)
        assert reply["usage"]["output_tokens"] == budget
        assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        again = [entry for entry in tokens(rig) if entry["request"].startswith("x-a1/")]
        assert again[0]["from"] == prefix
        assert sum(entry["count"] for entry in again) == budget - prefix
        assert fresh.server.participant.generations()["continued"] == 1


async def cut(rig: Rig) -> str:
    """A checkpoint of the policy alone; its place."""
    client, place = rig.client("policy"), str(rig.folder / "by-hand")
    deadline = rig.wall() + 30
    await client.call("prepare", m.PrepareRequest(checkpoint_id="cut", deadline_ts=deadline), m.PhaseReply)
    commit = m.CommitRequest(checkpoint_id="cut", deadline_ts=deadline, checkpoint_dir=place)
    await client.call("commit", commit, m.CommitReply)
    return place


async def put_back(rig: Rig, place: str) -> list[str]:
    client = rig.client("policy")
    deadline = rig.wall() + 30
    restore = m.RestoreRequest(
        checkpoint_id="back", deadline_ts=deadline, checkpoint_dir=place, episode_ids=["x"], cell_attempt=1
    )
    reply = await client.call("restore", restore, m.RestoreReply)
    await client.call("resume", m.ResumeRequest(checkpoint_id="back", deadline_ts=deadline), m.PhaseReply)
    return reply.restored


@pytest.mark.parametrize("kind", ["break off", "lose reply", "cut reply", "lose request"])
async def test_a_stream_that_breaks_off_is_taken_up_behind_its_tokens(tmp_path: Path, kind: Any) -> None:
    async with cell(tmp_path, counter_rows(1, 1), rate=100.0) as rig:
        await rig.until(lambda: rig.effects() >= 1)
        rig.network.faults.append(Fault(kind, "engine", calls=2))
        await rig.until(rig.complete)
        counted = rig.account(1)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean) == (1, 1.0)
        used = json.loads((tmp_path / "output/rollouts.jsonl").read_text())["response"]["usage"]["output_tokens"]
        assert used == counted.tokens_needed


async def test_an_engine_that_ends_behind_some_tokens_is_asked_for_the_rest_alone(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(1, 1), rate=SLOW) as rig:
        await rig.until(lambda: under_way(rig))
        assert rig.network.break_off(list(rig.network.under_way.values()).index(engine_call(rig)))
        had = sum(entry["count"] for entry in tokens(rig))
        await rig.until(rig.complete)
        entries = [entry for entry in tokens(rig) if entry["prompt"] == tokens(rig)[0]["prompt"]]
        assert len({entry["request"] for entry in entries}) == 2
        second = next(entry for entry in entries if entry["request"] != entries[0]["request"])
        assert second["from"] == had
        assert rig.account(1).tokens_generated == rig.account(1).tokens_needed


def engine_call(rig: Rig) -> Any:
    return next(seen for seen in rig.network.under_way.values() if seen.host == "engine")


async def test_a_retired_call_is_not_generated_for_any_longer(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(2, 1), rate=SLOW) as rig:
        await rig.until(lambda: under_way(rig) == 2)
        request = m.RetireRequest(checkpoint_id="retire", deadline_ts=rig.wall() + 20, episode_ids=["0-0"])
        await rig.client("policy").call("retire", request, m.RetireReply)
        before, other = len(tokens(rig, "0-0")), len(tokens(rig, "1-0"))
        await asyncio.sleep(5.0)
        assert len(tokens(rig, "0-0")) == before > 0
        assert len(tokens(rig, "1-0")) > other


async def test_a_call_whose_caller_is_gone_is_stopped_in_the_engine(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(1, 1), rate=1.0, collection=None) as rig:
        await serving(rig)
        path, position = "/ng-rollout/x/v1/responses", {headers.MODEL_CALL: "1.1"}
        asked = asyncio.ensure_future(ok(rig, "policy", path, ASK, **position))
        await asyncio.sleep(5.0)
        asked.cancel()
        await asyncio.sleep(ABANDONED_SECONDS + 2)
        before = len(tokens(rig))
        assert before >= ABANDONED_SECONDS
        await asyncio.sleep(30.0)
        assert len(tokens(rig)) == before
        assert rig.participant("policy").generations()["abandoned"] == 1


async def test_an_engine_that_is_away_is_told_of_and_waited_for(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(1, 1), rate=100.0) as rig:
        await rig.until(lambda: rig.effects() >= 1)
        rig.network.faults.append(Fault("unreachable", "engine", calls=90))
        policy = rig.participant("policy")
        await rig.until(lambda: policy.problem)
        assert "http://engine" in policy.problem
        assert "has not answered for" in policy.problem
        assert rig.view is not None
        status = rig.view.seen["policy"].status
        assert status is not None
        await rig.until(rig.complete)
        assert policy.problem == ""
        assert rig.account(1).problems == []
