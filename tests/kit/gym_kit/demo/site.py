"""A place for one scenario with the charts on a whole cluster: a namespace, and what works beside the cluster.

    with site(grounds, folder, rollouts=4) as place:
        place.install("team", place.values("team"))
        place.wait("it runs", lambda: place.running("team"), 60)

Rollouts are slow, so that a scenario can do what it wants while they are at work; `engine=place.fast` brings them to
their end. Engine and journals are processes of this machine: they outlive all that a scenario takes away.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gym_kit import tools
from gym_kit.beside import Program, serving
from gym_kit.cluster.client import ask
from gym_kit.demo.kube import Kube, Object, wait
from gym_kit.demo.report import counted_run
from gym_kit.demo.stage import BUCKET, OPERATOR, OPERATOR_NAMESPACE, Grounds
from gym_kit.errors import KitError
from gym_servers.engine.rows import counter_rows
from gym_servers.proof.account import Account
from gym_servers.protocol.identity import Episode
from gym_servers.storage.s3 import S3Store

SLOW, FAST = 20, 20_000
"""Tokens per second of each generation: a tool call every three seconds, and no waiting at all."""
ADDITIONS: Final = 56
"""Tool calls of a rollout: more than get done at the slow rate in two minutes, and as many as its agent makes."""
GONE_SECONDS: Final = 120.0
Values = dict[str, Any]


@dataclass(frozen=True)
class Site:
    """`expected`: rollouts of each stack. `slow` and `fast`: where the policies are. `calls`: the journal of tool
    calls; while it is held, each stands in its middle."""

    grounds: Grounds
    kube: Kube
    folder: Path
    expected: int
    slow: str
    fast: str
    calls: Program

    # ---- releases -----------------------------------------------------------------------------------------

    def values(self, release: str, *, engine: str = "", **more: Any) -> Values:
        """Values of chart gym-stack; `more` replaces parts of them."""
        where = f"s3://{BUCKET}/{self.kube.namespace}"
        journal = {"journal": self.calls.url}
        return {
            "servers": [
                {"name": "env", "kind": "environment", "server": "single-agent-turn"},
                {
                    "name": "policy",
                    "kind": "model",
                    "server": "scripted",
                    "config": {"base_url": engine or self.slow},
                },
                {"name": "agent", "kind": "agent", "server": "simple-agent"},
                {"name": "counter", "kind": "resources", "server": "counter", "config": journal},
            ],
            "collection": {"tasks": f"{where}/tasks.jsonl", "output": f"{where}/{release}/output"},
            "s3": self.grounds.s3_values(self.kube.namespace),
            **more,
        }

    def install(self, release: str, values: Values, chart: str = "gym-stack") -> None:
        """`helm upgrade --install`."""
        self.grounds.install(chart, release, self.kube.namespace, values)

    def rollback(self, release: str, revision: int) -> None:
        self.grounds.helm("rollback", release, str(revision), "--namespace", self.kube.namespace)

    def helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs helm in this namespace; its exit code is for the caller."""
        command: list[str | Path] = [tools.helm(), "--kubeconfig", self.grounds.cluster.kubeconfig]
        return subprocess.run(
            [*command, "--namespace", self.kube.namespace, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def clear(self) -> None:
        """Uninstall all that is left, and let the namespace go."""
        if not self.kube.namespace_is_gone():
            for release in self.helm("list", "--short").stdout.split():
                self.grounds.uninstall(release, self.kube.namespace)
            self.kube.delete_namespace()
            wait("pods to go", lambda: not self.kube.pods(""), GONE_SECONDS)

    def kubectl(self, *words: str) -> str:
        """Raises KitError where it fails."""
        return ask(self.grounds.cluster.kubeconfig, "--namespace", self.kube.namespace, *words)

    # ---- looks --------------------------------------------------------------------------------------------

    def cell(self, stack: str) -> Object:
        cells = (self.kube.stack(stack).get("status") or {}).get("cells") or [{}]
        found: Object = cells[0]
        return found

    def running(self, stack: str, attempt: int = 0) -> bool:
        cell = self.cell(stack)
        return cell.get("phase") == "Running" and int(cell.get("attempt", 0)) == attempt

    def at_work(self, stack: str, attempt: int = 0) -> bool:
        """Running, and every rollout has been at work under this attempt."""
        return self.running(stack, attempt) and len(self._generated(attempt)) == self.expected

    def complete(self, stack: str) -> bool:
        return bool((self.cell(stack).get("collection") or {}).get("complete"))

    def condition(self, stack: str, type: str) -> Object:
        conditions = (self.kube.stack(stack).get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if each["type"] == type), {})

    def phase(self, kind: str, name: str) -> str:
        return str((self.kube.get(kind, name).get("status") or {}).get("phase", "Pending"))

    def pods(self, stack: str) -> dict[str, str]:
        """The stack's pods and their UIDs."""
        found = self.kube.pods(f"gymops.dev/stack={stack},app.kubernetes.io/name=gym-server")
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

    def wait(self, what: str, condition: Callable[[], Any], seconds: float) -> Any:
        """What `condition` gives once that is true. AssertionError says where everything stands."""
        try:
            return wait(what, condition, seconds)
        except KitError as late:
            raise AssertionError(f"{late}\n{self._picture()}") from None

    def _picture(self) -> str:
        kinds = "pods,gymstacks,gymcheckpoints,gymcheckpointschedules,gymrestores,events"
        words = ("logs", f"--namespace={OPERATOR_NAMESPACE}", f"deployment/{OPERATOR}", "--tail=20")
        told = []
        for question in (("get", kinds, "--output=wide", "--ignore-not-found"), words):
            try:
                told.append(self.kubectl(*question))
            except KitError as silent:
                told.append(str(silent))
        return "\n".join(told)

    # ---- what really happened -----------------------------------------------------------------------------

    def store(self, prefix: str) -> S3Store:
        return self.grounds.store(prefix)

    def entries(self) -> list[dict[str, Any]]:
        """Effects of tools, and tokens."""
        return [
            json.loads(line)
            for file in sorted(self.folder.glob("*.jsonl"))
            for line in file.read_bytes().splitlines()
        ]

    def account(
        self, stack: str, entries: Sequence[dict[str, Any]] | None = None, folders: Sequence[str] = ()
    ) -> Account:
        """Of a stack that is complete."""
        return counted_run(self, self.kube.stack(stack), self.entries() if entries is None else entries, folders)

    def _generated(self, attempt: int) -> set[str]:
        """Rollouts that the engine has generated for under an attempt."""
        requests = {str(entry["request"]).partition("/")[0] for entry in self.entries() if entry["kind"] == "tokens"}
        suffix = f"-a{attempt}" if attempt else ""
        return {key for key in requests if key.endswith(suffix) and (suffix or "-a" not in key)}

    @contextmanager
    def in_tool_calls(self) -> Iterator[None]:
        """Every rollout of a stack that nothing was restored into stands in a tool call, and stays there."""
        with self.calls.held():
            wait("a tool call of every rollout", lambda: self._calling() == self.expected, 60)
            yield

    def _calling(self) -> int:
        """Rollouts that have ended one turn more than their tool calls have had effects."""
        turns: Counter[str] = Counter()
        for entry in self.entries():
            if entry["kind"] == "effect":
                turns[Episode(entry["rollout"], entry["attempt"]).key] -= 1
            elif entry["kind"] == "tokens" and entry["last"]:
                turns[str(entry["request"]).partition("/")[0]] += 1
        return sum(ahead > 0 for ahead in turns.values())


@contextmanager
def site(on: Grounds, folder: Path, *, rollouts: int) -> Iterator[Site]:
    """A namespace, which is cleared away."""
    host = on.cluster.host_address
    assert host is not None  # `grounds` has seen to it
    kube = on.claim("gym-site")
    rows = counter_rows(rollouts, 1, (ADDITIONS, ADDITIONS))
    on.store(kube.namespace).create("tasks.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    with ExitStack() as beside:

        def engine(rate: int) -> str:
            words = ("--tokens-per-second", str(rate), "--journal", str(folder / "tokens.jsonl"))
            return beside.enter_context(serving(folder, "engine", *words, host=host)).url

        calls = beside.enter_context(serving(folder, "journal", "--file", str(folder / "calls.jsonl"), host=host))
        place = Site(on, kube, folder, rollouts, engine(SLOW), engine(FAST), calls)
        try:
            yield place
        finally:
            place.clear()
