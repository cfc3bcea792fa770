"""GymStack.spec.inference: an engine that is run beside the servers, and outlives each of them."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gym_servers.stack.parts import ContainerResources, ObjectName
from gym_servers.stack.wire import WireModel, matches, rule, with_rules

MODELS_FOLDER: Final = "/models"
"""Where the claim is mounted, in the engine and in the model server."""

_OWN_OPTIONS = ("host", "port", "model", "api-server-count", "middleware", "api-key", "root-path", "ssl-keyfile")
_SHORT = "-asc"  # vLLM's for --api-server-count
_OWN_PATTERN = rf"^(--({'|'.join(option.replace('-', '[-_]') for option in _OWN_OPTIONS)})|{_SHORT})([= ].*)?$"
_OWN = (
    "the operator sets this option itself, or the servers rely on its default: leave --host, --port, --model, "
    "--api-server-count, --middleware, --api-key, --root-path and --ssl-keyfile out of args"
)
_BLANK_PATTERN = r"^-[^= \t\n]*[ \t\n]"
_BLANK = (
    "an item of args has a blank between an option and its value, which vLLM does not take: write an equals sign "
    "there, such as --max-model-len=16384"
)
_ONE_REPLICA = (
    "cutAtEngine needs replicas: 1, because a cut is asked of one engine: give the engine more devices by args, such "
    "as --tensor-parallel-size, or leave cutAtEngine out"
)


class Toleration(WireModel):
    """A taint that the engine's pods tolerate, as in any pod."""

    key: Annotated[str, StringConstraints(max_length=317)] | None = None
    """The taint's key, such as nvidia.com/gpu; without one, every taint with operator Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists: whatever its value."""
    value: Annotated[str, StringConstraints(max_length=63)] | None = None
    """The taint's value, for Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; without one, all of them."""


class VllmSpec(WireModel):
    """vLLM, as a Deployment of its own. A death of the model server, and a recovery, leave it alone."""

    model_config = with_rules(
        rule("!self.cutAtEngine || self.replicas == 1", _ONE_REPLICA),
        rule(f"!has(self.args) || !self.args.exists(a, a.matches(r'{_OWN_PATTERN}'))", _OWN),
        rule(f"!has(self.args) || !self.args.exists(a, a.matches(r'{_BLANK_PATTERN}'))", _BLANK),
    )

    image: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """Image with the program vllm, such as vllm/vllm-openai:v0.32.0. For cutAtEngine it needs our package too."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the engine's image is pulled; IfNotPresent if not given."""
    model: Annotated[
        str,
        StringConstraints(max_length=512),
        matches(r"^[A-Za-z0-9./_][-A-Za-z0-9./_]*$", "write a model's name, such as Qwen/Qwen3-8B, or a folder"),
    ]
    """The model, as `vllm serve` takes it: its name at a hub, or a folder, such as /models/mine on the claim."""
    args: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=1024)]],
        Field(default_factory=list, max_length=64),
    ]
    """Further options of `vllm serve`, such as --max-model-len=8192."""
    replicas: int = Field(1, ge=1, le=64)
    """Copies of the engine behind one address; 1 if not given."""
    resources: ContainerResources | None = None
    """Compute resources of an engine, such as limits of nvidia.com/gpu."""
    node_selector: Annotated[
        dict[str, Annotated[str, StringConstraints(max_length=63)]], Field(default_factory=dict, max_length=16)
    ]
    """Labels of the nodes it may run on."""
    tolerations: Annotated[list[Toleration], Field(default_factory=list, max_length=16)]
    """Taints of nodes that it tolerates."""
    claim: ObjectName | None = None
    """PersistentVolumeClaim of the same namespace, mounted at /models in the engine and in the model server: models
    lie there, and what is downloaded is kept there. Without it each new pod downloads anew."""
    secret: ObjectName | None = None
    """Secret of the same namespace whose keys become environment variables of the engine and of the model server,
    such as HF_TOKEN."""
    cut_at_engine: bool = False
    """The image has our package: checkpoints then cut generations inside the engine, which gets the stack's control
    token and the credentials of its storage, stops what a replaced attempt left behind, and tells which weights each
    token is of; false if not given."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.cut_at_engine and self.replicas != 1:
            raise PydanticCustomError("stack", _ONE_REPLICA)
        if any(re.fullmatch(_OWN_PATTERN, argument) for argument in self.args):
            raise PydanticCustomError("stack", _OWN)
        if any(re.match(_BLANK_PATTERN, argument) for argument in self.args):
            raise PydanticCustomError("stack", _BLANK)
        return self


class InferenceSpec(WireModel):
    """What generates, where the stack has it run."""

    vllm: VllmSpec
    """vLLM, as a Deployment and a Service <stack>-vllm that outlive the servers."""
