"""Where models lie: what the engine and the model server, which needs their tokenizers, have in common."""

from __future__ import annotations

from typing import Any

from gym_operator.rules.workloads.common import StackContext
from gym_servers.stack.inference import MODELS_FOLDER


def models_environment(context: StackContext) -> list[dict[str, Any]]:
    """What the libraries that download models are told."""
    vllm = context.spec.inference.vllm if context.spec.inference else None
    if vllm is None or vllm.claim is None:
        return []
    return [{"name": "HF_HOME", "value": f"{MODELS_FOLDER}/.cache"}]


def models_secrets(context: StackContext) -> dict[str, Any]:
    """The part of a container that has the Secret's keys as variables."""
    vllm = context.spec.inference.vllm if context.spec.inference else None
    return {"envFrom": [{"secretRef": {"name": vllm.secret}}]} if vllm is not None and vllm.secret else {}


def models_volumes(context: StackContext) -> list[dict[str, Any]]:
    vllm = context.spec.inference.vllm if context.spec.inference else None
    if vllm is None or vllm.claim is None:
        return []
    return [{"name": "models", "persistentVolumeClaim": {"claimName": vllm.claim}}]


def models_mounts(context: StackContext) -> list[dict[str, Any]]:
    return [{"name": volume["name"], "mountPath": MODELS_FOLDER} for volume in models_volumes(context)]
