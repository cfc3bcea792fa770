"""The program `kubectl-gym`: one line for people and an exit code for programs, whatever goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_operator.plugin.program import as_told, code_of

PODS = "/api/v1/namespaces/team/pods"
GROUP = "/apis/gymops.dev/v1alpha1/namespaces/team"


class Api(ThreadingHTTPServer):
    """An API server with fixed answers: a body for each path, or the status of a refusal. `HANGS`: no answer."""

    HANGS = 0
    daemon_threads = True

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.arrived, self.over = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.arrived.set()
        answer = self.server.answers.get(self.path.partition("?")[0], 404)
        if answer == Api.HANGS and not isinstance(answer, str):
            self.server.over.wait(60)
            return
        status = answer if isinstance(answer, int) else 200
        if isinstance(answer, int):
            answer = {"message": "no"}
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def kubeconfig(api: Api, tmp_path: Path) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api.server_address[1]}"}}],
        "users": [{"name": "u", "user": {"token": "s3cr3t"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path


def start(*arguments: str, kubeconfig: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "AWS_"))}
    way = {"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}
    return subprocess.Popen(
        [sys.executable, "-m", "gym_operator.plugin", *arguments],
        env={**kept, **way, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, kubeconfig: Path | None = None, **environment: str) -> tuple[int, str, str]:
    process = start(*arguments, kubeconfig=kubeconfig, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def is_one_line(err: str) -> bool:
    return err.count("\n") == 1 and err.startswith("kubectl gym: ") and "Traceback" not in err


def stack(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team", "uid": f"{name}-uid"}, "spec": {}}


def listing(*items: dict[str, Any]) -> dict[str, Any]:
    return {"items": list(items), "metadata": {"resourceVersion": "5"}}


def test_without_a_cluster_it_says_how_to_choose_one(tmp_path: Path) -> None:
    code, out, err = run("status", "demo", HOME=str(tmp_path))
    assert (code, out) == (3, "") and is_one_line(err)
    assert "--context" in err and "KUBECONFIG" in err


def test_a_context_that_is_not_there_is_named(kubeconfig: Path) -> None:
    code, _, err = run("status", "demo", "--context", "there", kubeconfig=kubeconfig)
    assert code == 3 and is_one_line(err)
    assert "there" in err


@pytest.mark.parametrize(
    "wrong",
    [
        b"[]",
        b"text",
        b"\x9f\xff",
        b"users: [{token: 's3cr3t",
        {"users": [{"name": "u", "token": "s3cr3t"}]},
        {"clusters": [{"name": "c", "server": "s3cr3t"}]},
        {"clusters": [{"name": "c", "cluster": {"server": "https://h", "certificate-authority-data": "czNjcjN0"}}]},
        {"users": [{"name": "u", "user": {"client-certificate-data": "czNjcjN0", "client-key-data": "czNjcjN0"}}]},
    ],
    ids=str,
)
def test_a_kubeconfig_that_cannot_be_read_is_told_without_what_is_in_it(
    kubeconfig: Path, wrong: bytes | dict[str, Any]
) -> None:
    if isinstance(wrong, dict):
        https = yaml.safe_load(kubeconfig.read_text().replace("http:", "https:"))
        wrong = yaml.safe_dump({**https, **wrong}).encode()
    kubeconfig.write_bytes(wrong)
    code, out, err = run("status", "demo", kubeconfig=kubeconfig)
    assert (code, out) == (3, "") and is_one_line(err)
    assert "no cluster is configured" in err and "--kubeconfig" in err
    assert "s3cr3t" not in err


def test_a_stack_that_is_not_there_brings_those_that_are(api: Api, kubeconfig: Path) -> None:
    api.answers[f"{GROUP}/gymstacks"] = listing(stack("one"), stack("two"))
    code, _, err = run("status", "demo", kubeconfig=kubeconfig)
    assert (code, err) == (2, "kubectl gym: no GymStack demo in namespace team: there are one, two\n")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (403, "you may not get gymstacks.gymops.dev in namespace team"),
        (401, "log in again"),
        (404, "has no gymstacks"),
    ],
)
def test_a_refusal_is_told_with_what_to_do(api: Api, kubeconfig: Path, answer: int, says: str) -> None:
    api.answers[f"{GROUP}/gymstacks/demo"] = api.answers[f"{GROUP}/gymstacks"] = answer
    code, _, err = run("status", "demo", kubeconfig=kubeconfig)
    assert code == 3 and is_one_line(err) and says in err
    assert "s3cr3t" not in err


def test_a_status_is_printed_for_people_and_for_programs(api: Api, kubeconfig: Path) -> None:
    api.answers |= {f"{GROUP}/gymstacks/demo": stack("demo"), f"{GROUP}/gymcheckpoints": listing()}
    code, out, err = run("status", "demo", kubeconfig=kubeconfig)
    assert (code, err) == (0, "") and out.splitlines()[1].split()[:2] == ["demo", "Pending"]
    _, as_yaml, _ = run("status", "demo", "-o", "yaml", kubeconfig=kubeconfig)
    _, as_json, _ = run("status", "demo", "-o", "json", kubeconfig=kubeconfig)
    assert yaml.safe_load(as_yaml) == json.loads(as_json)
    assert json.loads(as_json)["name"] == "demo"


def test_a_log_is_read_to_its_end(api: Api, kubeconfig: Path) -> None:
    labels = {"gymops.dev/server": "agent", "gymops.dev/stack-uid": "demo-uid"}
    metadata = {"name": "demo-agent-0", "namespace": "team", "uid": "pod-uid", "labels": labels}
    pod = {"metadata": {**metadata, "creationTimestamp": "2027-01-15T08:00:00Z"}, "spec": {}, "status": {}}
    api.answers |= {
        f"{GROUP}/gymstacks/demo": stack("demo"),
        PODS: listing(pod),
        f"{PODS}/demo-agent-0/log": "first\nsecond\nno end",
    }
    code, out, _ = run("logs", "demo", "--since", "10m", "--tail", "3", kubeconfig=kubeconfig)
    assert (code, out) == (0, "first\nsecond\nno end\n")
    assert api.asked[-1].partition("?")[2] == "container=server&follow=false&tailLines=3&sinceSeconds=600"


def test_a_place_needs_no_cluster(tmp_path: Path) -> None:
    code, _, err = run("verify", str(tmp_path), HOME=str(tmp_path))
    assert (code, is_one_line(err)) == (2, True)
    assert "no checkpoint.json" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "demo", "-o", "xml"),
        ("restore", "demo"),
        ("restore", "demo", "--from", "s3://bucket/x"),
        ("checkpoint", "demo", "--label", "step"),
        ("checkpoint", "demo", "--timeout", "soon"),
        ("inspect", "one", "--digest", "d"),
        ("nonsense",),
        ("status", ""),
        ("status", "demo", "-n", "../x"),
        ("logs", ""),
        ("inspect", ""),
    ],
)
def test_wrong_arguments_are_told_and_nothing_is_asked(
    api: Api, kubeconfig: Path, arguments: tuple[str, ...]
) -> None:
    code, _, err = run(*arguments, kubeconfig=kubeconfig)
    assert code == 2 and "Traceback" not in err and len(err) < 1000
    assert api.asked == []


def test_a_name_that_is_empty_is_told_wherever_it_stands(api: Api, kubeconfig: Path) -> None:
    """As where a script has not set the variable that it gives."""
    api.answers |= {f"{GROUP}/gymstacks/demo": stack("demo"), f"{GROUP}/gymcheckpoints": listing()}
    for arguments in (("drill", "demo", "--from", ""), ("checkpoints", "")):
        code, out, err = run(*arguments, kubeconfig=kubeconfig)
        assert (code, out) == (2, "") and is_one_line(err), arguments


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_clean(api: Api, kubeconfig: Path, number: int, code: int) -> None:
    api.answers[f"{GROUP}/gymstacks/demo"] = Api.HANGS
    process = start("status", "demo", "--watch", kubeconfig=kubeconfig)
    assert api.arrived.wait(60)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", "")


def test_a_fault_of_ours_is_told_without_a_trace() -> None:
    told = as_told(ZeroDivisionError("x\ny"))
    assert "ZeroDivisionError" in told and "\n" not in told
    assert code_of(ZeroDivisionError()) == 70
