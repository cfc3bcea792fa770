"""Events that the operator says of a stack."""

from __future__ import annotations

import asyncio
from typing import Any

from gym_operator.effects.events import Events, Subject
from gym_operator.effects.kube import EVENTS, Conflict, Resource
from gym_rig.edges import NS, STACK_UID, until
from gym_rig.fake_kube import FakeKube


def posted(kube: FakeKube) -> list[dict[str, Any]]:
    return [body for (resource, _, _), body in kube.objects.items() if resource == EVENTS]


async def test_an_event_is_said_once_in_a_while(kube: FakeKube) -> None:
    now = [0.0]
    events = Events(kube, lambda: now[0])
    posting = asyncio.create_task(events.run())
    subject = Subject("GymStack", NS, "demo", STACK_UID)
    for _ in range(3):
        events.say(subject, "Warning", "Recovering", "env is gone")
    events.say(subject, "Warning", "Recovering", "agent is gone")
    now[0] = 301.0
    events.say(subject, "Warning", "Recovering", "env is gone")
    await until(lambda: len(posted(kube)) == 3)
    posting.cancel()
    assert [each["message"] for each in posted(kube)] == ["env is gone", "agent is gone", "env is gone"]
    assert posted(kube)[0]["involvedObject"]["uid"] == STACK_UID


async def test_an_event_that_cannot_be_posted_costs_nothing(kube: FakeKube) -> None:
    tried = asyncio.Event()

    def refuse(verb: str, resource: Resource, name: str) -> None:
        tried.set()
        raise Conflict(409, "no")

    kube.before_write = refuse
    events = Events(kube)
    posting = asyncio.create_task(events.run())
    events.say(Subject("GymStack", NS, "demo", STACK_UID), "Normal", "Recovered", "it runs")
    await tried.wait()
    assert not posting.done()
    posting.cancel()
