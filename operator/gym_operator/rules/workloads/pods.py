"""The pod of a server: one container that runs `gym-servers serve`, without any right it does not need."""

from __future__ import annotations

from typing import Any, Final

from gym_operator.api import names
from gym_operator.rules.workloads.common import Manifest, StackContext, server_labels
from gym_operator.rules.workloads.config import settings_file, settings_text, stack_settings
from gym_operator.rules.workloads.drift import digest
from gym_servers.stack.render import uses_storage
from gym_servers.stack.spec import Participant

USER: Final = 65532
CONTAINER: Final = "server"
SETTINGS_FOLDER: Final = "/etc/gym"
SECRETS_FOLDER: Final = "/etc/gym-secrets"
TERMINATION_GRACE_SECONDS: Final = 10
"""Enough to close connections. A death is recovered from a checkpoint, so there is nothing to wait for."""


def pod_template(context: StackContext, participant: Participant) -> Manifest:
    """The pod template of a server's StatefulSet."""
    settings = stack_settings(context)[participant.name]
    spec = context.spec
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": TERMINATION_GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            # Makes the secrets below readable for the process and for nobody else.
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(context, participant)],
        "volumes": _volumes(context, participant.name),
    }
    if spec.service_account_name:
        pod["serviceAccountName"] = spec.service_account_name
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in spec.image_pull_secrets]
    return {
        "metadata": {
            "labels": {
                **server_labels(context, participant.name),
                names.COMPONENT_LABEL: participant.kind,
            },
            "annotations": {names.CONFIG_DIGEST: digest(settings_text(settings))},
        },
        "spec": pod,
    }


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
        ],
    }


def _environment(context: StackContext, participant: Participant) -> list[dict[str, Any]]:
    environment: list[dict[str, Any]] = [
        {
            "name": "GYM_CELL",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{names.POD_INDEX_LABEL}']"}},
        },
        {"name": "GYM_CONTROL_TOKEN_FILE", "value": f"{SECRETS_FOLDER}/{names.CONTROL_TOKEN_KEY}"},
        {"name": "GYM_COOKIE_SECRET_FILE", "value": f"{SECRETS_FOLDER}/{names.COOKIE_SECRET_KEY}"},
    ]
    s3 = context.spec.s3
    if s3 is not None and s3.credentials_secret and uses_storage(participant, context.spec):
        environment += [
            {"name": key, "valueFrom": {"secretKeyRef": {"name": s3.credentials_secret, "key": key}}}
            for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        ]
    return environment


def _volumes(context: StackContext, server: str) -> list[dict[str, Any]]:
    file = settings_file(server)
    return [
        {
            "name": "settings",
            "configMap": {
                "name": names.config_map(context.name),
                "items": [{"key": file, "path": file}],
            },
        },
        {"name": "secrets", "secret": {"secretName": names.control_secret(context.name), "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {}},
    ]


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": names.DATA_PORT_NAME}}
