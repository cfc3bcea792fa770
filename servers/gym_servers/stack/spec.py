"""GymStack.spec: what a user writes to get a set of servers whose rollouts survive the death of their pods.

The one description of it: the CRD is generated from these types, the operator and the local runner read
manifests through them, and `render` turns them into the settings of each process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gym_servers.stack.durations import Age, Duration, DurationOrZero
from gym_servers.stack.inference import InferenceSpec
from gym_servers.stack.parts import ContainerResources, ObjectName
from gym_servers.stack.settings import ParticipantKind, describe
from gym_servers.stack.wire import (
    CLUSTER_REQUIRED,
    FREE_OBJECT,
    LABEL_HINT,
    LABEL_PATTERN,
    LOCAL_ONLY,
    WireModel,
    list_map,
    matches,
    rule,
    with_rules,
)

COLLECTION = "collection"
ENGINE = "vllm"
"""What the engine of the inference block is called, after the stack's name."""
MAX_CELLS = 64
MAX_WORKLOAD_NAME = 52
"""Longest `<stack>-<server>`: a StatefulSet puts its name and a hash into a label of 63 characters."""

ModelT = TypeVar("ModelT", bound=BaseModel)
ServerKind = Literal["environment", "model", "agent", "resources"]

_ONE_OF_EACH = {
    "environment": "exactly one server of kind environment is needed, "
    "such as name: env, kind: environment, server: single-agent-turn",
    "model": "exactly one server of kind model is needed, such as name: policy, kind: model, server: scripted",
    "agent": "exactly one server of kind agent is needed, such as name: agent, kind: agent, server: simple-agent",
}
_RESOURCES = "at least one server of kind resources is needed, such as name: counter, kind: resources"
_RESERVED = "the name collection belongs to the driver that the collection block adds: choose another name"
_CELL_LIKE = "a server's name cannot end in a dash and a number, which is how cells are told apart"
_NEEDS_STORAGE = "checkpoints need a place: set storage.s3.bucket, or turn them off with enabled: false"
_CUTS_NEED_CHECKPOINTS = (
    "inference.vllm.cutAtEngine is for checkpoints: leave it out, or set checkpoints.enabled to true"
)
_ENGINE_NAME = f"with inference, the name {ENGINE} belongs to the engine: choose another for the server"
_ENGINE_UNUSED = "inference.vllm is for a model server with server: vllm: change the server, or leave inference out"
_NO_ENGINE = (
    "where is the engine? Set inference.vllm, and the operator runs one, or config.base_url of server {name}, such "
    "as http://vllm:8000"
)
_TWO_ENGINES = (
    "config.base_url of server {name} names another engine than the one of inference, which nobody would use: leave "
    "config.base_url out, or inference"
)
_URI_STORAGE = "s3:// URIs of the collection need checkpoints.storage.s3, which says how to reach S3"
_OUTPUT_S3 = "output must be an s3:// URI: what a pod writes to its own disk dies with the pod"
_CA_SECRET = "caSecret is for an endpoint of your own: set endpoint to an address that begins with https://"
_KMS_KEY = "kmsKeyID is for keys of a key management service: set type to SSE-KMS, or leave kmsKeyID out"
_NAME_LENGTH = f"<stack>-<server> names pods and is at most {MAX_WORKLOAD_NAME} characters: choose shorter names"
_STACK_NAME = "a stack's name has only lower-case letters, digits and dashes, and begins with a letter"
_LABEL_KEY = "a label's key is a name such as app, or a domain and a name such as example.com/app"
_LABEL_VALUE = (
    "a label's value has at most 63 letters, digits, dashes, dots and underscores, and a letter or digit at both ends"
)
_LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"

NAME_RULES = [
    rule(f"self.metadata.name.matches(r'{LABEL_PATTERN}')", _STACK_NAME),
    rule(
        f"self.spec.servers.all(s, size(self.metadata.name) + 1 + size(s.name) <= {MAX_WORKLOAD_NAME})",
        _NAME_LENGTH,
    ),
    rule(
        f"!has(self.spec.collection) || size(self.metadata.name) + {1 + len(COLLECTION)} <= {MAX_WORKLOAD_NAME}",
        _NAME_LENGTH + " (the collection block adds a server named collection)",
    ),
]
"""Rules over a stack's name and spec together, for the root of the CRD; `check_stack_name` is their twin."""

