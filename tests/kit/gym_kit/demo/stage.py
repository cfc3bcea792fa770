"""Sets the stage: cluster, bucket, image, operator and stack, and clears it away again."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_kit import image, kept, tools
from gym_kit.bucket import SeaweedFS
from gym_kit.cluster import Choice, Cluster, ensure
from gym_kit.demo.engines import DemoEngine, EngineBeside, EnginePod, engine_image, tokenizer
from gym_kit.demo.kube import Kube, wait
from gym_kit.demo.options import Options
from gym_kit.errors import KitError
from gym_kit.image import PROJECT
from gym_kit.progress import Progress
from gym_kit.run import run
from gym_servers.engine.rows import counter_rows
from gym_servers.engine.script import tokens_of
from gym_servers.stack.settings import S3Settings
from gym_servers.storage.s3 import S3Credentials, S3Store
from gym_vllm.engine import running_engine
from gym_vllm.journal import as_entries
from gym_vllm.language import rows_of_tests

OPERATOR = "gym-operator"
OPERATOR_NAMESPACE = "gym-system"
STACK = "demo"
BUCKET = "gym-demo"
SECRET = "demo-s3"
HELM_SECONDS = 180.0
VLLM_PYTHON = PROJECT / ".venv-vllm" / "bin" / "python"
SHORTEST_ROLLOUT_SECONDS = 20.0


@dataclass(frozen=True)
class Grounds:
    """What demonstrations share: a cluster with the operator and this image, and an S3 server beside it."""

    cluster: Cluster
    bucket: SeaweedFS
    image: str

    def helm(self, *arguments: str) -> str:
        return run([tools.helm(), "--kubeconfig", self.cluster.kubeconfig, *arguments], timeout=HELM_SECONDS)

    def install(self, chart: str, release: str, namespace: str, values: dict[str, Any], *more: str) -> None:
        command: list[str | Path] = [tools.helm(), "--kubeconfig", self.cluster.kubeconfig, "upgrade", "--install"]
        command += [release, PROJECT / "charts" / chart, "--namespace", namespace, "--create-namespace"]
        values = {"image": _split(self.image), **values}
        run([*command, "--values", "-", *more], stdin=json.dumps(values), timeout=HELM_SECONDS)

    def uninstall(self, release: str, namespace: str, *more: str) -> None:
        self.helm("uninstall", release, "--namespace", namespace, "--ignore-not-found", *more)

    def install_operator(self) -> None:
        """Returns when it serves."""
        self.install("gym-operator", OPERATOR, OPERATOR_NAMESPACE, {}, "--wait")

    def uninstall_operator(self) -> None:
        """Returns when its pod is gone."""
        self.uninstall(OPERATOR, OPERATOR_NAMESPACE, "--wait")

    def s3_values(self, namespace: str) -> dict[str, Any]:
        """A stack's storage in this bucket, as the chart takes it, with the keys that `claim` puts there."""
        return {
            "bucket": BUCKET,
            "prefix": f"{namespace}/checkpoints",
            "endpoint": self.bucket.endpoint,
            "addressingStyle": "path",
            "existingSecret": SECRET,
        }

    def store(self, prefix: str) -> S3Store:
        """The bucket's objects below a prefix."""
        settings = S3Settings(bucket=BUCKET, prefix=prefix, endpoint=self.bucket.endpoint, addressing_style="path")
        keys = self.bucket.credentials
        return S3Store(settings, prefix, S3Credentials(keys.access_key, keys.secret_key))

    def claim(self, prefix: str) -> Kube:
        """A new namespace, where Pod Security is restricted, with the keys to the bucket."""
        kube = Kube(self.cluster.kubeconfig, f"{prefix}-{secrets.token_hex(3)}")
        kube.create_namespace()
        keys = self.bucket.credentials
        kube.create_secret(SECRET, {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key})
        return kube


@dataclass(frozen=True)
class Stage:
    """Where one demonstration happens: a namespace of its own. `expected`: rollouts to be collected. `engine`: the
    vLLM that generates; None for the scripted one in the cluster."""

    grounds: Grounds
    kube: Kube
    expected: int
    tokens_per_second: int
    engine: DemoEngine | None = None

    def store(self, prefix: str) -> S3Store:
        return self.grounds.store(prefix)

    def entries(self) -> list[dict[str, Any]]:
        """The journal of the run: of tools and scripted engine in a pod that is never killed, and of vLLM."""
        pods = self.kube.pods("app.kubernetes.io/component=journal,app.kubernetes.io/instance=demo")
        if not pods:
            raise KitError("the journal's pod is gone: nothing can be proved")
        lines = self.kube.read_pod_url(pods[0]["metadata"]["name"], 8000, "entries").splitlines()
        found = [json.loads(line) for line in lines]
        return found if self.engine is None else [*found, *as_entries(self.engine.generated())]

    def install_stack(
        self, release: str, *, checkpoints: bool, tasks: str, concurrency: int, memory: str | None = None
    ) -> None:
        """`helm upgrade --install` of a demonstration stack in this run's namespace. `memory`: what its servers ask
        for."""
        values: dict[str, Any] = {
            "demo": {"enabled": True, "tokensPerSecond": self.tokens_per_second},
            "checkpoints": {"enabled": checkpoints},
            "collection": {
                "tasks": f"s3://{BUCKET}/{self.kube.namespace}/{tasks}",
                "output": f"s3://{BUCKET}/{self.kube.namespace}/{release}/output",
                "concurrency": concurrency,
            },
            "s3": self.grounds.s3_values(self.kube.namespace),
            "recovery": {"backoffLimit": 20},
        }
        if memory is not None:
            values["serverResources"] = {"requests": {"memory": memory}}
        if self.engine is not None:
            values |= self.engine.values(STACK, release)
        self.grounds.install("gym-stack", release, self.kube.namespace, values)

    def uninstall_stack(self, release: str) -> None:
        self.grounds.uninstall(release, self.kube.namespace)


