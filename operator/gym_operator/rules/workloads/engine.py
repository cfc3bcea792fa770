"""The engine of a stack's inference block: a Deployment with a Service, and who may reach it.

It belongs to the stack and to no cell: what replaces a cell's processes leaves it alone, so that a model that took
minutes to load is there when they come back.
"""

from __future__ import annotations

import json
from typing import Any, Final

from gym_operator.api import names
from gym_operator.rules.workloads.common import Manifest, StackContext, child, server_labels, server_selector
from gym_operator.rules.workloads.models import models_environment, models_mounts, models_secrets, models_volumes
from gym_operator.rules.workloads.pods import (
    CONTAINER,
    SECRETS_FOLDER,
    container_security,
    pod_security,
    token_environment,
)
from gym_operator.rules.workloads.s3_files import READABLE, s3_environment, s3_mounts, s3_volumes
from gym_servers.stack.inference import VllmSpec
from gym_servers.stack.render import s3_settings

MIDDLEWARE: Final = "gym_servers.worker.middleware.GenerationCut"
LOADING_SECONDS: Final = 3600
"""How long a model may take to be downloaded and loaded."""
TERMINATION_GRACE_SECONDS: Final = 30


def engine_children(context: StackContext, *, running: bool) -> tuple[Manifest, ...]:
    """`<stack>-vllm`: NetworkPolicy, Service and Deployment; none without an inference block. Without `running` it
    keeps no pods."""
    if context.spec.inference is None:
        return ()
    vllm = context.spec.inference.vllm
    return (_policy(context), _service(context), _deployment(context, vllm, running=running))


def _labels(context: StackContext) -> dict[str, str]:
    return {
        **server_labels(context, names.ENGINE),
        names.NAME_LABEL: names.ENGINE_NAME,
        names.COMPONENT_LABEL: names.ENGINE_COMPONENT,
    }


def _policy(context: StackContext) -> Manifest:
    """Its API takes no password: only the stack's model servers may reach it."""
    model = {names.STACK_UID_LABEL: context.identity.uid, names.COMPONENT_LABEL: "model"}
    return child(
        context,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        names.engine(context.name),
        _labels(context),
        spec={
            "podSelector": {"matchLabels": server_selector(context, names.ENGINE)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": model}}],
                    "ports": [{"protocol": "TCP", "port": names.ENGINE_PORT_NAME}],
                }
            ],
        },
    )


def _service(context: StackContext) -> Manifest:
    port = {"name": names.ENGINE_PORT_NAME, "port": names.ENGINE_PORT, "targetPort": names.ENGINE_PORT_NAME}
    return child(
        context,
        "v1",
        "Service",
        names.engine(context.name),
        _labels(context),
        spec={
            "selector": server_selector(context, names.ENGINE),
            "ports": [{**port, "protocol": "TCP", "appProtocol": "http"}],
        },
    )


def _deployment(context: StackContext, vllm: VllmSpec, *, running: bool) -> Manifest:
    return child(
        context,
        "apps/v1",
        "Deployment",
        names.engine(context.name),
        _labels(context),
        spec={
            "replicas": vllm.replicas if running else 0,
            # There may be no devices for one more. What its generations had is continued by the next engine.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": LOADING_SECONDS,
            "selector": {"matchLabels": server_selector(context, names.ENGINE)},
            "template": {"metadata": {"labels": _labels(context)}, "spec": _pod(context, vllm)},
        },
    )


def _pod(context: StackContext, vllm: VllmSpec) -> dict[str, Any]:
    spec = context.spec
    control = {"secretName": names.control_secret(context.name), "defaultMode": READABLE}
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": TERMINATION_GRACE_SECONDS,
        "securityContext": pod_security(),
        "containers": [_container(context, vllm)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            # What the processes of an engine with several devices exchange is larger than a runtime's 64 MiB.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *models_volumes(context),
            *([{"name": "secrets", "secret": control}, *s3_volumes(context)] if vllm.cut_at_engine else []),
        ],
    }
    if vllm.node_selector:
        pod["nodeSelector"] = dict(vllm.node_selector)
    if vllm.tolerations:
        pod["tolerations"] = [each.document() for each in vllm.tolerations]
    if spec.service_account_name and vllm.cut_at_engine:
        pod["serviceAccountName"] = spec.service_account_name
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in spec.image_pull_secrets]
    return pod


def _container(context: StackContext, vllm: VllmSpec) -> dict[str, Any]:
    # The middleware remembers in one process: vLLM starts one for each data-parallel rank, unless it is told.
    middleware = [f"--middleware={MIDDLEWARE}", "--api-server-count=1"] if vllm.cut_at_engine else []
    secrets = [{"name": "secrets", "mountPath": SECRETS_FOLDER, "readOnly": True}, *s3_mounts(context)]
    return {
        "name": CONTAINER,
        "image": vllm.image,
        "imagePullPolicy": vllm.image_pull_policy,
        "command": ["vllm", "serve"],
        "args": [vllm.model, "--host=0.0.0.0", f"--port={names.ENGINE_PORT}", *middleware, *vllm.args],
        "env": [
            # Its user has no name in the image, and no folder that can be written to but these.
            {"name": "USER", "value": "gym"},
            {"name": "HOME", "value": "/tmp"},
            *models_environment(context),
            *(_cut_environment(context) if vllm.cut_at_engine else ()),
        ],
        **models_secrets(context),
        "ports": [{"name": names.ENGINE_PORT_NAME, "containerPort": names.ENGINE_PORT, "protocol": "TCP"}],
        "startupProbe": {**_health(), "periodSeconds": 5, "failureThreshold": LOADING_SECONDS // 5},
        "readinessProbe": {**_health(), "periodSeconds": 5, "timeoutSeconds": 5},
        "livenessProbe": {**_health(), "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "resources": vllm.resources.document() if vllm.resources else {},
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *models_mounts(context),
            *(secrets if vllm.cut_at_engine else ()),
        ],
    }


def _cut_environment(context: StackContext) -> list[dict[str, Any]]:
    """What the middleware is told: the storage that it has in common with the model servers, and the token."""
    s3 = context.spec.s3
    assert s3 is not None  # the spec demands checkpoints, and they demand a storage
    where = "/".join(part for part in (f"s3://{s3.bucket}", s3.prefix) if part)
    settings = s3_settings(s3).model_dump(mode="json", exclude_defaults=True)
    return [
        {"name": "GYM_CUT_STORAGE", "value": where},
        {"name": "GYM_CUT_S3", "value": json.dumps(settings, sort_keys=True)},
        *token_environment(),
        *s3_environment(context),
    ]


def _health() -> dict[str, Any]:
    return {"httpGet": {"path": "/health", "port": names.ENGINE_PORT_NAME}}
