"""What a demonstration run does, from its environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from gym_kit.cluster import Choice
from gym_kit.errors import KitError
from gym_servers.collection.tasks import parse_tasks
from gym_servers.participants.collection import TasksError

How = Literal["force", "delete", "upgrade"]
Kill = Literal["agent", "environment", "model", "resources", "collection", "all", "operator"]

# The chart's names for the demonstration's servers.
SERVER_OF: Mapping[str, str] = {
    "agent": "agent",
    "environment": "env",
    "model": "policy",
    "resources": "counter",
    "collection": "collection",
}


@dataclass(frozen=True)
class Options:
    """`kills`: how often the target is killed, each time after the stack runs again. `how`: its pods are deleted by
    force, or as people delete them; or all pods are replaced by a helm upgrade. `during`: at work, while a checkpoint
    is open, or while the recovery from a first kill runs. `policy`: who generates, the scripted engine or
    a real vLLM with the tiny model. `engine`: where that vLLM is, beside the cluster or in a pod that the operator
    runs."""

    cluster: Choice = "auto"
    kill: Kill = "agent"
    how: How = "force"
    rollouts: int = 64
    tasks: Path | None = None
    kills: int = 1
    policy: Literal["scripted", "vllm"] = "scripted"
    engine: Literal["beside", "pod"] = "beside"
    during: Literal["work", "checkpoint", "recovery"] = "work"
    keep: bool = False
    output: Path = Path("build/demo")

    @property
    def servers(self) -> list[str]:
        """The servers whose pods are killed; the operator's demonstration ends with the agent's."""
        if self.kill == "all":
            return list(SERVER_OF.values())
        return [SERVER_OF["agent" if self.kill == "operator" else self.kill]]


def from_environment(environment: Mapping[str, str]) -> Options:
    """Options from the variables that `make demo` takes. Raises KitError naming a wrong one."""

    def choice(name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = environment.get(name) or default
        if value not in allowed:
            raise KitError(f"{name}={value} is none of {', '.join(allowed)}")
        return value

    def number(name: str, default: int) -> int:
        value = environment.get(name) or str(default)
        if not value.isdigit() or value == "0":
            raise KitError(f"{name}={value} is not a number from 1")
        return int(value)

    tasks = Path(environment["TASKS"]) if environment.get("TASKS") else None
    if tasks is not None:
        try:
            parse_tasks(tasks.read_bytes(), f"TASKS={tasks}")
        except OSError as error:
            raise KitError(f"TASKS={tasks} cannot be read: {error.strerror}") from error
        except TasksError as error:
            raise KitError(str(error)) from error
    policy = cast(Literal["scripted", "vllm"], choice("POLICY", "scripted", ("scripted", "vllm")))
    if policy == "vllm" and (tasks is not None or environment.get("ROLLOUTS")):
        raise KitError("POLICY=vllm has rows of its own, which its tiny model knows: leave TASKS and ROLLOUTS out")
    engine = cast(Literal["beside", "pod"], choice("ENGINE", "beside", ("beside", "pod")))
    if engine == "pod" and policy != "vllm":
        raise KitError("ENGINE=pod says where vLLM is: add POLICY=vllm")
    return Options(
        cluster=cast(Choice, choice("CLUSTER", "auto", get_args(Choice))),
        kill=cast(Kill, choice("KILL", "agent", get_args(Kill))),
        how=cast(How, choice("HOW", "force", get_args(How))),
        rollouts=number("ROLLOUTS", 64),
        tasks=tasks,
        kills=number("KILLS", 1),
        policy=policy,
        engine=engine,
        during=cast(
            Literal["work", "checkpoint", "recovery"], choice("DURING", "work", ("work", "checkpoint", "recovery"))
        ),
        keep=environment.get("KEEP", "") not in ("", "0"),
    )
