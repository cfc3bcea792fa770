"""The pod of a server: one container that runs `gym-servers serve`, without any right it does not need."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from gym_operator.api import names
from gym_operator.rules.workloads.common import Manifest, StackContext, server_labels
from gym_operator.rules.workloads.config import (
    CELLS_FILE,
    SETTINGS_FOLDER,
    settings_file,
    settings_text,
    stack_settings,
)
from gym_operator.rules.workloads.drift import digest
from gym_operator.rules.workloads.models import (
    models_environment,
    models_mounts,
    models_secrets,
    models_volumes,
)
from gym_operator.rules.workloads.s3_files import READABLE, s3_environment, s3_mounts, s3_volumes
from gym_servers.stack.durations import parse_duration
from gym_servers.stack.render import follows_cells, uses_engine, uses_storage
from gym_servers.stack.settings import AWAIT_FINAL
from gym_servers.stack.spec import Participant, StackSpec

USER: Final = 65532
CONTAINER: Final = "server"
SECRETS_FOLDER: Final = "/etc/gym-secrets"
TERMINATION_GRACE_SECONDS: Final = 10
"""Enough to close connections."""
LOADING_SECONDS: Final = 1800
"""How long a server may take until it listens: a tokenizer comes from a hub, a class of the user's reads its data."""
FINAL_SECONDS: Final = 20
"""For what is around a last checkpoint: to see that the pod is to go, to publish, and to park sessions."""


def pod_security() -> dict[str, Any]:
    """As the restricted standard wants it of a pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        # Makes mounted secrets readable for the process and for nobody else.
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """As the restricted standard wants it of a container, and a root file system that is never written to."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_template(context: StackContext, participant: Participant) -> Manifest:
    """The pod template of a server's StatefulSet."""
    settings = stack_settings(context)[participant.name]
    spec = context.spec
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": termination_grace(spec),
        "securityContext": pod_security(),
        "containers": [_container(context, participant)],
        "volumes": _volumes(context, participant),
    }
    if spec.service_account_name:
        pod["serviceAccountName"] = spec.service_account_name
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in spec.image_pull_secrets]
    template: Manifest = {
        "metadata": {
            "labels": {
                **server_labels(context, participant.name),
                names.COMPONENT_LABEL: participant.kind,
            },
            "annotations": {names.CONFIG_DIGEST: digest(settings_text(settings))},
        },
        "spec": pod,
    }
    template["metadata"]["annotations"][names.TEMPLATE_DIGEST] = _digest_of(template)
    return template


def template_digest(context: StackContext, participant: Participant) -> str:
    """What the pods of a server carry that were made from its template as it stands."""
    found: str = pod_template(context, participant)["metadata"]["annotations"][names.TEMPLATE_DIGEST]
    return found


def termination_grace(spec: StackSpec) -> int:
    """How long a pod of this stack may take to end, in seconds: for a last checkpoint, where there are any. A process
    that no checkpoint is taken of ends long before."""
    checkpoints = spec.checkpoints
    if not checkpoints.enabled:
        return TERMINATION_GRACE_SECONDS
    last = parse_duration(checkpoints.prepare_timeout) + parse_duration(checkpoints.commit_timeout)
    return math.ceil(last) + FINAL_SECONDS


def _digest_of(template: Manifest) -> str:
    """Of all that a process would notice: how long it may take to end is nothing to replace it for."""
    pod = {name: value for name, value in template["spec"].items() if name != "terminationGracePeriodSeconds"}
    return digest(json.dumps({**template, "spec": pod}, sort_keys=True))


def _container(context: StackContext, participant: Participant) -> dict[str, Any]:
    resources = participant.resources.document() if participant.resources else {}
    stuck = {"terminationGracePeriodSeconds": TERMINATION_GRACE_SECONDS}  # no checkpoint comes of it
    return {
        "name": CONTAINER,
        "image": context.spec.image,
        "imagePullPolicy": context.spec.image_pull_policy,
        "command": [
            "gym-servers",
            "serve",
            "--settings",
            f"{SETTINGS_FOLDER}/{settings_file(participant.name)}",
        ],
        "env": _environment(context, participant),
        **(models_secrets(context) if uses_engine(participant, context.spec) else {}),
        "ports": [
            {"name": names.DATA_PORT_NAME, "containerPort": names.DATA_PORT, "protocol": "TCP"},
            {"name": names.CONTROL_PORT_NAME, "containerPort": names.CONTROL_PORT, "protocol": "TCP"},
        ],
        # Recovery ends when peers can be reached again, so readiness is looked at as often as Kubernetes can.
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 2},
        # The others begin after it, so it is looked at as often.
        "startupProbe": {
            **_probe("/livez"),
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": LOADING_SECONDS,
            **stuck,
        },
        # A restart by the kubelet costs a recovery: only a process that is stuck for a minute is worth it.
        "livenessProbe": {
            **_probe("/livez"),
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
            **stuck,
        },
        "resources": resources,
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS_FOLDER, "readOnly": True},
            {"name": "secrets", "mountPath": SECRETS_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *(s3_mounts(context) if uses_storage(participant, context.spec) else ()),
            *(models_mounts(context) if uses_engine(participant, context.spec) else ()),
        ],
    }


def _environment(context: StackContext, participant: Participant) -> list[dict[str, Any]]:
    environment: list[dict[str, Any]] = [
        {
            "name": "GYM_CELL",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{names.POD_INDEX_LABEL}']"}},
        },
        *token_environment(),
        {"name": "GYM_COOKIE_SECRET_FILE", "value": f"{SECRETS_FOLDER}/{names.COOKIE_SECRET_KEY}"},
    ]
    if context.spec.checkpoints.enabled:
        environment.append({"name": AWAIT_FINAL, "value": "true"})
    if uses_storage(participant, context.spec):
        environment += s3_environment(context)
    if uses_engine(participant, context.spec):
        environment += models_environment(context)
    return environment


def token_environment() -> list[dict[str, Any]]:
    """Where a process finds the stack's control tokens."""
    return [
        {"name": "GYM_CONTROL_TOKEN_FILE", "value": f"{SECRETS_FOLDER}/{names.CONTROL_TOKEN_KEY}"},
        {"name": "GYM_CONTROL_TOKEN_PREVIOUS_FILE", "value": f"{SECRETS_FOLDER}/{names.PREVIOUS_TOKEN_KEY}"},
    ]


def _volumes(context: StackContext, participant: Participant) -> list[dict[str, Any]]:
    files = [settings_file(participant.name)]
    if follows_cells(participant, context.spec):
        files.append(CELLS_FILE)
    return [
        {
            "name": "settings",
            "configMap": {
                "name": names.config_map(context.name),
                "items": [{"key": file, "path": file} for file in files],
            },
        },
        {"name": "secrets", "secret": {"secretName": names.control_secret(context.name), "defaultMode": READABLE}},
        {"name": "tmp", "emptyDir": {}},
        *(s3_volumes(context) if uses_storage(participant, context.spec) else ()),
        *(models_volumes(context) if uses_engine(participant, context.spec) else ()),
    ]


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": names.DATA_PORT_NAME}}
