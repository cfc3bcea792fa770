"""The cluster that is measured: stacks that ran once and are suspended, their finished checkpoints, and schedules
that do not fire meanwhile. Pure."""

from __future__ import annotations

from typing import Any, Final

from gym_operator.api import names
from gym_operator.api.checkpoint import CheckpointCell, CheckpointParticipant, CheckpointStatus
from gym_operator.api.conditions import Condition
from gym_operator.api.objects import format_time
from gym_operator.api.stack import CellStatus, LastCheckpoint, StackStatus
from gym_operator.rules.cell_record import to_document
from gym_servers.coordination.record import CellRecord, Choice, Pin, Recovery, Stage

NAMESPACE: Final = "default"
BUCKET: Final = "gym"
SECRET: Final = "s3-keys"
SERVERS: Final = (
    ("env", "environment", "single-agent-turn"),
    ("policy", "model", "scripted"),
    ("agent", "agent", "simple-agent"),
    ("counter", "resources", "counter"),
)
DIGEST: Final = "sha256:" + 64 * "a"
BEGAN: Final = 1_750_000_000
"""Unix seconds of the first checkpoint; each that follows is a minute younger."""

Body = dict[str, Any]


def stack_name(number: int) -> str:
    return f"stack-{number:04d}"


def stack(number: int, endpoint: str) -> Body:
    """A suspended stack."""
    servers: list[Body] = [{"name": name, "kind": kind, "server": server} for name, kind, server in SERVERS]
    servers[1]["config"] = {"base_url": "http://engine:8000"}
    where = {"bucket": BUCKET, "endpoint": endpoint, "addressingStyle": "path", "credentialsSecret": SECRET}
    spec = {
        "image": "bench:1",
        "servers": servers,
        "checkpoints": {"storage": {"s3": {**where, "prefix": "checkpoints"}}},
        "suspend": True,
    }
    return _object(names.STACK_KIND, stack_name(number), spec)


def stack_status(uid: str, newest: int) -> Body:
    """How the operator leaves a stack that died once, was continued, and was suspended."""
    choice = Choice(uri=_uri(uid, newest), digest=DIGEST, checkpoint_id=f"c{newest}", name=checkpoint_name(newest))
    record = CellRecord(
        stage=Stage.RUNNING,
        attempt=1,
        sequence=newest,
        pins={name: Pin(incarnation=f"{uid}/{name}", session=f"session-{name}") for name, _, _ in SERVERS},
        restore=choice,
        failures=-1,
        recoveries=[Recovery(attempt=1, reason="agent: OOMKilled", checkpoint=choice, started_at=BEGAN, seconds=4.2)],
    )
    last = LastCheckpoint(
        name=choice.name,
        id=choice.checkpoint_id,
        uri=choice.uri,
        digest=DIGEST,
        time=format_time(BEGAN + 60 * newest),
    )
    cell = CellStatus(index=0, phase="Suspended", attempt=1, record=to_document(record), last_checkpoint=last)
    return StackStatus(phase="Suspended", attempt=1, last_checkpoint=last, cells=(cell,)).document()


def schedule(number: int) -> Body:
    """For one of the stacks; its time has never come yet."""
    template = {"spec": {"stackRef": {"name": stack_name(number)}}}
    spec = {"schedule": "0 0 29 2 *", "keep": {"last": 10_000}, "template": template}
    return _object(names.SCHEDULE_KIND, f"schedule-{number:04d}", spec)


def checkpoint_name(number: int) -> str:
    return f"checkpoint-{number:05d}"


def checkpoint(number: int, stack: str, schedule_uid: str | None) -> Body:
    """A checkpoint of a stack, made by a schedule or by hand."""
    body = _object(names.CHECKPOINT_KIND, checkpoint_name(number), {"stackRef": {"name": stack}})
    if schedule_uid is not None:
        body["metadata"]["labels"] = {names.SCHEDULE_UID_LABEL: schedule_uid}
    return body


def checkpoint_status(number: int, stack_uid: str, endpoint: str) -> Body:
    """How the operator leaves a checkpoint that succeeded."""
    began = BEGAN + 60 * number
    participants = tuple(
        CheckpointParticipant(
            name=name,
            kind=kind,
            pod=f"{name}-0",
            pod_uid=f"{stack_uid}",
            session=f"session-{name}",
            phase="committed",
        )
        for name, kind, _ in SERVERS
    )
    uri = _uri(stack_uid, number)
    cell = CheckpointCell(
        **{"index": 0, "phase": "Succeeded", "attempt": 1, "uri": uri, "digest": DIGEST},
        **{"episodes": 64, "bytes": 1_000_000, "pause_seconds": 0.4, "participants": participants},
    )
    done = Condition(
        **{"type": "Succeeded", "status": "True", "reason": "Published", "message": "all records are durable"},
        **{"observed_generation": 1, "last_transition_time": format_time(began + 2)},
    )
    where = {"bucket": BUCKET, "endpoint": endpoint, "addressingStyle": "path", "credentialsSecret": SECRET}
    return CheckpointStatus(
        observed_generation=1,
        phase="Succeeded",
        reason="Published",
        checkpoint_id=f"c{number}",
        stack_uid=stack_uid,
        storage={"s3": {**where, "prefix": "checkpoints"}},
        uri=uri,
        digest=DIGEST,
        cells=(cell,),
        episodes=64,
        bytes=1_000_000,
        pause_seconds=0.4,
        start_time=format_time(began),
        completion_time=format_time(began + 2),
        conditions=(done,),
    ).document()


def _uri(stack_uid: str, number: int) -> str:
    return f"s3://{BUCKET}/checkpoints/{stack_uid}/0/checkpoints/000001-{number:06d}-c{number}"


def _object(kind: str, name: str, spec: Body) -> Body:
    return {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
