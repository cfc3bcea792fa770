"""The demonstration itself: collect, checkpoint, kill, continue, complete."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_kit.demo.engines import in_mid_generation
from gym_kit.demo.kube import Object, ready, wait
from gym_kit.demo.options import Options
from gym_kit.demo.stage import OPERATOR_NAMESPACE, STACK, Stage
from gym_kit.demo.table import Watch
from gym_kit.errors import KitError
from gym_operator.api.names import ENGINE
from gym_servers.protocol.identity import parse_key

START_SECONDS = 180.0
ENGINE_SECONDS = 900.0  # a pod with vLLM imports for minutes
CHECKPOINT_SECONDS = 120.0
RECOVERY_SECONDS = 180.0
COMPLETE_SECONDS = 600.0
UPGRADED_MEBIBYTES = 64  # the memory that servers ask for after a helm upgrade: little, and not what it was
A_LITTLE_WORK_SECONDS = 1.5  # after the checkpoint
A_LITTLE_WORK_TOKENS = (20, 120)  # of vLLM, whose 24 rollouts have some 2000
RANDOM_SECONDS = 2.0  # at most, before each kill
RECOVERY_RANDOM_SECONDS = 6.0  # a recovery takes about ten: pods end, start, are restored and resumed meanwhile
TERMINAL = ("Succeeded", "Failed")
OPERATOR = "app.kubernetes.io/name=gym-operator"


@dataclass
class Played:
    """What happened. `kills`: Unix times of deletes and upgrades with the attempt that was running then."""

    checkpoint: Object = field(default_factory=dict)
    kills: list[tuple[float, int]] = field(default_factory=list)
    interrupted: str = ""  # KILL=operator: how the checkpoint ended whose operator was killed
    bare_restart_seconds: float = 0.0
    stack: Object = field(default_factory=dict)


class Scenario:
    """Plays one demonstration on a stage."""

    def __init__(self, stage: Stage, options: Options, watch: Watch) -> None:
        self._stage, self._kube, self._options, self._watch = stage, stage.kube, options, watch
        self._shown = 0.0

    def play(self) -> Played:
        """Raises KitError where something does not happen in its time."""
        played = Played()
        self._install()
        self._watch.note("stack installed by helm; waiting for its pods")
        patience = ENGINE_SECONDS if self._options.engine == "pod" else START_SECONDS
        self._wait("rollouts under way", lambda: self._running() and self._at_work(), patience)
        if self._options.kill == "operator":
            played.interrupted = self._kill_operator_in_mid_checkpoint()
        with self._at_a_moment(0):
            played.checkpoint = self._checkpoint("demo-1")
        for number in range(self._options.kills):
            if number:
                self._wait("work of this attempt", self._generating, RECOVERY_SECONDS)
            self._kill(played, number)
        self._wait("every row", self._complete, COMPLETE_SECONDS)
        played.stack = self._kube.stack(STACK)
        return played

    # ---- steps --------------------------------------------------------------------------------------------

    @contextmanager
    def _at_a_moment(self, tokens: int) -> Iterator[None]:
        """While some generation is in its middle. The scripted engine is slow enough for that at any time; vLLM is
        held, after so many tokens more."""
        engine = self._stage.engine
        with nullcontext() if engine is None else in_mid_generation(engine, tokens):
            yield

    def _a_little_work(self) -> AbstractContextManager[None]:
        """There is something to lose and to do again, and no run kills at the same moment of the work."""
        if self._stage.engine is None:
            time.sleep(A_LITTLE_WORK_SECONDS + random.uniform(0.0, RANDOM_SECONDS))
        return self._at_a_moment(random.randint(*A_LITTLE_WORK_TOKENS))

    def _checkpoint(self, name: str) -> Object:
        self._kube.take_checkpoint(name, STACK)
        self._watch.note(f"GymCheckpoint {name} applied")
        found: Object = self._wait(f"checkpoint {name}", lambda: self._terminal(name), CHECKPOINT_SECONDS)
        status = found["status"]
        if status["phase"] != "Succeeded":
            raise KitError(f"checkpoint {name} failed: {status.get('reason')}: {status.get('message')}")
        self._watch.note(
            f"checkpoint {name} succeeded: {status.get('episodes')} episodes, {status.get('bytes')} bytes, "
            f"paused {status.get('pauseSeconds')} s"
        )
        return found

    def _kill(self, played: Played, number: int) -> None:
        attempt = self._attempt()
        if self._options.during == "checkpoint":
            name = f"open-{number}"
            self._kube.take_checkpoint(name, STACK)
            self._wait("an open checkpoint", lambda: self._phase(name) not in (None, "Pending"), CHECKPOINT_SECONDS)
            self._delete(played, attempt)
        else:
            with self._a_little_work():
                self._delete(played, attempt)
        if self._options.during == "recovery":
            self._wait("a recovery", lambda: self._attempt() > attempt, RECOVERY_SECONDS)
            time.sleep(random.uniform(0.0, RECOVERY_RANDOM_SECONDS))
            self._delete(played, self._attempt())
        self._wait("recovery", lambda: self._attempt() > attempt and self._running(), RECOVERY_SECONDS)
        self._watch.note(f"attempt {self._attempt()} runs")

    def _delete(self, played: Played, attempt: int) -> None:
        pods = [pod for server in self._options.servers for pod in self._kube.pods(_selector(STACK, server))]
        names = ", ".join(pod["metadata"]["name"] for pod in pods)
        played.kills.append((time.time(), attempt))
        match self._options.how:
            case "force":
                self._kube.delete(pods, at_once=True)
                self._watch.note(f"force-deleted {names}")
            case "delete":
                self._kube.delete(pods)
                self._watch.note(f"deleted {names}")
            case "upgrade":
                self._install(memory=f"{UPGRADED_MEBIBYTES + len(played.kills)}Mi")
                self._watch.note("every server has other resources by helm upgrade")

    def _install(self, memory: str | None = None) -> None:
        self._stage.install_stack(
            STACK, checkpoints=True, tasks="tasks.jsonl", concurrency=self._stage.expected, memory=memory
        )

    def _kill_operator_in_mid_checkpoint(self) -> str:
        name = "interrupted"
        pod = self._kube.pods(OPERATOR, OPERATOR_NAMESPACE)[0]
        process = container_process(pod["metadata"]["uid"], "gym-operator")
        self._kube.take_checkpoint(name, STACK)
        # Polled without a pause: a checkpoint of this size is open for less than a second.
        deadline = time.monotonic() + CHECKPOINT_SECONDS
        while self._phase(name) in (None, "Pending"):
            if time.monotonic() > deadline:
                raise KitError("the checkpoint was never begun")
        if process is not None:
            os.kill(process, signal.SIGKILL)
        else:
            self._kube.delete([pod], at_once=True)
        self._watch.note(f"operator killed while checkpoint {name} was {self._phase(name)}")
        ended: Object = self._wait("a terminal checkpoint", lambda: self._terminal(name), CHECKPOINT_SECONDS)
        self._wait("participants resumed", lambda: self._running() and self._resumed(), CHECKPOINT_SECONDS)
        phase = str(ended["status"]["phase"])
        self._watch.note(f"checkpoint {name} ended {phase}, all participants resumed")
        return phase

    def bare_restart(self) -> float:
        """Seconds from deleting all pods of a like stack without checkpointing, at once, until all serve again."""
        self._stage.install_stack("bare", checkpoints=False, tasks="one-task.jsonl", concurrency=1)
        selector = "gymops.dev/stack=bare"
        count = len(
            self._kube.pods(f"gymops.dev/stack={STACK},gymops.dev/server!={ENGINE}")
        )  # it has none of its own

        def all_ready(old: frozenset[str] = frozenset()) -> bool:
            pods = self._kube.pods(selector)
            fresh = [pod for pod in pods if pod["metadata"]["uid"] not in old]
            return len(fresh) == count and all(map(ready, fresh))

        wait("the bare stack", all_ready, START_SECONDS)
        pods = self._kube.pods(selector)
        started = time.monotonic()
        self._kube.delete(pods, at_once=True)
        old = frozenset(pod["metadata"]["uid"] for pod in pods)
        wait("the bare stack again", lambda: all_ready(old), START_SECONDS)
        seconds = time.monotonic() - started
        self._stage.uninstall_stack("bare")
        return seconds

    # ---- looks --------------------------------------------------------------------------------------------

    def _wait(self, what: str, condition: Any, seconds: float) -> Any:
        return wait(what, condition, seconds, self._show)

    def _show(self) -> None:
        if time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            self._watch.show(self._kube.stack(STACK))

    def _cell(self) -> Object:
        cells = (self._kube.stack(STACK).get("status") or {}).get("cells") or [{}]
        cell: Object = cells[0]
        return cell

    def _attempt(self) -> int:
        return int(self._cell().get("attempt", 0))

    def _running(self) -> bool:
        return self._cell().get("phase") == "Running"

    def _at_work(self) -> bool:
        """Every second rollout has a tool effect behind it: there is something to continue."""
        kinds = Counter(entry["kind"] for entry in self._stage.entries())
        return 2 * kinds["effect"] >= self._stage.expected

    def _generating(self) -> bool:
        """A model call was seen under the attempt that runs now."""
        return first_token(self._stage.entries(), 0.0, self._attempt()) is not None

    def _complete(self) -> bool:
        return bool((self._cell().get("collection") or {}).get("complete"))

    def _resumed(self) -> bool:
        participants = self._cell().get("participants") or []
        return bool(participants) and all(one.get("phase") == "idle" for one in participants)

    def _phase(self, checkpoint: str) -> str | None:
        phase: str | None = (self._kube.checkpoint(checkpoint).get("status") or {}).get("phase")
        return phase

    def _terminal(self, checkpoint: str) -> Object | None:
        found = self._kube.checkpoint(checkpoint)
        return found if (found.get("status") or {}).get("phase") in TERMINAL else None


def _selector(stack: str, server: str) -> str:
    return f"gymops.dev/stack={stack},gymops.dev/server={server}"


def container_process(pod_uid: str, program: str) -> int | None:
    """The process id on this machine of a pod's program, None where the pod's node is another machine."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            groups = (folder / "cgroup").read_text()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended while we looked
        if (pod_uid in groups or pod_uid.replace("-", "_") in groups) and program in command:
            return int(folder.name)
    return None


def first_token(entries: Sequence[Mapping[str, Any]], after: float, attempt: int) -> float | None:
    """Unix time of the first token of a model call under `attempt` or a later one, after a time; None if none."""
    times = [
        float(entry["time"])
        for entry in entries
        if entry["kind"] == "tokens"
        and entry["time"] > after
        and not str(entry["request"]).startswith("-")
        and parse_key(str(entry["request"]).partition("/")[0]).attempt >= attempt
    ]
    return min(times, default=None)
