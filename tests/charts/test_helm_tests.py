"""`helm test` of both charts: what its pod looks at, and with whose rights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from gym_kit.ports import free_ports
from gym_operator.rules.workloads import StackContext, build_children
from gym_servers.stack.render import s3_settings
from gym_servers.stack.settings import S3Settings, StackIdentity
from gym_servers.stack.spec import parse_spec

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]
ROOT = Path(__file__).parents[2]
SERVERS: list[dict[str, Any]] = [
    {"name": "world", "kind": "environment", "server": "single-agent-turn"},
    {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://llm:8000"}},
    {"name": "agent", "kind": "agent", "server": "simple-agent"},
    {"name": "tools", "kind": "resources", "server": "counter"},
]


def test_the_test_pod_reaches_the_bucket_as_the_servers_do(render: Render) -> None:
    s3 = {"s3.bucket": "bucket", "s3.prefix": "team/a", "s3.endpoint": "https://s3.test", "s3.existingSecret": "keys"}
    account = {"serviceAccount.create": True, "s3.caSecret": "authorities", "s3.region": "eu-west-1"}
    objects = render(
        "gym-stack",
        {
            "servers": SERVERS,
            "collection": {"tasks": "s3://bucket/tasks", "output": "s3://bucket/rows"},
            **s3,
            **account,
        },
    )
    spec = objects["Pod", "rel-test"]["spec"]
    stack = StackContext(
        StackIdentity(namespace="team", name="rel", uid="u"),
        parse_spec(objects["GymStack", "rel"]["spec"]),
        "gym-system",
    )
    (driver,) = [
        m for m in build_children(stack) if m["metadata"]["name"] == "rel-collection" and "template" in m["spec"]
    ]
    server = driver["spec"]["template"]["spec"]

    def secrets(pod: dict[str, Any]) -> dict[str, Any]:
        """Mount -> Secret, of those that S3 needs."""
        volumes = {volume["name"]: volume["secret"] for volume in pod["volumes"] if volume["name"].startswith("s3-")}
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        return {mounts[name]: secret for name, secret in volumes.items()}

    def environment(pod: dict[str, Any]) -> dict[str, str]:
        return {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}

    assert secrets(spec) == secrets(server)
    assert set(secrets(spec)) == {"/etc/gym-s3", "/etc/gym-s3-ca"}
    assert environment(server).items() & environment(spec).items() == {
        ("GYM_S3_CREDENTIALS_FOLDER", "/etc/gym-s3"),
        ("GYM_S3_CA_FILE", "/etc/gym-s3-ca/ca.crt"),
    }
    assert spec["serviceAccountName"] == server["serviceAccountName"] == "rel"
    assert environment(spec)["STORAGE"] == "s3://bucket/team/a"
    settings = S3Settings.model_validate_json(environment(spec)["S3"])
    wanted = stack.spec.s3
    assert wanted is not None
    assert settings.model_copy(update={"prefix": "team/a"}) == s3_settings(wanted)
    bare = render("gym-stack", {"servers": SERVERS, "checkpoints.enabled": False})["Pod", "rel-test"]["spec"]
    assert set(environment(bare)) == {"URL"}


def test_helm_s_test_does_not_pass_while_the_storage_does_not_answer(render: Render) -> None:
    s3 = {"s3.bucket": "bucket", "s3.endpoint": f"http://127.0.0.1:{free_ports(1)[0]}"}
    (container,) = render("gym-stack", {"servers": SERVERS, **s3})["Pod", "rel-test"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    with served_pages() as url:
        environment |= {"URL": f"{url}/", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        program = [sys.executable, "-c", container["args"][0]]
        inherited = {**os.environ, "PYTHONPATH": str(ROOT / "servers")}
        with subprocess.Popen(program, env=inherited | environment, stdout=subprocess.PIPE, text=True) as test:
            assert test.stdout is not None
            assert test.stdout.readline() == f"{url}/: ready\n"
            assert re.search(r"s3://bucket: .*cannot be reached.*, trying again", test.stdout.readline())
            test.kill()


@contextmanager
def served_pages() -> Iterator[str]:
    """A web server that answers, in a thread."""
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("chart", ["gym-operator", "gym-stack"])
def test_helm_s_test_ends_when_it_is_told_to(render: Render, chart: str) -> None:
    """A shell-less program that is a container's first process does not hear SIGTERM: nobody is to wait for it."""
    values = {"demo.enabled": True, "s3.bucket": "bucket"} if chart == "gym-stack" else {}
    assert render(chart, values)["Pod", "rel-test"]["spec"]["terminationGracePeriodSeconds"] == 1
