"""The few calls the operator makes to the API server, on plain JSON objects.

    KubeError                any refusal, or no answer (status 0)
     ├─ NotFound             there is no such object
     ├─ Conflict             the object changed meanwhile, exists already, or is another one
     └─ Expired              what happened since then is not known any more

Every call is one try: callers are level-driven and come again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLError
from typing import Any, Final, NamedTuple, Protocol

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.rest import RESTResponse
from kubernetes.aio.config import list_kube_config_contexts, load_kube_config
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import SERVICE_HOST_ENV_NAME, load_incluster_config
from yaml import YAMLError

from gym_operator.api import names

REQUEST_SECONDS: Final = 15.0
CONNECT_SECONDS: Final = 5.0
TIMEOUT: Final = aiohttp.ClientTimeout(total=REQUEST_SECONDS, connect=CONNECT_SECONDS)
PAGE: Final = 50
"""Objects in one answer to a list: of thousands, not all are held in memory at once."""
CHANGES_SECONDS: Final = 1
"""How long the API server goes on telling what happened: the shortest there is, since it is asked for the past."""
POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod reads which namespace it is in."""

Body = dict[str, Any]


class KubeError(Exception):
    """The API server refused, or did not answer (`status` 0). The text is for people."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NotFound(KubeError):
    """There is no such object."""


class Conflict(KubeError):
    """The object changed since it was read, exists already, or has another UID."""


class Expired(KubeError):
    """What happened since a resource version is not known any more: list everything."""


class KubeConfigError(Exception):
    """No way to the API server is configured; the message says what to set."""


class Resource(NamedTuple):
    """A kind of object, as the API server's paths name it."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"/namespaces/{namespace}" if namespace else ""
        return "/".join(part for part in (f"{root}{within}/{self.plural}", name, subresource) if part)


class Listing(NamedTuple):
    """All objects of a kind, and the resource version at which that is all there was."""

    items: Sequence[Body]
    version: int


class Changes(NamedTuple):
    """What happened to objects of a kind, in order, each as it is after it and whether it is gone; and the resource
    version up to which that is all."""

    told: Sequence[tuple[bool, Body]]
    version: int


STACKS: Final = Resource(names.GROUP, names.VERSION, names.STACK_PLURAL)
CHECKPOINTS: Final = Resource(names.GROUP, names.VERSION, names.CHECKPOINT_PLURAL)
SCHEDULES: Final = Resource(names.GROUP, names.VERSION, names.SCHEDULE_PLURAL)
RESTORES: Final = Resource(names.GROUP, names.VERSION, names.RESTORE_PLURAL)
PODS: Final = Resource("", "v1", "pods")
NODES: Final = Resource("", "v1", "nodes")
NAMESPACES: Final = Resource("", "v1", "namespaces")
SECRETS: Final = Resource("", "v1", "secrets")
EVENTS: Final = Resource("", "v1", "events")
CHILDREN: Final[Mapping[str, Resource]] = {
    "ConfigMap": Resource("", "v1", "configmaps"),
    "PodDisruptionBudget": Resource("policy", "v1", "poddisruptionbudgets"),
    "Deployment": Resource("apps", "v1", "deployments"),
    "NetworkPolicy": Resource("networking.k8s.io", "v1", "networkpolicies"),
    "Secret": SECRETS,
    "Service": Resource("", "v1", "services"),
    "StatefulSet": Resource("apps", "v1", "statefulsets"),
}


