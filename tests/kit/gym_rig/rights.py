"""The API server's authorization: what a role's rules allow, which of it was used, and what was refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_operator.effects.kube import Resource

Right = tuple[str, str]
"""A verb, and "group/resource" with its subresource if any."""


class Rights:
    """Of one account. Called by `FakeKube` for each request; remembers what it answered."""

    def __init__(self, rules: Sequence[Mapping[str, Any]]) -> None:
        self._rules = rules
        self.used: set[Right] = set()
        self.refused: set[Right] = set()

    @property
    def granted(self) -> set[Right]:
        return {
            (verb, f"{group}/{resource}")
            for rule in self._rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    def __call__(self, verb: str, resource: Resource, name: str) -> bool:
        right = (verb, f"{resource.group}/{resource.plural}")
        allowed = any(
            verb in rule["verbs"]
            and resource.group in rule["apiGroups"]
            and resource.plural in rule["resources"]
            and name in rule.get("resourceNames", [name])
            for rule in self._rules
        )
        (self.used if allowed else self.refused).add(right)
        return allowed
