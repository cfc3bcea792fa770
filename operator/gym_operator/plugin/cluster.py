"""The user's way to the cluster: the calls that verbs make, in one namespace, with errors that say what to do."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from gym_operator.api import names
from gym_operator.effects.kube import (
    CHECKPOINTS,
    STACKS,
    Body,
    Conflict,
    Kube,
    KubeConfigError,
    KubeError,
    NotFound,
    Resource,
    connect,
    namespace_of,
)
from gym_operator.plugin.exits import NoAnswer, OutOfReach, Unusable
from gym_operator.plugin.views.text import some_of

CHOOSE: Final = "choose another cluster with --context; kubectl config get-contexts lists them"
LONGEST_TOLD: Final = 60
"""Characters of what is no name that an error repeats."""


class UserKube(Kube, Protocol):
    """What verbs need of the API server beyond what the operator does."""

    def log(
        self, namespace: str, pod: str, container: str, options: Mapping[str, str], *, follow: bool = False
    ) -> AsyncIterator[bytes]:
        """The lines of a container's log, with `follow` also those to come. Raises KubeError."""
        ...


@dataclass(frozen=True)
class Cluster:
    """One namespace as the user may see it. `wall` is the time, in Unix seconds. Every call raises OutOfReach where
    the API server does not answer or does not let the user, and Unusable where there is no such object."""

    kube: UserKube
    namespace: str
    wall: Callable[[], float] = time.time

    async def stack(self, name: str) -> Body:
        """A GymStack; where there is none of that name, the error names those there are."""
        return await self._named(STACKS, names.STACK_KIND, name)

    async def checkpoint(self, name: str) -> Body:
        """A GymCheckpoint, in the same way."""
        return await self._named(CHECKPOINTS, names.CHECKPOINT_KIND, name)

    async def find(self, resource: Resource, name: str) -> Body | None:
        """An object, None where there is none of that name. Raises Unusable also for what is no name."""
        check_name(resource.plural, name)
        with self._asking("get", resource):
            try:
                return await self.kube.get(resource, self.namespace, name)
            except NotFound:
                return None

    async def list(self, resource: Resource, selector: str = "") -> Sequence[Body]:
        with self._asking("list", resource):
            return (await self.kube.list_all(resource, self.namespace, selector)).items

    async def create(self, resource: Resource, kind: str, body: Body) -> Body:
        """Create an object of a kind of ours. Raises Unusable for a name that is taken."""
        name = body["metadata"]["name"]
        whole = {"apiVersion": names.API_VERSION, "kind": kind, **body}
        with self._asking("create", resource):
            try:
                return await self.kube.create(resource, self.namespace, whole)
            except Conflict as error:
                raise Unusable(f"{kind} {name} exists already: give another name with --name") from error

    async def delete(self, resource: Resource, name: str, uid: str) -> None:
        """Delete the object that has this UID; one that is gone, or another by now, is a success."""
        with self._asking("delete", resource):
            try:
                await self.kube.delete(resource, self.namespace, name, uid)
            except (NotFound, Conflict):
                return

    async def _named(self, resource: Resource, kind: str, name: str) -> Body:
        found = await self.find(resource, name)
        if found is not None:
            return found
        there = sorted(body["metadata"]["name"] for body in await self.list(resource))
        hint = f"there are {some_of(there)}" if there else "that namespace has none; choose another with -n"
        raise Unusable(f"no {kind} {name} in namespace {self.namespace}: {hint}")

    @contextmanager
    def _asking(self, verb: str, resource: Resource) -> Iterator[None]:
        try:
            yield
        except KubeError as error:
            raise refusal(error, verb, resource, self.namespace) from error


def check_name(of: str, name: str) -> None:
    """Raise Unusable for what no object is called: nothing else may become part of a request's path."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
        told = repr(name if len(name) <= LONGEST_TOLD else f"{name[:LONGEST_TOLD]}...")
        raise Unusable(f"{told} is no name of {of}: write lower-case letters, digits, dashes and dots")


def refusal(error: KubeError, verb: str, resource: Resource, namespace: str) -> OutOfReach | Unusable:
    """What to tell people of an answer of the API server that is no success."""
    kind = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
    match error.status:
        case 0:
            return NoAnswer(f"{error}: see whether kubectl get --raw=/readyz answers, or {CHOOSE}")
        case 401:
            return OutOfReach(f"the API server does not know who you are (401): log in again, or {CHOOSE}")
        case 403:
            return OutOfReach(
                f"you may not {verb} {kind} in namespace {namespace}: ask for that right, or choose another "
                "namespace with -n"
            )
        case 404:
            return OutOfReach(f"this cluster has no {kind}: install the operator with its CRDs, or {CHOOSE}")
        case status if status >= 500:
            return NoAnswer(str(error))
        case _:
            return Unusable(str(error))


@asynccontextmanager
async def connected(kubeconfig: str | None, context: str | None, namespace: str | None) -> AsyncIterator[Cluster]:
    """The cluster that the user's configuration names, in the namespace of its context unless another is given.

    Raises OutOfReach.
    """
    try:
        kube = await connect(kubeconfig, context=context)
        found = namespace_of(kubeconfig, context) if namespace is None else namespace
        check_name("a namespace", found)
    except KubeConfigError as error:
        raise OutOfReach(f"{error}, or {CHOOSE}") from error
    try:
        yield Cluster(kube, found)
    finally:
        await kube.close()