StorageUri = Annotated[
    str,
    StringConstraints(max_length=1024),
    matches(r"^(s3://[a-z0-9][-a-z0-9.]*[a-z0-9]/.+|[^:]+)$", "write s3://bucket/key, or a path"),
]


class SpecError(ValueError):
    """A stack's manifest cannot be used; the message names every wrong field and says what to write."""


def parsed(model: type[ModelT], document: Any, what: str = "spec") -> ModelT:
    """Read a part of a manifest, called `what`, as it stands there. Raises SpecError."""
    try:
        return model.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise SpecError(f"{what} is not valid: {describe(error)}") from error


class ServerSpec(WireModel):
    """One server of the stack."""

    model_config = with_rules(
        rule(f"self.name != '{COLLECTION}'", _RESERVED), rule("!self.name.matches(r'-[0-9]+$')", _CELL_LIKE)
    )

    name: Annotated[str, StringConstraints(max_length=30), matches(LABEL_PATTERN, LABEL_HINT)]
    """Name of the server, unique in the stack; its peers and its records know it by this name."""
    kind: ServerKind
    """What the server takes part as."""
    server: Annotated[
        str,
        StringConstraints(max_length=200),
        matches(
            r"^[A-Za-z_][-A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?$",
            "name a server of the image, such as simple-agent, or write package.module:Class",
        ),
    ]
    """A server that the image brings, such as simple-agent, or package.module:Class of your own image."""
    config: Annotated[dict[str, Any], Field(default_factory=dict, max_length=64, json_schema_extra=FREE_OBJECT)]
    """The server's own settings; "{cell}" in a text stands for the number of the cell. Not for secrets. At most 960
    KiB, that of all servers together."""
    resources: ContainerResources | None = None
    """Compute resources of the server's container."""

    @model_validator(mode="after")
    def _name_is_free(self) -> Self:
        if self.name == COLLECTION:
            raise _problem(_RESERVED)
        if re.search(r"-[0-9]+$", self.name):
            raise _problem(_CELL_LIKE)
        return self


class CollectionSpec(WireModel):
    """The driver: sends every task to the environment and writes one row per rollout."""

    model_config = with_rules(rule("self.output.startsWith('s3://')", _OUTPUT_S3))

    tasks: StorageUri
    """Where the tasks are, one JSON object a line: s3://bucket/key, or a path inside the image."""
    output: StorageUri
    """Where the rows go: s3://bucket/prefix."""
    repeats: int = Field(1, ge=1, le=10_000)
    """Rollouts per task."""
    concurrency: int = Field(64, ge=1, le=10_000)
    """Rollouts under way at the same time."""
    max_failures: int = Field(3, ge=1, le=100)
    """How often one rollout is tried before its row says that it failed."""
    resources: ContainerResources | None = None
    """Compute resources of the driver's container."""


class S3EncryptionSpec(WireModel):
    """How objects are encrypted at rest."""

    model_config = with_rules(rule("!has(self.kmsKeyID) || self.type == 'SSE-KMS'", _KMS_KEY))

    type: Literal["SSE-S3", "SSE-KMS"]
    """SSE-S3: with keys of the storage server. SSE-KMS: with a key of its key management service."""
    kms_key_id: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = Field(
        None, alias="kmsKeyID"
    )
    """The key for SSE-KMS, such as its ARN; without it, the one that the service has for S3."""

    @model_validator(mode="after")
    def _key_is_used(self) -> Self:
        if self.kms_key_id is not None and self.type != "SSE-KMS":
            raise _problem(_KMS_KEY)
        return self


