"""What every child of a stack has: the stack it belongs to, its labels, its owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gym_operator.api import names
from gym_servers.stack.settings import StackIdentity
from gym_servers.stack.spec import StackSpec

Manifest = dict[str, Any]


@dataclass(frozen=True)
class StackContext:
    """What manifests are built from. `operator_namespace` is where control traffic may come from; `kept` are so many
    cells as are still needed, where the spec wants less of them, `at_work` so many as may still do something though
    nobody needs them, and `kept_servers` those that the spec has no more. `guarded`: nobody is to evict its pods,
    since the operator moves them itself, but the cells `yielding`: they are for whoever drains their node."""

    identity: StackIdentity
    spec: StackSpec
    operator_namespace: str
    kept: int = 0
    at_work: int = 0
    kept_servers: frozenset[str] = frozenset()
    guarded: bool = False
    yielding: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """Name of the stack."""
        return self.identity.name

    @property
    def cells(self) -> int:
        """How many cells there are to be now."""
        return max(self.spec.cells, self.kept)


def stack_labels(context: StackContext) -> dict[str, str]:
    """Labels of everything that belongs to the stack."""
    return {
        names.NAME_LABEL: names.SERVER_NAME,
        names.INSTANCE_LABEL: context.name,
        names.MANAGED_BY_LABEL: names.OPERATOR_NAME,
        names.STACK_LABEL: context.name,
        names.STACK_UID_LABEL: context.identity.uid,
    }


def server_labels(context: StackContext, server: str) -> dict[str, str]:
    """Labels of everything that belongs to one server of the stack."""
    return {**stack_labels(context), names.SERVER_LABEL: server}


def server_selector(context: StackContext, server: str) -> dict[str, str]:
    """Selects the pods of one server.

    By UID: pods of a deleted stack may linger, and a stack made again under its name must not select them.
    """
    return {names.STACK_UID_LABEL: context.identity.uid, names.SERVER_LABEL: server}


def child(
    context: StackContext, api_version: str, kind: str, name: str, labels: dict[str, str], **body: Any
) -> Manifest:
    """A manifest owned by the stack, so that it goes when the stack goes."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": context.identity.namespace,
            "labels": labels,
            "ownerReferences": [
                {
                    "apiVersion": names.API_VERSION,
                    "kind": names.STACK_KIND,
                    "name": context.name,
                    "uid": context.identity.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        **body,
    }
