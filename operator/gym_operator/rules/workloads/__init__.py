"""The children of a stack as manifests, built from its spec alone.

`build_children` gives all that is applied again and again; the Secret of `build_control_secret` is made once.
"""

from __future__ import annotations

from gym_operator.rules.workloads.budget import disruption_budget
from gym_operator.rules.workloads.common import Manifest, StackContext
from gym_operator.rules.workloads.config import config_map, control_secret
from gym_operator.rules.workloads.drift import is_foreign, needs_update, with_digest
from gym_operator.rules.workloads.engine import engine_children
from gym_operator.rules.workloads.network import network_policy
from gym_operator.rules.workloads.pods import template_digest
from gym_operator.rules.workloads.services import data_service, headless_service
from gym_operator.rules.workloads.stateful_sets import stateful_set

__all__ = [
    "Manifest",
    "StackContext",
    "build_children",
    "build_control_secret",
    "is_foreign",
    "needs_update",
    "templates",
]


def build_children(context: StackContext, *, running: bool = True) -> tuple[Manifest, ...]:
    """Every child but the Secret, in the order to apply them: what pods need comes before the pods.

    Without `running` there are no pods.
    """
    participants = context.spec.participants()
    services = [
        service
        for participant in participants
        for service in (
            headless_service(context, participant.name),
            *(data_service(context, participant.name, cell) for cell in range(context.cells)),
        )
    ]
    sets = [stateful_set(context, participant, running=running) for participant in participants]
    engine = engine_children(context, running=running)
    guard = (disruption_budget(context),) if context.guarded else ()
    manifests = (config_map(context), network_policy(context), *guard, *services, *engine, *sets)
    return tuple(with_digest(manifest) for manifest in manifests)


def templates(context: StackContext) -> dict[str, str]:
    """Server -> what its pods carry that are as the spec wants them."""
    return {each.name: template_digest(context, each) for each in context.spec.participants()}


def build_control_secret(context: StackContext, control_token: str, cookie_secret: str) -> Manifest:
    """The stack's Secret. The values are random, so it is created if absent and never updated."""
    return control_secret(context, control_token, cookie_secret)
