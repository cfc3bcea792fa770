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
from gym_servers.stack.durations import parse_duration
from gym_servers.stack.render import uses_storage
from gym_servers.stack.settings import AWAIT_FINAL
from gym_servers.stack.spec import Participant, StackSpec
from gym_servers.storage.s3_access import CA_FILE, CREDENTIALS_FOLDER

USER: Final = 65532
CONTAINER: Final = "server"
SECRETS_FOLDER: Final = "/etc/gym-secrets"
CREDENTIALS: Final = "s3-credentials"
AUTHORITIES: Final = "s3-authorities"
CREDENTIALS_MOUNT: Final = "/etc/gym-s3"
CA_MOUNT: Final = "/etc/gym-s3-ca"
READABLE: Final = 0o440
"""For the pod's group, which is the process's."""
TERMINATION_GRACE_SECONDS: Final = 10
"""Enough to close connections."""
FINAL_SECONDS: Final = 20
"""For what is around a last checkpoint: to see that the pod is to go, to publish, and to park sessions."""


def pod_template(context: StackContext, participant: Participant) -> Manifest:
    """The pod template of a server's StatefulSet."""
    settings = stack_settings(context)[participant.name]
    spec = context.spec
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": termination_grace(spec),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            # Makes the secrets below readable for the process and for nobody else.
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(context, participant)],
        "volumes": [*_volumes(context, participant), *_s3_volumes(context, participant)],
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
        "ports": [
            {"name": names.DATA_PORT_NAME, "containerPort": names.DATA_PORT, "protocol": "TCP"},
            {"name": names.CONTROL_PORT_NAME, "containerPort": names.CONTROL_PORT, "protocol": "TCP"},
        ],
        # Recovery ends when peers can be reached again, so readiness is looked at as often as Kubernetes can.
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 2},
        # A restart by the kubelet costs a recovery: only a process that is stuck for a minute is worth it.
        "livenessProbe": {
            **_probe("/livez"),
            "initialDelaySeconds": 15,
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
            # No checkpoint comes of what is stuck.
            "terminationGracePeriodSeconds": TERMINATION_GRACE_SECONDS,
        },
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS_FOLDER, "readOnly": True},
            {"name": "secrets", "mountPath": SECRETS_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *_s3_mounts(context, participant),
        ],
    }


def _environment(context: StackContext, participant: Participant) -> list[dict[str, Any]]:
    environment: list[dict[str, Any]] = [
        {
            "name": "GYM_CELL",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{names.POD_INDEX_LABEL}']"}},
        },
        {"name": "GYM_CONTROL_TOKEN_FILE", "value": f"{SECRETS_FOLDER}/{names.CONTROL_TOKEN_KEY}"},
        {"name": "GYM_CONTROL_TOKEN_PREVIOUS_FILE", "value": f"{SECRETS_FOLDER}/{names.PREVIOUS_TOKEN_KEY}"},
        {"name": "GYM_COOKIE_SECRET_FILE", "value": f"{SECRETS_FOLDER}/{names.COOKIE_SECRET_KEY}"},
    ]
    if context.spec.checkpoints.enabled:
        environment.append({"name": AWAIT_FINAL, "value": "true"})
    found = _s3_secrets(context, participant)
    if CREDENTIALS in found:
        environment.append({"name": CREDENTIALS_FOLDER, "value": CREDENTIALS_MOUNT})
    if AUTHORITIES in found:
        environment.append({"name": CA_FILE, "value": f"{CA_MOUNT}/{names.CA_KEY}"})
    return environment


def _volumes(context: StackContext, participant: Participant) -> list[dict[str, Any]]:
    files = [settings_file(participant.name)]
    if participant.kind == "collection":
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
    ]


# The Secrets for S3 are files and not variables: a pod sees files change, and a rotation costs no process.


def _s3_secrets(context: StackContext, participant: Participant) -> dict[str, str]:
    """The Secrets that this server's S3 client needs, by the name of their volume."""
    s3 = context.spec.s3
    if s3 is None or not uses_storage(participant, context.spec):
        return {}
    wanted = {CREDENTIALS: s3.credentials_secret, AUTHORITIES: s3.ca_secret}
    return {volume: secret for volume, secret in wanted.items() if secret}


def _s3_volumes(context: StackContext, participant: Participant) -> list[dict[str, Any]]:
    return [
        {"name": volume, "secret": {"secretName": secret, "defaultMode": READABLE}}
        for volume, secret in _s3_secrets(context, participant).items()
    ]


def _s3_mounts(context: StackContext, participant: Participant) -> list[dict[str, Any]]:
    places = {CREDENTIALS: CREDENTIALS_MOUNT, AUTHORITIES: CA_MOUNT}
    return [
        {"name": volume, "mountPath": places[volume], "readOnly": True}
        for volume in _s3_secrets(context, participant)
    ]


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": names.DATA_PORT_NAME}}
