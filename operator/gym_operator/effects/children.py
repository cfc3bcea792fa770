"""Keeps the objects a stack is made of as its spec says: made where absent, replaced where their digest differs."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gym_operator.api import names
from gym_operator.api.conditions import ConditionReason
from gym_operator.effects.kube import CHILDREN, Body, Conflict, Kube, NotFound
from gym_operator.rules.spec_check import Problem
from gym_operator.rules.workloads import (
    Manifest,
    StackContext,
    build_children,
    build_control_secret,
    is_foreign,
    needs_update,
)

PRUNED: Final = ("StatefulSet", "Service")
"""Kinds of which a server taken out of the spec leaves objects behind."""


class ChildProblem(Exception):
    """A child is not as the stack needs it, and only a person can mend that; the message says how."""

    reason = ConditionReason.NAME_CONFLICT

    @property
    def problem(self) -> Problem:
        return Problem(self.reason, str(self))


class ForeignChild(ChildProblem):
    """A name that a child needs is taken by an object of somebody else."""


class SecretInvalid(ChildProblem):
    """Somebody has changed the Secret with the control token to what cannot be used."""

    reason = ConditionReason.CONTROL_SECRET_INVALID


class ControlTokens(NamedTuple):
    """What opens the control ports; `previous` is empty unless a rotation goes on."""

    current: str
    previous: str


async def ensure_secret(kube: Kube, context: StackContext) -> ControlTokens:
    """The stack's control tokens, out of its Secret, made if there is none. Raises ChildProblem, KubeError."""
    namespace, resource = context.identity.namespace, CHILDREN["Secret"]
    name = names.control_secret(context.name)
    try:
        found = await kube.get(resource, namespace, name)
    except NotFound:
        wanted = build_control_secret(context, secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        try:
            found = await kube.create(resource, namespace, wanted)
        except Conflict:
            found = await kube.get(resource, namespace, name)
    _own(found, context, "Secret")
    current = _decoded(found, names.CONTROL_TOKEN_KEY)
    if not current:
        raise SecretInvalid(
            f"Secret {name} has no {names.CONTROL_TOKEN_KEY} that is a text: put a random one there, and the one "
            f"before into {names.PREVIOUS_TOKEN_KEY} for a few minutes"
        )
    return ControlTokens(current, _decoded(found, names.PREVIOUS_TOKEN_KEY))


def _decoded(secret: Body, key: str) -> str:
    try:
        return base64.b64decode(secret["data"][key]).decode().strip()
    except (KeyError, TypeError, binascii.Error, UnicodeDecodeError):
        return ""


async def ensure_children(kube: Kube, context: StackContext, *, running: bool) -> None:
    """Create or replace what differs, and remove what the spec no longer names. Raises ForeignChild, KubeError."""
    wanted = build_children(context, running=running)
    for manifest in wanted:
        await _ensure(kube, context, manifest)
    await _prune(kube, context, wanted)


async def _ensure(kube: Kube, context: StackContext, manifest: Manifest) -> None:
    namespace, resource = context.identity.namespace, CHILDREN[manifest["kind"]]
    name = manifest["metadata"]["name"]
    try:
        found = await kube.get(resource, namespace, name)
    except NotFound:
        try:
            await kube.create(resource, namespace, manifest)
            return
        except Conflict:
            found = await kube.get(resource, namespace, name)
    _own(found, context, manifest["kind"])
    if needs_update(found, manifest):
        await kube.replace(resource, namespace, _over(found, manifest))


def _own(found: Body, context: StackContext, kind: str) -> None:
    if is_foreign(found, context.identity.uid):
        raise ForeignChild(
            f"{kind} {found['metadata']['name']} exists and belongs to something else; rename the stack or the "
            "server, or wait until what is left of a deleted stack is gone"
        )


def _over(found: Body, manifest: Manifest) -> dict[str, Any]:
    """The manifest as a replacement of what is there: on its version, with what the API server gave it."""
    metadata = {**manifest["metadata"], "resourceVersion": found["metadata"]["resourceVersion"]}
    replacement = {**manifest, "metadata": metadata}
    if manifest["kind"] == "Service":
        assigned = {key: found["spec"][key] for key in ("clusterIP", "clusterIPs") if key in found["spec"]}
        replacement["spec"] = {**assigned, **manifest["spec"]}
    return replacement


async def _prune(kube: Kube, context: StackContext, wanted: Sequence[Manifest]) -> None:
    kept = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted}
    selector = f"{names.STACK_UID_LABEL}={context.identity.uid}"
    for kind in PRUNED:
        listing = await kube.list_all(CHILDREN[kind], context.identity.namespace, selector)
        for found in listing.items:
            metadata = found["metadata"]
            if (kind, metadata["name"]) in kept or is_foreign(found, context.identity.uid):
                continue
            try:
                await kube.delete(CHILDREN[kind], context.identity.namespace, metadata["name"], metadata["uid"])
            except (NotFound, Conflict):
                continue
