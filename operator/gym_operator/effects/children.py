"""Keeps the objects a stack is made of as its spec says: made where absent, replaced where their digest differs."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from gym_operator.api import names
from gym_operator.api.conditions import ConditionReason
from gym_operator.effects.kube import CHILDREN, Body, Conflict, Kube, KubeError, NotFound
from gym_operator.rules.spec_check import Problem
from gym_operator.rules.workloads import (
    Manifest,
    StackContext,
    build_children,
    build_control_secret,
    is_foreign,
    needs_update,
)

LISTED: Final = ("StatefulSet", "Service", "Deployment", "NetworkPolicy")
"""Kinds of which each server, or an engine, has some; what is taken out of the spec leaves them behind."""


FORBIDDEN: Final = 403


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
    wanted, present = build_children(context, running=running), await _listed(kube, context)
    for manifest in wanted:
        await _ensure(kube, context, manifest, present.get(_place(manifest)))
    if not context.guarded:
        await _unguard(kube, context)
    await _prune(kube, context, wanted, present)


async def _unguard(kube: Kube, context: StackContext) -> None:
    """Nobody moves the cells of a stack any more, so evictions are let through again."""
    resource, name = CHILDREN["PodDisruptionBudget"], names.disruption_budget(context.name)
    try:
        found = await kube.get(resource, context.identity.namespace, name)
        if not is_foreign(found, context.identity.uid):
            await kube.delete(resource, context.identity.namespace, name, found["metadata"]["uid"])
    except (NotFound, Conflict):
        pass
    except KubeError as error:
        if error.status != FORBIDDEN:  # whoever may not look has made none
            raise


async def _listed(kube: Kube, context: StackContext) -> dict[tuple[str, str], Body]:
    """The children there are of those kinds of which a stack has many: two requests in place of a dozen."""
    selector, found = f"{names.STACK_UID_LABEL}={context.identity.uid}", {}
    for kind in LISTED:
        listing = await kube.list_all(CHILDREN[kind], context.identity.namespace, selector)
        found.update({(kind, body["metadata"]["name"]): body for body in listing.items})
    return found


def _place(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


async def _ensure(kube: Kube, context: StackContext, manifest: Manifest, known: Body | None) -> None:
    namespace, (kind, name) = context.identity.namespace, _place(manifest)
    found, resource = known, CHILDREN[kind]
    if found is None and kind not in LISTED:
        with suppress(NotFound):
            found = await kube.get(resource, namespace, name)
    if found is None:
        try:
            await kube.create(resource, namespace, manifest)
            return
        except Conflict:  # somebody else's, or ours without its labels
            found = await kube.get(resource, namespace, name)
    _own(found, context, kind)
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


async def _prune(
    kube: Kube, context: StackContext, wanted: Sequence[Manifest], present: Mapping[tuple[str, str], Body]
) -> None:
    kept = {_place(manifest) for manifest in wanted}
    for (kind, name), found in present.items():
        still_needed = (found["metadata"].get("labels") or {}).get(names.SERVER_LABEL) in context.kept_servers
        if (kind, name) in kept or still_needed or is_foreign(found, context.identity.uid):
            continue
        with suppress(NotFound, Conflict):
            await kube.delete(CHILDREN[kind], context.identity.namespace, name, found["metadata"]["uid"])