class Kube(Protocol):
    """What the rest of the operator needs of the API server. Every method raises KubeError."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body: ...

    async def list_all(self, resource: Resource, namespace: str | None, selector: str = "") -> Listing:
        """All objects as of now; `namespace` None means everywhere."""
        ...

    def pages(self, resource: Resource, namespace: str | None, selector: str = "") -> AsyncIterator[Listing]:
        """As `list_all`, a part at a time; all parts are of one version."""
        ...

    async def changes(self, resource: Resource, namespace: str | None, since: int, selector: str = "") -> Changes:
        """What happened since a resource version: costs nothing where nothing did. Raises Expired."""
        ...

    async def create(self, resource: Resource, namespace: str, body: Body) -> Body: ...

    async def replace(self, resource: Resource, namespace: str, body: Body) -> Body: ...

    async def replace_status(self, resource: Resource, namespace: str, body: Body) -> Body:
        """Replace the status alone; `metadata.resourceVersion` says on which state it rests."""
        ...

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str | None = None, grace_seconds: int | None = None
    ) -> None:
        """Delete; with `uid` only the object that has it, else Conflict."""
        ...


@dataclass(frozen=True)
class ApiKube:
    """The API server, through one shared client."""

    client: ApiClient
    refused: Callable[[str, int], None] = lambda verb, status: None
    """Told of every refusal and of every request without an answer: HTTP verb, and status or 0."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body:
        return await self._call("GET", resource.path(namespace, name))

    async def list_all(self, resource: Resource, namespace: str | None, selector: str = "") -> Listing:
        items: list[Body] = []
        version = 0
        async for page in self.pages(resource, namespace, selector):
            items += page.items
            version = page.version
        return Listing(items, version)

    async def pages(self, resource: Resource, namespace: str | None, selector: str = "") -> AsyncIterator[Listing]:
        first = [("limit", str(PAGE)), *([("labelSelector", selector)] if selector else [])]
        query = first
        while True:
            found = await self._call("GET", resource.path(namespace), query=query)
            metadata = found["metadata"]
            yield Listing(found["items"], int(metadata["resourceVersion"]))
            if not metadata.get("continue"):
                return
            query = [*first, ("continue", metadata["continue"])]

    async def try_list(self, resource: Resource, namespace: str | None) -> None:
        """Nothing, where it may be listed. Raises KubeError."""
        await self._call("GET", resource.path(namespace), query=[("limit", "1")])

    async def changes(self, resource: Resource, namespace: str | None, since: int, selector: str = "") -> Changes:
        query = [
            *(("watch", "true"), ("allowWatchBookmarks", "true"), ("resourceVersion", str(since))),
            *(("timeoutSeconds", str(CHANGES_SECONDS)), *([("labelSelector", selector)] if selector else [])),
        ]
        return _changes(await self._answer("GET", resource.path(namespace), query=query), since)

    async def create(self, resource: Resource, namespace: str, body: Body) -> Body:
        return await self._call("POST", resource.path(namespace), body)

    async def replace(self, resource: Resource, namespace: str, body: Body) -> Body:
        return await self._call("PUT", resource.path(namespace, body["metadata"]["name"]), body)

    async def replace_status(self, resource: Resource, namespace: str, body: Body) -> Body:
        return await self._call("PUT", resource.path(namespace, body["metadata"]["name"], "status"), body)

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str | None = None, grace_seconds: int | None = None
    ) -> None:
        options: Body = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        await self._call("DELETE", resource.path(namespace, name), options)

    async def log(
        self, namespace: str, pod: str, container: str, options: Mapping[str, str], *, follow: bool = False
    ) -> AsyncIterator[bytes]:
        """The lines of a container's log, without their ends; with `follow` also those to come, until it ends.
        `options` as the API server names them, such as tailLines. Raises KubeError."""
        query = [("container", container), ("follow", str(follow).lower()), *options.items()]
        timeout = aiohttp.ClientTimeout(total=None if follow else REQUEST_SECONDS, connect=CONNECT_SECONDS)
        path = PODS.path(namespace, pod, "log")
        response = await self._response("GET", path, query=query, timeout=timeout, accept="*/*")
        begun = b""
        with self._answering("GET"):
            async for data in response.response.content.iter_any():
                *lines, begun = (begun + data).split(b"\n")
                for line in lines:
                    yield line
        if begun:
            yield begun

    async def close(self) -> None:
        await self.client.close()  # type: ignore[no-untyped-call]

    async def _call(
        self, method: str, path: str, body: Body | None = None, query: list[tuple[str, str]] | None = None
    ) -> Body:
        found: Body = json.loads(await self._answer(method, path, body, query))
        return found

    async def _answer(
        self, method: str, path: str, body: Body | None = None, query: list[tuple[str, str]] | None = None
    ) -> bytes:
        response = await self._response(method, path, body, query)
        with self._answering(method):
            data: bytes = await response.read()  # type: ignore[no-untyped-call]
        return data

    async def _response(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        query: list[tuple[str, str]] | None = None,
        timeout: aiohttp.ClientTimeout = TIMEOUT,
        accept: str = "application/json",
    ) -> RESTResponse:
        """An answer that has begun, and is no refusal. Raises KubeError."""
        headers = {"Accept": accept, "Content-Type": "application/json"}
        serialized = await self.client.param_serialize(
            method, path, query_params=query, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        with self._answering(method):
            response = await self.client.call_api(*serialized, _request_timeout=timeout)
            refusal: bytes | None = await response.read() if response.status >= 400 else None  # type: ignore[no-untyped-call]
        if refusal is not None:
            self.refused(method, response.status)
            raise _refusal(response.status, refusal)
        return response

    @contextmanager
    def _answering(self, method: str) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.refused(method, 0)
            raise KubeError(0, f"the API server does not answer: {type(error).__name__}") from error


async def connect(
    kubeconfig: str | None,
    refused: Callable[[str, int], None] = lambda verb, status: None,
    *,
    context: str | None = None,
) -> ApiKube:
    """A client for the cluster this runs in, or for the one a kubeconfig names. Raises KubeConfigError."""
    configuration = await load_configuration(kubeconfig, context)
    with _configuring():  # it reads the certificates
        return ApiKube(ApiClient(configuration), refused)


async def load_configuration(kubeconfig: str | None, context: str | None = None) -> Configuration:
    """Address and credentials: from `kubeconfig` if given, else of the pod's service account, else of the user.
    `context` is one of the kubeconfig's, by default the one that it names as current.

    Raises KubeConfigError.
    """

    configuration = Configuration()
    with _configuring():
        if _is_inside(kubeconfig, context):
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, context=context, client_configuration=configuration
            )
    return configuration


