"""Every name that is part of the API: group, labels, annotations, ports, and what the children are called.

Children's names are built here and nowhere else: a selector, an address and a manifest must agree.
"""

from __future__ import annotations

import re
from typing import Final

from gym_servers.stack.settings import CONTROL_PORT as CONTROL_PORT
from gym_servers.stack.settings import DATA_PORT as DATA_PORT
from gym_servers.stack.spec import ENGINE as ENGINE

GROUP: Final = "gymops.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
CATEGORY: Final = "gym"

STACK_KIND: Final = "GymStack"
STACK_PLURAL: Final = "gymstacks"
CHECKPOINT_KIND: Final = "GymCheckpoint"
CHECKPOINT_PLURAL: Final = "gymcheckpoints"
SCHEDULE_KIND: Final = "GymCheckpointSchedule"
SCHEDULE_PLURAL: Final = "gymcheckpointschedules"
RESTORE_KIND: Final = "GymRestore"
RESTORE_PLURAL: Final = "gymrestores"

STACK_LABEL: Final = f"{GROUP}/stack"
STACK_UID_LABEL: Final = f"{GROUP}/stack-uid"
SERVER_LABEL: Final = f"{GROUP}/server"
CELL_LABEL: Final = f"{GROUP}/cell"
"""On what belongs to one cell. Pods do not carry it: their StatefulSet numbers them (see POD_INDEX_LABEL)."""
POD_INDEX_LABEL: Final = "apps.kubernetes.io/pod-index"
POD_NAME_LABEL: Final = "statefulset.kubernetes.io/pod-name"
NAME_LABEL: Final = "app.kubernetes.io/name"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"

OPERATOR_NAME: Final = "gym-operator"
SERVER_NAME: Final = "gym-server"
ENGINE_NAME: Final = "gym-engine"
ENGINE_COMPONENT: Final = "engine"

APPLIED_DIGEST: Final = f"{GROUP}/applied-digest"
"""Annotation: digest of the manifest that the operator applied last."""
CONFIG_DIGEST: Final = f"{GROUP}/config-digest"
"""Annotation of a pod: digest of the settings it was started with."""
TEMPLATE_DIGEST: Final = f"{GROUP}/template-digest"
"""Annotation of a pod: digest of the template that it was made from."""

SCHEDULE_LABEL: Final = f"{GROUP}/schedule"
SCHEDULE_UID_LABEL: Final = f"{GROUP}/schedule-uid"
"""On what a schedule has made. The UID is what counts: another schedule may have the same name later."""
SCHEDULED_AT: Final = f"{GROUP}/scheduled-at"
"""Annotation of a GymCheckpoint that a schedule has made: the time it is for."""

DRILL_LABEL: Final = f"{GROUP}/drill-of"
"""On what a drill has made: the stack whose checkpoint it tries."""
DRILL_ID: Final = f"{GROUP}/drill-id"
"""Annotation beside it: which drill that was, so that no other's is taken for one's own."""

FINALIZER: Final = f"{GROUP}/finalizer"
DATA_FINALIZER: Final = f"{GROUP}/checkpoint-data"
"""On a GymCheckpoint whose data is to go with it, and on nothing else."""

DATA_PORT_NAME: Final = "data"
CONTROL_PORT_NAME: Final = "control"
ENGINE_PORT: Final = 8000
ENGINE_PORT_NAME: Final = "engine"
"""Not `data`: the servers' policy would let all of the stack's pods reach it."""
HEALTH_PORT: Final = 8080
"""Where the operator answers /healthz."""

CONTROL_TOKEN_KEY: Final = "control-token"
COOKIE_SECRET_KEY: Final = "cookie-secret"
PREVIOUS_TOKEN_KEY: Final = "control-token-previous"
"""Present while the control token is being rotated: good beside the new one."""
CA_KEY: Final = "ca.crt"
"""Of the Secret with the authorities of an S3 endpoint."""


def workload(stack: str, server: str) -> str:
    """The StatefulSet of a server, and its headless Service."""
    return f"{stack}-{server}"


def data_service(stack: str, server: str, cell: int | str) -> str:
    """The Service through which peers reach a server of one cell. `cell` may be a placeholder."""
    return f"{stack}-{server}-{cell}"


def pod(stack: str, server: str, cell: int) -> str:
    """The pod of a server in a cell, as its StatefulSet calls it."""
    return f"{stack}-{server}-{cell}"


def config_map(stack: str) -> str:
    """The ConfigMap with the settings of every server."""
    return f"{stack}-config"


def control_secret(stack: str) -> str:
    """The Secret with the control token and the cookie secret."""
    return f"{stack}-control"


def network_policy(stack: str) -> str:
    """The NetworkPolicy of the stack's pods."""
    return f"{stack}-servers"


def disruption_budget(stack: str) -> str:
    """The PodDisruptionBudget of the stack's pods."""
    return f"{stack}-servers"


def engine(stack: str) -> str:
    """The Deployment of the stack's engine, its Service and its NetworkPolicy."""
    return f"{stack}-{ENGINE}"


def scheduled_checkpoint(schedule: str, time: str) -> str:
    """The GymCheckpoint of one scheduled time; `time` as the API writes it. One time, one name: it is taken once."""
    return f"{schedule}-{re.sub('[^0-9]', '', time)}"
