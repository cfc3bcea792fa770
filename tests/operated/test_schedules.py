"""Schedules under a whole operator: one checkpoint for each time, whatever dies and whoever interferes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api import names
from gym_operator.effects.kube import CHECKPOINTS, SCHEDULES, STACKS, Body, KubeError
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_servers.engine.rows import counter_rows

SLOWLY = 2.0  # tokens a second: the collection outlasts these tests


def rows() -> Any:
    return counter_rows(6, 1)


def schedule(rig: OperatedRig, **spec: Any) -> None:
    metadata = {"name": "often", "labels": {names.INSTANCE_LABEL: "app"}, "annotations": {"tracking": "app"}}
    template = {"spec": {"stackRef": {"name": IDENTITY.name}}}
    rig.kube.put(
        SCHEDULES, IDENTITY.namespace, {"metadata": metadata, "spec": {"every": "20s", "template": template, **spec}}
    )


def change(rig: OperatedRig, **spec: Any) -> None:
    found = rig.kube.objects[SCHEDULES, IDENTITY.namespace, "often"]
    metadata = {**found["metadata"], "generation": found["metadata"]["generation"] + 1}
    rig.kube.set(SCHEDULES, IDENTITY.namespace, "often", spec={**found["spec"], **spec}, metadata=metadata)


def made(rig: OperatedRig) -> list[Body]:
    """What schedules have made, oldest first."""
    found = [body for (kind, _, _), body in rig.kube.objects.items() if kind == CHECKPOINTS]
    return sorted(found, key=lambda body: str(body["metadata"]["name"]))


def status(rig: OperatedRig) -> Body:
    return rig.status(SCHEDULES, "often")


def ready(rig: OperatedRig) -> Body:
    return next((each for each in status(rig).get("conditions", ()) if each["type"] == "Ready"), {})


async def running(rig: OperatedRig) -> None:
    await rig.until(rig.in_service, "in service")


async def test_k7_checkpoints_are_taken_at_their_times_and_belong_to_nobody(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await running(rig)
        created = now()
        schedule(rig, template={"metadata": {"labels": {"tier": "gold"}}, "spec": {"stackRef": {"name": "rig"}}})
        await rig.until(lambda: len(made(rig)) == 2 and rig.final(made(rig)[1]["metadata"]["name"]), "two")
        assert 39 <= now() - created < 45
        for body in made(rig):
            assert body["status"]["phase"] == "Succeeded", body["status"]
            assert body["metadata"]["labels"] == {
                "tier": "gold",
                names.SCHEDULE_LABEL: "often",
                names.SCHEDULE_UID_LABEL: rig.kube.objects[SCHEDULES, "local", "often"]["metadata"]["uid"],
            }
            assert list(body["metadata"]["annotations"]) == [names.SCHEDULED_AT]
            assert "ownerReferences" not in body["metadata"]
        assert status(rig)["lastCheckpoint"] == made(rig)[1]["metadata"]["name"]
        assert status(rig)["lastScheduleTime"] == made(rig)[1]["metadata"]["annotations"][names.SCHEDULED_AT]
        assert status(rig)["nextScheduleTime"] > status(rig)["lastScheduleTime"]
        assert (ready(rig)["status"], status(rig)["observedGeneration"]) == ("True", 1)


@pytest.mark.parametrize(("write", "after"), [(write, after) for write in (1, 2, 3, 5) for after in (False, True)])
async def test_k5_an_operator_killed_at_any_write_makes_one_checkpoint_for_each_time(
    tmp_path: Path, write: int, after: bool
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await running(rig)
        schedule(rig)
        await rig.until(lambda: status(rig).get("nextScheduleTime"), "it was looked at")
        await asyncio.sleep(18)
        await rig.replace_operator(write, after=after)
        await rig.until(lambda: len(made(rig)) == 3 and rig.final(made(rig)[2]["metadata"]["name"]), "three")
        times = [body["metadata"]["annotations"][names.SCHEDULED_AT] for body in made(rig)]
        assert len(set(times)) == 3
        assert {rig.status(CHECKPOINTS, body["metadata"]["name"])["phase"] for body in made(rig)} <= {
            "Succeeded",
            "Failed",
        }
        assert status(rig)["lastScheduleTime"] == times[-1]


async def test_k5_what_was_made_by_an_operator_that_could_not_say_so_is_found_again(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await running(rig)
        schedule(rig)
        lost = []

        def lose(verb: str, resource: Any, name: str) -> None:
            if (verb, resource) == ("status", SCHEDULES) and made(rig) and not lost:
                lost.append(name)
                rig.kill_operator()
                rig.start_operator()
                raise KubeError(0, "no answer")

        rig.kube.before_write = lose
        await rig.until(lambda: made(rig) and status(rig).get("lastCheckpoint"), "one")
        assert lost
        assert len(made(rig)) == 1
        assert status(rig)["lastCheckpoint"] == made(rig)[0]["metadata"]["name"]
        assert "lastSkipped" not in status(rig)


async def test_k5_a_name_that_is_taken_is_a_condition_and_the_next_time_is_kept(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await running(rig)
        schedule(rig)
        await rig.until(lambda: status(rig).get("nextScheduleTime"), "it was looked at")
        taken = names.scheduled_checkpoint("often", status(rig)["nextScheduleTime"])
        rig.checkpoint(taken)
        await rig.until(lambda: ready(rig)["reason"] == "NameConflict", "said so")
        assert ready(rig)["status"] == "False"
        assert taken in ready(rig)["message"]
        await rig.until(lambda: ready(rig)["status"] == "True", "the next one")
        assert [body["metadata"]["name"] for body in made(rig)] == [taken, status(rig)["lastCheckpoint"]]


@pytest.mark.parametrize("own", [True, False])
async def test_k5_what_exists_already_is_its_own_by_the_uid_of_its_schedule(tmp_path: Path, own: bool) -> None:
    """Made since it was looked for: by another operator, or for a schedule before this one that had its name."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await running(rig)
        schedule(rig)
        uid = rig.kube.objects[SCHEDULES, IDENTITY.namespace, "often"]["metadata"]["uid"] if own else "of-another"
        there: list[Body] = []

        def come_before(verb: str, resource: Any, name: str) -> None:
            if (verb, resource) == ("create", CHECKPOINTS) and not there:
                labels = {names.SCHEDULE_LABEL: "often", names.SCHEDULE_UID_LABEL: uid}
                body = {"metadata": {"name": name, "labels": labels}, "spec": {"stackRef": {"name": IDENTITY.name}}}
                there.append(rig.kube.put(CHECKPOINTS, IDENTITY.namespace, body))

        rig.kube.before_write = come_before
        await rig.until(lambda: there and status(rig).get("lastCheckpoint" if own else "lastSkipped"), "dealt with")
        assert [body["metadata"]["uid"] for body in made(rig)] == [there[0]["metadata"]["uid"]]
        if own:
            assert status(rig)["lastCheckpoint"] == there[0]["metadata"]["name"]
            assert ready(rig)["status"] == "True"
        else:
            assert (ready(rig)["status"], ready(rig)["reason"]) == ("False", "NameConflict")
        await rig.until(lambda: len(made(rig)) == 2, "the next time is kept")