def namespace_of(kubeconfig: str | None, context: str | None) -> str:
    """The namespace that goes with these credentials: of the pod, or of the kubeconfig's context.

    Raises KubeConfigError.
    """
    with _configuring():
        if _is_inside(kubeconfig, context):
            return POD_NAMESPACE.read_text().strip()
        contexts, current = list_kube_config_contexts(kubeconfig)  # type: ignore[no-untyped-call]
    chosen = next((each for each in contexts if each["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")


def _is_inside(kubeconfig: str | None, context: str | None) -> bool:
    """Whether the pod's own service account is meant."""
    return kubeconfig is None and context is None and SERVICE_HOST_ENV_NAME in os.environ


@contextmanager
def _configuring() -> Iterator[None]:
    try:
        yield
    except (ConfigException, OSError, YAMLError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, (SSLError, TypeError, ValueError)):
            reason = f"the kubeconfig or a certificate in it cannot be read: {type(error).__name__}"
        # Where an entry lacks something, the library shows all that it has: a token too.
        reason = re.sub(r"\{.*\}", "{...}", reason)
        raise KubeConfigError(f"no cluster is configured: {reason}; give --kubeconfig or set KUBECONFIG") from error


def _changes(lines: bytes, since: int) -> Changes:
    """Read what a watch has told. Raises Expired, KubeError."""
    told, version = [], since
    for line in lines.splitlines():
        event = json.loads(line)
        body = event["object"]
        if event["type"] == "ERROR":
            raise _refusal(int(body.get("code") or 0), json.dumps(body).encode())
        version = max(version, int(body["metadata"]["resourceVersion"]))
        if event["type"] != "BOOKMARK":
            told.append((event["type"] == "DELETED", body))
    return Changes(told, version)


def _refusal(status: int, data: bytes) -> KubeError:
    try:
        message = str(json.loads(data).get("message") or "")
    except (ValueError, AttributeError):
        message = ""
    text = f"the API server refused ({status}): {message[:500] or 'without a reason'}"
    match status:
        case 404:
            return NotFound(status, text)
        case 409:
            return Conflict(status, text)
        case 410:
            return Expired(status, text)
        case _:
            return KubeError(status, text)
