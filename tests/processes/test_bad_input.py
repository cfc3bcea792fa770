"""What a user gets wrong: the local runner says it in one line, shows no stack trace, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_kit.bucket import SeaweedFS
from gym_servers.engine.rows import counter_rows
from gym_servers.local.demo import manifest

PATIENCE_SECONDS = 90.0
CLOSED = "http://127.0.0.1:1"


def stack(folder: Path, endpoint: str | None, bucket: str = "gym") -> dict[str, Any]:
    document = manifest(folder, CLOSED, folder / "tasks.jsonl", 2)
    if endpoint is not None:
        reach = {"bucket": bucket, "endpoint": endpoint, "addressingStyle": "path"}
        document["spec"]["checkpoints"]["storage"] = {"s3": reach}
        document["spec"]["collection"]["output"] = f"s3://{bucket}/out"
    (folder / "stack.yaml").write_text(yaml.safe_dump(document))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in counter_rows(2, 1)))
    return document


def environment(**changes: str | None) -> dict[str, str]:
    merged: dict[str, str | None] = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true", **changes}
    return {name: value for name, value in merged.items() if value is not None}


@contextmanager
def up(folder: Path, *arguments: str, **changes: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """`gym-servers up`; ended with all its servers on the way out."""
    with (folder / "up.log").open("wb") as log:
        command = [sys.executable, "-m", "gym_servers", "up", "stack.yaml", "--folder", "run", *arguments]
        process = subprocess.Popen(command, cwd=folder, env=environment(**changes), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=30)


def said(folder: Path, process: subprocess.Popen[bytes], text: str) -> str:
    """The runner's line with `text`, once it is there; fails where the runner ends instead."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        lines = (folder / "up.log").read_text().splitlines()
        if found := [line for line in lines if text in line]:
            return found[0]
        assert process.poll() is None, lines
        time.sleep(0.1)
    raise AssertionError(f"{text!r} was not said: {lines[-5:]}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_runner_that_ends_leaves_no_server_behind(tmp_path: Path, number: signal.Signals) -> None:
    stack(tmp_path, None)
    with up(tmp_path) as process:
        eventually(lambda: len(children(process.pid)) == 5)
        servers = children(process.pid)
        process.send_signal(number)
        process.wait(timeout=30)
        eventually(lambda: not any(map(alive, servers)))
    quiet(tmp_path)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def quiet(folder: Path) -> None:
    """Nobody was shown a stack trace."""
    for log in [folder / "up.log", *(folder / "run").glob("*.log")]:
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]


@pytest.mark.parametrize("command", [["up", "stack.yaml"], ["demo", "--rollouts", "1"]])
def test_a_second_runner_in_a_folder_is_refused_and_the_first_goes_on(tmp_path: Path, command: list[str]) -> None:
    stack(tmp_path, None)
    with up(tmp_path) as first:
        eventually(lambda: len(children(first.pid)) == 5)
        servers = children(first.pid)
        done = ended(tmp_path, *command, "--folder", "run")
        assert done.returncode == 2
        assert "another gym-servers is at work in run" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert first.poll() is None
        assert children(first.pid) == servers
    with up(tmp_path) as next_one:  # the first one has ended: the folder is free
        eventually(lambda: len(children(next_one.pid)) == 5)


def test_a_run_that_has_given_up_says_so_and_another_one_in_its_folder_goes_on(tmp_path: Path) -> None:
    document = stack(tmp_path, None)
    document["spec"]["recovery"] = {"backoffLimit": 0}
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(document))
    record = tmp_path / "run" / "cell.json"

    def in_service() -> bool:
        return record.exists() and json.loads(record.read_text())["stage"] == "running"

    with up(tmp_path) as process:
        eventually(in_service)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        assert process.wait(timeout=PATIENCE_SECONDS) == 1
    stalled, last = (tmp_path / "up.log").read_text().splitlines()[-2:]
    assert "RecoveryStalled" in stalled
    assert "Incomplete: 0 of 2 rows are there; the cell has given up" in last
    with up(tmp_path) as process:
        said(tmp_path, process, "TriedAgain: the run before had given up")
        said(tmp_path, process, "Recovered: attempt 1 runs from the input")
    record.write_text("{")
    done = ended(tmp_path, "up", "stack.yaml", "--folder", "run")
    assert done.returncode == 2
    assert "cell.json" in done.stderr.splitlines()[-1]
    quiet(tmp_path)