@contextmanager
def grounds(
    choice: Choice, progress: Progress, folder: Path, *, keep: bool = False, policy: str = "scripted"
) -> Iterator[Grounds]:
    """What demonstrations share; what this call started is cleared away unless `keep`.

    Raises KitError with what is missing.
    """
    with progress.step("cluster"):
        cluster = ensure(choice, progress)
    try:
        if cluster.host_address is None:
            raise KitError("pods of this cluster have no known way to this machine: use CLUSTER=local or kind")
        with progress.step("image"):
            if policy == "vllm":
                built = image.build(progress, requirements="served", extra=tokenizer())
            else:
                built = image.build(progress)
            cluster.load_image(built.archive)
        bucket = SeaweedFS(kept.new_folder() if keep else folder / "s3", host=cluster.host_address)
        try:
            with progress.step("S3 server"):
                bucket.start()
            bucket.create_bucket(BUCKET)
            yield from _with_operator(Grounds(cluster, bucket, built.reference), progress, keep)
        finally:
            if not keep:
                bucket.kill()
    finally:
        if cluster.started and not keep:
            with progress.step("removing the cluster"):
                cluster.down()


def _with_operator(ready: Grounds, progress: Progress, keep: bool) -> Iterator[Grounds]:
    with progress.step("operator (helm install)"):
        ready.install_operator()
    try:
        yield ready
    finally:
        if not keep:
            with progress.step("uninstalling the operator"):
                ready.uninstall(OPERATOR, OPERATOR_NAMESPACE)


@contextmanager
def staged(on: Grounds, options: Options, progress: Progress) -> Iterator[Stage]:
    """A stage for one run; it is cleared away unless `options.keep`."""
    with ExitStack() as beside:
        kube = on.claim("gym-demo")
        engine: DemoEngine | None = None
        if options.policy == "vllm":
            folder = Path(beside.enter_context(tempfile.TemporaryDirectory(prefix="gym-demo-vllm-")))
            if options.engine == "pod":
                with progress.step("image with vLLM (eight gigabytes)"):
                    built = engine_image(progress)
                    on.cluster.load_image(built.archive)
                engine = EnginePod(on.cluster.kubeconfig, kube, built.reference, STACK, folder)
            else:
                with progress.step("vLLM beside the cluster"):
                    host = on.cluster.host_address
                    assert host is not None  # `grounds` has seen to it
                    engine = EngineBeside(beside.enter_context(running_engine(folder, host=host, python=VLLM_PYTHON)))
        yield from _staged(on, kube, options, progress, engine)


def _staged(
    on: Grounds, kube: Kube, options: Options, progress: Progress, engine: DemoEngine | None
) -> Iterator[Stage]:
    lines = _tasks(options)
    stage = Stage(on, kube, len(lines), _rate(lines), engine)
    store = stage.store(kube.namespace)
    store.create("tasks.jsonl", b"".join(line + b"\n" for line in lines))
    store.create("one-task.jsonl", lines[0] + b"\n")
    try:
        yield stage
    finally:
        if not options.keep:
            with progress.step("uninstalling"):
                for release in (STACK, "bare"):
                    stage.uninstall_stack(release)
                kube.delete_namespace()
                wait("the namespace to go", lambda: not kube.pods(""), 60.0)


def _tasks(options: Options) -> list[bytes]:
    if options.tasks is not None:
        return [line for line in options.tasks.read_bytes().splitlines() if line.strip()]
    rows = rows_of_tests() if options.policy == "vllm" else counter_rows(options.rollouts, seed=1)
    return [json.dumps(row).encode() for row in rows]


def _rate(lines: list[bytes]) -> int:
    """Tokens per second at which even the shortest rollout is at work for a while: a kill must find work."""
    rows = [json.loads(line) for line in lines]
    shortest = min(tokens_of(row["responses_create_params"]["input"]) for row in rows)
    return max(1, round(shortest / SHORTEST_ROLLOUT_SECONDS))


def _split(reference: str) -> dict[str, str]:
    repository, _, tag = reference.rpartition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}
