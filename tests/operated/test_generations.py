"""What policy servers count of their generations, as the operator's numbers: over deaths of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_operator.effects.kube import PODS, STACKS
from gym_rig.cell import IDENTITY
from gym_rig.collecting import SLOWLY, rows, taken
from gym_rig.operated import OperatedRig, operated

WHERE = 'namespace="local",reason="",stack="rig"'


def shown(rig: OperatedRig, what: str) -> float | None:
    """The operator's number, None where it has none."""
    assert rig.operator is not None
    return rig.operator.numbers().get(f'gym_generations_total{{{WHERE},what="{what}"}}')


def policy(rig: OperatedRig) -> Any:
    return rig.cell.processes_by_name["policy"].server.participant


async def generating(rig: OperatedRig) -> None:
    await rig.until(rig.all_in_service, "in service")
    await rig.until(lambda: any(len(call.tokens) for call in policy(rig)._calls), "generating")


async def cut(rig: OperatedRig, name: str) -> int:
    """Take a checkpoint; how many generations the policy's process has kept in all."""
    await generating(rig)
    before = policy(rig).generations().get("cut_kept", 0)
    assert (await taken(rig, name))["phase"] == "Succeeded"
    kept: int = policy(rig).generations()["cut_kept"]
    assert kept > before
    return kept


async def test_a_death_of_the_policy_server_neither_lowers_nor_repeats_what_was_counted(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await rig.until(rig.all_in_service, "in service")
        assert shown(rig, "cut_kept") == shown(rig, "continued") == 0
        first = await cut(rig, "one")
        await rig.until(lambda: shown(rig, "cut_kept") == first, "counted")
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-policy-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        await rig.until(lambda: policy(rig).generations().get("continued", 0) == first, "continued")
        await rig.until(lambda: shown(rig, "continued") == first, "counted")
        assert shown(rig, "cut_kept") == first
        second = await cut(rig, "two")
        await rig.until(lambda: shown(rig, "cut_kept") == first + second, "counted")
        tokens = 'gym_generation_tokens_total{namespace="local",stack="rig",what="continued_tokens"}'
        assert rig.operator is not None
        assert rig.operator.numbers()[tokens] == policy(rig).generations()["continued_tokens"]


async def test_a_new_operator_does_not_count_again_what_the_one_before_has_counted(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await cut(rig, "one")
        await rig.until(lambda: shown(rig, "cut_kept") == first, "counted")
        rig.kill_operator()
        rig.start_operator()
        await rig.until(lambda: shown(rig, "cut_kept") is not None, "heard")
        assert shown(rig, "cut_kept") == 0
        second = await cut(rig, "two")
        await rig.until(lambda: shown(rig, "cut_kept") == second - first, "counted")


async def test_the_numbers_of_a_stack_go_with_it(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await rig.until(lambda: shown(rig, "cut_kept") == 0, "heard")
        assert rig.operator is not None
        operator = rig.operator
        rig.kube.remove(STACKS, IDENTITY.namespace, IDENTITY.name)
        await rig.until(lambda: not [series for series in operator.numbers() if "rig" in series], "gone")


async def test_what_the_last_checkpoint_of_a_policy_server_cuts_is_counted_before_it_goes(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await generating(rig)
        await rig.until(lambda: shown(rig, "cut_kept") == 0, "heard")
        old = policy(rig)
        rig.leave("rig-policy-0")
        await rig.until(lambda: rig.in_service(1), "continued")
        assert shown(rig, "cut_kept") == old.generations()["cut_kept"] > 0