def ended(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    command = [sys.executable, "-m", "gym_servers", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def test_a_tasks_file_that_cannot_be_used_is_named_by_line_and_read_when_it_is_put_right(tmp_path: Path) -> None:
    stack(tmp_path, None)
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{"responses_create_params": \n')
    with up(tmp_path) as process:
        line = said(tmp_path, process, "tasks.jsonl line 3 is not JSON")
        assert "Problem: collection:" in line
        assert process.poll() is None
        (tmp_path / "tasks.jsonl").write_text(json.dumps(counter_rows(1, 1)[0]) + "\n")
        eventually(lambda: any(tmp_path.rglob("rollouts_materialized_inputs.jsonl")))  # it has begun
    quiet(tmp_path)


def test_a_server_that_cannot_start_says_why_on_the_runners_screen_once(tmp_path: Path) -> None:
    document = stack(tmp_path, None)
    agent = next(server for server in document["spec"]["servers"] if server["kind"] == "agent")
    agent["config"] = {"max_step": 3}
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(document))
    with up(tmp_path) as process:
        line = said(tmp_path, process, "unknown `config` max_step")
        assert "ServerEnded: agent ended with 2" in line
        log = tmp_path / "run" / "agent.log"
        eventually(lambda: log.read_text().count("max_step") > 2)  # it was started again meanwhile
    assert (tmp_path / "up.log").read_text().count("ServerEnded: agent") == 1
    quiet(tmp_path)


def test_missing_credentials_are_named(tmp_path: Path, s3: SeaweedFS) -> None:
    stack(tmp_path, s3.endpoint)
    nothing = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "HOME": str(tmp_path)}
    with up(tmp_path, "--every", "1s", **nothing) as process:
        said(tmp_path, process, "no S3 credentials; give a credentials secret or a role")
        said(tmp_path, process, "Warning WriteFailed:")
        assert process.poll() is None
    quiet(tmp_path)


def test_wrong_credentials_are_named_and_not_shown(tmp_path: Path, s3: SeaweedFS) -> None:
    stack(tmp_path, s3.endpoint)
    wrong = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "very-secret-key"}
    with up(tmp_path, **wrong) as process:
        said(tmp_path, process, "the access key is unknown")
        assert process.poll() is None
    quiet(tmp_path)
    for log in (tmp_path / "up.log", *(tmp_path / "run").glob("*.log")):
        assert "very-secret-key" not in log.read_text()


def test_a_missing_bucket_is_named(tmp_path: Path, s3: SeaweedFS) -> None:
    stack(tmp_path, s3.endpoint, bucket="no-such-bucket")
    with up(tmp_path) as process:
        line = said(tmp_path, process, "the bucket does not exist; create it or correct its name")
        assert "no-such-bucket" in line
        assert process.poll() is None
    quiet(tmp_path)


def test_an_endpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    stack(tmp_path, CLOSED)
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with up(tmp_path, **keys) as process:
        said(tmp_path, process, f"the endpoint {CLOSED} cannot be reached; check `endpoint`")
        assert process.poll() is None
    quiet(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "none.yaml"], "cannot read none.yaml"),
        (["up", "stack.yaml", "--every", "soon"], "60s, 2m or 1h"),
        (["serve", "--settings", "none.json"], "cannot read settings none.json"),
        (["demo", "--tasks", "none.jsonl"], "none.jsonl does not exist"),
        (["demo", "--tasks", "stack.yaml"], "stack.yaml line 1 is not JSON"),
        (["demo", "--kill", "nobody", "--rollouts", "1"], "there is no server 'nobody' to kill"),
    ],
)
def test_a_command_that_cannot_work_ends_with_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    stack(tmp_path, None)
    done = ended(tmp_path, *arguments)
    assert done.returncode in (1, 2)
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("gym-servers: ")


def test_a_manifest_with_mistakes_names_them_all(tmp_path: Path) -> None:
    document = stack(tmp_path, None)
    document["spec"]["servers"][0]["kind"] = "unknown"
    document["spec"]["typo"] = 1
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(document))
    done = ended(tmp_path, "up", "stack.yaml")
    assert done.returncode == 2
    assert "servers.0.kind" in done.stderr
    assert "typo" in done.stderr
    assert "Traceback" not in done.stderr