class S3Spec(WireModel):
    """An S3 bucket."""

    model_config = with_rules(
        rule("!has(self.caSecret) || (has(self.endpoint) && self.endpoint.startsWith('https://'))", _CA_SECRET)
    )

    bucket: Annotated[
        str,
        StringConstraints(max_length=1024),  # with its prefix, by mistake, so that the refusal says what to do
        matches(r"^[a-z0-9][-a-z0-9.]*[a-z0-9]$", "write the bucket's name alone; what follows it goes into prefix"),
        matches(r"^.{0,63}$", "a bucket's name has at most 63 characters"),
    ]
    """Name of the bucket, without a prefix."""
    prefix: Annotated[
        str,
        StringConstraints(max_length=512),
        matches(
            r"^([-A-Za-z0-9._=]+(/[-A-Za-z0-9._=]+)*)?$",
            "write folders with single slashes between them and none at the ends, such as team/run-1",
        ),
    ] = ""
    """Folder in the bucket, without slashes at its ends. Below it every stack has one, named by its UID."""
    endpoint: (
        Annotated[
            str,
            StringConstraints(max_length=512),
            matches(r"^https?://[^/]+$", "write http:// or https://, a host and a port, and nothing after it"),
        ]
        | None
    ) = None
    """Address of an S3 server that is not AWS, such as http://minio.storage:9000."""
    region: Annotated[
        str,
        StringConstraints(max_length=64),
        matches(r"^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$", "write a region's name, such as eu-west-1 or RegionOne"),
    ] = "us-east-1"
    """Region of the bucket."""
    addressing_style: Literal["path", "virtual", "auto"] = "auto"
    """Whether the bucket's name is part of the path or of the host name."""
    credentials_secret: ObjectName | None = None
    """Secret of the same namespace with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Without it,
    the role of the pods' service account is used; the local runner uses its own environment."""
    ca_secret: ObjectName | None = None
    """Secret of the same namespace whose key ca.crt holds, in PEM form, the authorities that the endpoint's
    certificate is checked against. The local runner takes the file that GYM_S3_CA_FILE names."""
    encryption: S3EncryptionSpec | None = None
    """How what is written is encrypted at rest; without it, as the bucket says."""

    @model_validator(mode="after")
    def _has_a_certificate(self) -> Self:
        if self.ca_secret is not None and not (self.endpoint or "").startswith("https://"):
            raise _problem(_CA_SECRET)
        return self


class StorageSpec(WireModel):
    """Where checkpoints are kept."""

    model_config = with_rules(rule("has(self.s3)", "storage needs s3: set storage.s3.bucket"))

    s3: S3Spec | None = None
    """A bucket."""
    directory: Annotated[
        str | None, StringConstraints(min_length=1, max_length=1024), Field(json_schema_extra=LOCAL_ONLY)
    ] = None
    """A folder, for the local runner only: pods share no disk."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.s3 is None) == (self.directory is None):
            raise _problem("storage needs exactly one of s3 and directory")
        return self

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Read it as it stands in a manifest. Raises SpecError."""
        return parsed(cls, document, "storage")


