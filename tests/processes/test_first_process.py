"""Our programs as the first process of a container, which a signal without a handler does not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST_LOADED = "typer"
NEVER_LOADED = 'import time\n\nprint("loading", flush=True)\ntime.sleep(60)\n'


@pytest.mark.parametrize("program", ["gym_servers", "gym_operator"])
def test_a_program_that_is_still_loading_ends_when_it_is_told_to(tmp_path: Path, program: str) -> None:
    (tmp_path / f"{FIRST_LOADED}.py").write_text(NEVER_LOADED)
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "servers"), str(ROOT / "operator")])
    alone = ["unshare", "--pid", "--fork", "--kill-child", *([] if os.geteuid() == 0 else ["--user"])]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a process the first of a namespace")
    with subprocess.Popen(
        [*alone, sys.executable, "-m", program],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "loading\n"
            (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGTERM)
            assert parent.wait(10) == 128 + signal.SIGTERM
        finally:
            parent.kill()
