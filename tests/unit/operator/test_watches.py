from typing import Any

from kopf._core.intents.causes import Activity

from gym_operator.effects.fleet import Fleet
from gym_operator.handlers.watches import registry


async def test_our_work_is_ended_before_the_framework_waits_for_it() -> None:
    """The framework gives tasks it does not know five seconds; a rollout would stay parked for that long."""
    ended = []

    async def end() -> None:
        ended.append(True)

    services: Any = type(
        "Services",
        (),
        {"cache": None, "kube": None, "events": None, "wall": None, "monotonic": None, "cluster": None},
    )()
    handlers = registry(Fleet(services), None, end, cluster_wide=True)
    for handler in handlers._activities.get_all_handlers():
        if handler.activity is Activity.CLEANUP:
            await handler.fn()
    assert ended == [True]