class CheckpointsSpec(WireModel):
    """How rollouts are checkpointed."""

    model_config = with_rules(rule("!self.enabled || has(self.storage)", _NEEDS_STORAGE))

    enabled: bool = True
    """Without checkpoints the servers behave as if the feature did not exist; a death starts over."""
    storage: StorageSpec | None = None
    """Where checkpoints are kept. Also says how the collection reaches its s3:// URIs."""
    prepare_timeout: Duration = "60s"
    """How long rollouts have to reach a point from which they can continue."""
    commit_timeout: Duration = "120s"
    """How long the servers have to write their records."""
    cell_order: Literal["OneByOne", "Together"] = "OneByOne"
    """OneByOne checkpoints one cell after the other, so that most of the stack never pauses; Together checkpoints all
    cells at once."""
    restart_blockers_after: int = Field(3, ge=0, le=100)
    """A rollout that kept so many checkpoints in a row from being taken is restarted under its next attempt, which an
    event and the status say; 0 for never. Give prepareTimeout more than the longest step that a checkpoint waits for,
    or rollouts that only take their time are restarted too."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.enabled and self.storage is None:
            raise _problem(_NEEDS_STORAGE)
        return self


class RecoverySpec(WireModel):
    """What happens when a server dies."""

    policy: Literal["Restore", "Restart", "Manual"] = "Restore"
    """Restore continues from the newest checkpoint; Restart begins every unfinished rollout again; Manual brings
    fresh servers up and waits until people decide: by another policy, or by a GymRestore. What was stopped or moved
    on purpose goes on by itself in any case."""
    max_checkpoint_age: Age | None = None
    """After a death nothing older than this is restored, counted from its publication, such as 2h: unfinished
    rollouts begin again then. Without it any age will do."""
    backoff_limit: int = Field(5, ge=0, le=1000)
    """Recoveries in a row, without a published checkpoint or a finished row between them, before the stack
    gives up."""
    code_mismatch: Literal["Refuse", "Accept"] = "Refuse"
    """What to do where the newest checkpoint was written by other code: by other server classes, in a newer record
    format, or by other servers than the spec has now. Refuse: the cell waits and says what differs, until the spec is
    put right. Accept: the servers try the records, and where they do not take them an older checkpoint is tried, and
    at last the input."""


class ScaleDownSpec(WireModel):
    """How cells go when there are to be fewer of them."""

    drain_timeout: DurationOrZero = "5m"
    """How long a cell that is to go finishes the rollouts it has begun, beginning no other, before a last checkpoint
    stops it. 0s stops it at once."""


class PullSecret(WireModel):
    """A Secret of the same namespace."""

    name: ObjectName
    """Name of the Secret."""


class PodSelector(WireModel):
    """Pods of the stack's namespace, by their labels."""

    match_labels: Annotated[
        dict[str, Annotated[str, StringConstraints(max_length=63), matches(rf"^({_LABEL_NAME})?$", _LABEL_VALUE)]],
        Field(min_length=1, max_length=16),
    ]
    """Labels that a pod must have, all of them, such as app: trainer."""

    @model_validator(mode="after")
    def _keys_are_labels(self) -> Self:
        # Not in the CRD: a key of a map has no bound there, so that no rule over it would be cheap enough.
        pattern = rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL_NAME}"
        if not all(re.fullmatch(pattern, key) for key in self.match_labels):
            raise _problem(_LABEL_KEY)
        return self


class AccessSpec(WireModel):
    """Who drives the rollouts, where that is not the stack itself."""

    driver_selector: PodSelector | None = None
    """Pods that may call the servers' data ports beside the stack's own, such as those of a trainer. Without it
    nobody else may, where the cluster enforces network policies."""
    attempt_floor: bool = True
    """on: after a recovery, work under an attempt below the cell's is refused, also of rollouts that are new. off:
    for a driver that cannot learn the cell's attempt; then a rollout's own later attempts alone keep its earlier ones
    out."""