async def test_k6_what_would_overlap_is_skipped(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        rig.pods_may_start = False
        schedule(rig)
        await rig.until(lambda: (status(rig).get("lastSkipped") or {}).get("reason") == "Overlap", "skipped")
        await asyncio.sleep(100)
        assert len(made(rig)) == 1
        assert ready(rig)["status"] == "True"
        rig.pods_may_start = True
        await rig.until(lambda: len(made(rig)) == 2, "it goes on")


async def test_k6_an_outage_of_the_operator_is_made_up_for_once(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=0.2) as rig:
        await running(rig)
        schedule(rig)
        await rig.until(lambda: made(rig) and rig.final(made(rig)[0]["metadata"]["name"]), "one")
        rig.kill_operator()
        await asyncio.sleep(1010)
        rig.start_operator()
        await rig.until(lambda: len(made(rig)) == 2, "made up for")
        await rig.until(lambda: status(rig)["lastCheckpoint"] == made(rig)[1]["metadata"]["name"], "said so")
        await asyncio.sleep(5)
        assert len(made(rig)) == 2


async def test_k6_a_suspended_schedule_takes_none_and_then_one(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=0.2) as rig:
        await running(rig)
        schedule(rig, suspend=True)
        await asyncio.sleep(300)
        assert made(rig) == []
        assert (status(rig)["phase"], "nextScheduleTime" in status(rig)) == ("Suspended", False)
        change(rig, suspend=False)
        await rig.until(lambda: made(rig), "one")
        await asyncio.sleep(5)
        assert len(made(rig)) == 1
        assert (status(rig)["phase"], status(rig)["observedGeneration"]) == ("Active", 2)


async def test_k7_editing_or_deleting_a_schedule_leaves_its_checkpoints(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await running(rig)
        schedule(rig)
        await rig.until(lambda: made(rig) and rig.final(made(rig)[0]["metadata"]["name"]), "one")
        await asyncio.sleep(5)
        before = made(rig)
        template = {"spec": {"stackRef": {"name": "another"}, "deletionPolicy": "Delete", "ttl": "1s"}}
        change(rig, every=None, schedule="0 0 1 1 *", template=template, suspend=True)
        await rig.until(lambda: status(rig)["observedGeneration"] == 2, "seen")
        await asyncio.sleep(60)
        assert made(rig) == before, "no field of it is another"
        rig.kube.remove(SCHEDULES, IDENTITY.namespace, "often")
        await asyncio.sleep(60)
        assert made(rig) == before
        schedule(rig)  # under its name, and another one
        await rig.until(lambda: len(made(rig)) == 2, "its own")


async def test_a_schedule_of_no_stack_says_so(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        schedule(rig, every="10s")
        rig.kube.remove(STACKS, IDENTITY.namespace, IDENTITY.name)
        await rig.until(lambda: ready(rig).get("reason") == "StackNotFound", "said so")
        assert made(rig) == []


async def test_a_schedule_that_cannot_be_used_is_stalled_and_keeps_no_other_waiting(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await running(rig)
        template = {"spec": {"stackRef": {"name": IDENTITY.name}}}
        wrong = {"schedule": "0 0 * * *", "timeZone": "Mars/Olympus", "template": template}
        rig.kube.put(SCHEDULES, IDENTITY.namespace, {"metadata": {"name": "wrong"}, "spec": wrong})
        schedule(rig)
        await rig.until(lambda: made(rig), "the other one")
        refused = rig.status(SCHEDULES, "wrong")
        stalled = next(each for each in refused["conditions"] if each["type"] == "Stalled")
        assert (refused["phase"], stalled["status"], stalled["reason"]) == ("Failed", "True", "InvalidSpec")
        assert "Mars/Olympus" in stalled["message"]
