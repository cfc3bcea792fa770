"""The Kubernetes API as the demonstration uses it: the official client, plain dictionaries, errors in one line."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from gym_kit.errors import KitError

GROUP, VERSION = "gymops.dev", "v1alpha1"
POLL_SECONDS = 0.1

Object = dict[str, Any]


class Kube:
    """One cluster and namespace."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        # The client's own types describe its model classes; plain dictionaries, which it takes as well, they refuse.
        load: Any = config.new_client_from_config
        self._api: Any = load(str(kubeconfig))
        self.namespace = namespace
        self._core: Any = client.CoreV1Api(self._api)
        self._custom: Any = client.CustomObjectsApi(self._api)

    def create_namespace(self) -> None:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self._core.create_namespace({"metadata": {"name": self.namespace, "labels": labels}})

    def delete_namespace(self) -> None:
        self._core.delete_namespace(self.namespace)

    def namespace_is_gone(self) -> bool:
        return not self._core.list_namespace(field_selector=f"metadata.name={self.namespace}").items

    def create_secret(self, name: str, values: dict[str, str]) -> None:
        self._core.create_namespaced_secret(self.namespace, {"metadata": {"name": name}, "stringData": values})

    def stack(self, name: str) -> Object:
        return self.get("GymStack", name)

    def checkpoint(self, name: str) -> Object:
        return self.get("GymCheckpoint", name)

    def take_checkpoint(self, name: str, stack: str, **spec: Any) -> None:
        self.create("GymCheckpoint", name, {"stackRef": {"name": stack}, **spec})

    def create(self, kind: str, name: str, spec: Object) -> None:
        """Create an object of one of our kinds."""
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, "spec": spec}
        self._custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, _plural(kind), body)

    def get(self, kind: str, name: str) -> Object:
        found: Object = self._custom.get_namespaced_custom_object(GROUP, VERSION, self.namespace, _plural(kind), name)
        return found

    def all_of(self, kind: str) -> dict[str, Object]:
        """All objects of one of our kinds in the namespace, by name."""
        found = self._custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace, _plural(kind))
        return {each["metadata"]["name"]: each for each in found["items"]}

    def pods(self, selector: str, namespace: str | None = None) -> list[Object]:
        found = self._core.list_namespaced_pod(namespace or self.namespace, label_selector=selector)
        return [self._api.sanitize_for_serialization(pod) for pod in found.items]

    def delete(self, pods: list[Object], *, at_once: bool = False) -> None:
        """Delete pods, as `kubectl delete` does or, `at_once`, without grace; one that is gone already is fine."""
        grace = {"grace_period_seconds": 0} if at_once else {}
        for pod in pods:
            try:
                self._core.delete_namespaced_pod(pod["metadata"]["name"], pod["metadata"]["namespace"], **grace)
            except ApiException as error:
                if error.status != 404:
                    raise

    def read_pod_url(self, pod: str, port: int, path: str) -> bytes:
        """GET from a pod through the API server's proxy: works wherever the API server is reachable."""
        response = self._core.connect_get_namespaced_pod_proxy_with_path(
            f"{pod}:{port}", self.namespace, path, _preload_content=False
        )
        data: bytes = response.data
        return data

    def events(self) -> list[Object]:
        found = self._core.list_namespaced_event(self.namespace)
        return [self._api.sanitize_for_serialization(event) for event in found.items]


def _plural(kind: str) -> str:
    return kind.lower() + "s"


def ready(pod: Object) -> bool:
    """Whether a pod serves: Ready, and not on its way out."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    serves = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return serves and not pod["metadata"].get("deletionTimestamp")


def wait(what: str, condition: Callable[[], Any], seconds: float, tick: Callable[[], None] = lambda: None) -> Any:
    """Poll until `condition` gives something true, and give it; `tick` is called between polls.

    An API server that does not answer for a moment is asked again. Raises KitError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    problem = ""
    while True:
        try:
            if (found := condition()) not in (None, False, [], {}):
                return found
        except ApiException as error:
            problem = f" (last answer of the API: {error.status} {error.reason})"
        except HTTPError as error:
            problem = f" (the API server does not answer: {type(error).__name__})"
        if time.monotonic() > deadline:
            raise KitError(f"{what}: not in {seconds:.0f} s{problem}")
        tick()
        time.sleep(POLL_SECONDS)