class StackSpec(WireModel):
    """The servers of a stack, how they are driven, checkpointed and recovered."""

    model_config = with_rules(
        *(rule(f"self.servers.exists_one(s, s.kind == '{kind}')", message) for kind, message in _ONE_OF_EACH.items()),
        rule("self.servers.exists(s, s.kind == 'resources')", _RESOURCES),
        # The output of a collection is always on S3 there, so the place must be known.
        rule("!has(self.collection) || has(self.checkpoints.storage)", _URI_STORAGE),
        rule(f"!has(self.inference) || !self.servers.exists(s, s.name == '{ENGINE}')", _ENGINE_NAME),
        rule(
            "!has(self.inference) || self.servers.exists(s, s.kind == 'model' && s.server == 'vllm')", _ENGINE_UNUSED
        ),
        rule(
            "!has(self.inference) || !self.inference.vllm.cutAtEngine || self.checkpoints.enabled",
            _CUTS_NEED_CHECKPOINTS,
        ),
    )

    image: Annotated[
        str | None, StringConstraints(min_length=1, max_length=512), Field(json_schema_extra=CLUSTER_REQUIRED)
    ] = None
    """Image that all servers run. The local runner has no use for it."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the servers' image is pulled; IfNotPresent if not given."""
    image_pull_secrets: Annotated[
        list[PullSecret], Field(default_factory=list, max_length=8, json_schema_extra=list_map("name"))
    ]
    """Secrets for the image's registry."""
    service_account_name: ObjectName | None = None
    """Service account of the pods: where a cloud role for S3 is attached. Its token is not mounted."""
    cells: int = Field(1, ge=1, le=MAX_CELLS)
    """Independent copies of all servers. Each is checkpointed, fails and recovers on its own."""
    scale_down: ScaleDownSpec = Field(default_factory=ScaleDownSpec, json_schema_extra={"default": {}})
    """How cells go when there are to be fewer of them."""
    servers: Annotated[list[ServerSpec], Field(min_length=1, max_length=16, json_schema_extra=list_map("name"))]
    """The servers: one environment, one model, one agent, and one or more of kind resources."""
    inference: InferenceSpec | None = None
    """An engine for the model server, run beside the servers. Without it the engine is somebody else's, and the model
    server's config says where it is."""
    collection: CollectionSpec | None = None
    """A driver inside the stack. Without it somebody else sends the rollouts."""
    checkpoints: CheckpointsSpec
    """How rollouts are checkpointed."""
    recovery: RecoverySpec = Field(default_factory=RecoverySpec, json_schema_extra={"default": {}})
    """What happens when a server dies."""
    access: AccessSpec = Field(default_factory=AccessSpec, json_schema_extra={"default": {}})
    """Who drives the rollouts, where that is not the stack itself."""
    suspend: bool = False
    """Stops all servers; a stack that is switched on again continues from its newest checkpoint."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise _problem("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        kinds = Counter(server.kind for server in self.servers)
        for kind, message in _ONE_OF_EACH.items():
            if kinds[kind] != 1:  # type: ignore[index]
                yield message
        if not kinds["resources"]:
            yield _RESOURCES
        names = Counter(server.name for server in self.servers)
        yield from (f"two servers are named {name}" for name, count in names.items() if count > 1)
        yield from self._inference_problems()
        uris = (self.collection.tasks, self.collection.output) if self.collection else ()
        if self.s3 is None and any(uri.startswith("s3://") for uri in uris):
            yield _URI_STORAGE

    def _inference_problems(self) -> Iterator[str]:
        # What is said of base_url is not in the CRD: a server's config is its own, and rules cannot look into it.
        served = [server for server in self.servers if server.kind == "model" and server.server == "vllm"]
        if self.inference is None:
            yield from (_NO_ENGINE.format(name=s.name) for s in served if not s.config.get("base_url"))
            return
        if not served:
            yield _ENGINE_UNUSED
        yield from (_TWO_ENGINES.format(name=server.name) for server in served if "base_url" in server.config)
        if any(server.name == ENGINE for server in self.servers):
            yield _ENGINE_NAME
        if self.inference.vllm.cut_at_engine and not self.checkpoints.enabled:
            yield _CUTS_NEED_CHECKPOINTS

    @property
    def s3(self) -> S3Spec | None:
        """The bucket, where there is one."""
        return self.checkpoints.storage.s3 if self.checkpoints.storage else None

    def participants(self) -> tuple[Participant, ...]:
        """Every process of a cell: the servers as written, then the driver if there is one."""
        servers = tuple(Participant(s.name, s.kind, s.server, s.config, s.resources) for s in self.servers)
        if self.collection is None:
            return servers
        driver = Participant(COLLECTION, "collection", COLLECTION, resources=self.collection.resources)
        return (*servers, driver)


@dataclass(frozen=True)
class Participant:
    """One process of a cell, whether written as a server or added by the collection block."""

    name: str
    kind: ParticipantKind
    server: str
    config: Mapping[str, Any] = field(default_factory=dict)
    resources: ContainerResources | None = None


def parse_spec(document: Any) -> StackSpec:
    """Read a `spec` as it stands in a manifest. Raises SpecError."""
    return parsed(StackSpec, document)


def check_stack_name(name: str, spec: StackSpec) -> None:
    """Raise SpecError if the names of the stack's workloads cannot be built from `name`."""
    if not re.fullmatch(LABEL_PATTERN, name):
        raise SpecError(_STACK_NAME)
    if any(len(f"{name}-{participant.name}") > MAX_WORKLOAD_NAME for participant in spec.participants()):
        raise SpecError(_NAME_LENGTH)


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("stack", message)
