"""An S3 server with faults: a proxy before a real one, which does to each request what a test wants.

    with FaultyS3(s3.endpoint) as faulty:
        faulty.fault = refusing(503, "SlowDown")
        ... use faulty.endpoint; faulty.asked has what came in ...

A fault gets the request and a way to pass it on, and gives the answer. Without one everything is passed on as it is;
requests are signed for the address they are sent to, which the proxy leaves in place.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}
UPSTREAM_SECONDS = 60


@dataclass(frozen=True)
class Asked:
    """A request; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    @property
    def key(self) -> str:
        """Bucket and key, without the query."""
        return unquote(urlsplit(self.path).path).lstrip("/")


@dataclass(frozen=True)
class Answer:
    """`cut`: only the first half of the body goes out, then the connection ends."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    cut: bool = False


Pass = Callable[[Asked], Answer]
Fault = Callable[[Asked, Pass], Answer]
When = Callable[[Asked], bool]


def anything(_: Asked) -> bool:
    return True


def reading(part: str = "") -> When:
    """GET of an object whose key has `part`; not a list."""
    return lambda asked: asked.method == "GET" and part in asked.key and "list-type" not in asked.path


def writing(part: str = "") -> When:
    return lambda asked: asked.method == "PUT" and part in asked.key


# ---- faults -------------------------------------------------------------------------------------------------


def untouched(asked: Asked, onward: Pass) -> Answer:
    return onward(asked)


def refusing(status: int, code: str, when: When = anything, *, times: int | None = None, more: str = "") -> Fault:
    """Refuse with an S3 error; `times` None: for ever. `more`: further elements of its document."""
    left = [times]

    def fault(asked: Asked, onward: Pass) -> Answer:
        if not when(asked) or left[0] == 0:
            return onward(asked)
        if left[0] is not None:
            left[0] -= 1
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message>{more}</Error>"
        return Answer(status, (("content-type", "application/xml"),), text.encode())

    return fault


def late(seconds: float, when: When = anything) -> Fault:
    """Answer only after a while."""

    def fault(asked: Asked, onward: Pass) -> Answer:
        if when(asked):
            time.sleep(seconds)
        return onward(asked)

    return fault


def cutting(when: When = anything, *, times: int | None = None) -> Fault:
    """End the connection in the middle of an answer."""
    left = [times]

    def fault(asked: Asked, onward: Pass) -> Answer:
        answer = onward(asked)
        if not when(asked) or left[0] == 0:
            return answer
        if left[0] is not None:
            left[0] -= 1
        return replace(answer, cut=True)

    return fault


def changing(change: Callable[[bytes], bytes], when: When = anything) -> Fault:
    """Give an object's bytes as `change` makes them: as if that had been stored."""

    def fault(asked: Asked, onward: Pass) -> Answer:
        answer = onward(asked)
        return replace(answer, body=change(answer.body)) if when(asked) and answer.status == 200 else answer

    return fault


def with_trailer(body: bytes) -> bytes:
    """What servers store that take a checksum trailer for a part of the object."""
    return body + b"\r\n0\r\nx-amz-checksum-crc32:sOO8/Q==\r\n\r\n"


def overwriting(delete: Callable[[str], None]) -> Fault:
    """Ignore If-None-Match: what is there is taken away by `delete` (bucket and key) before it is written again."""

    def fault(asked: Asked, onward: Pass) -> Answer:
        if asked.method == "PUT" and "if-none-match" in asked.headers:
            delete(asked.key)
        return onward(asked)

    return fault


def without_new_checksums(asked: Asked, onward: Pass) -> Answer:
    """A server that knows nothing of the checksums that newer clients send by themselves."""
    new = [
        name for name in asked.headers if name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer"))
    ]
    if new or "aws-chunked" in asked.headers.get("content-encoding", ""):
        return refusing(400, "InvalidArgument")(asked, onward)
    return onward(asked)


def without(part: str, access_key: str, secret_key: str) -> Fault:
    """Pass on without the headers whose name has `part`, signed anew."""

    def fault(asked: Asked, onward: Pass) -> Answer:
        kept = {name: value for name, value in asked.headers.items() if part not in name and name in _RESIGNED}
        url = f"http://{asked.headers['host']}{asked.path}"
        request = AWSRequest(asked.method, url, headers=kept, data=asked.body)
        S3SigV4Auth(Credentials(access_key, secret_key), "s3", "us-east-1").add_auth(request)
        signed = {name.lower(): str(value) for name, value in request.headers.items()}
        return onward(replace(asked, headers={**signed, "host": asked.headers["host"]}))

    return fault


_RESIGNED = {"content-type", "if-none-match"}


def all_of(*faults: Fault) -> Fault:
    """One inside the other, the first outermost."""

    def fault(asked: Asked, onward: Pass) -> Answer:
        for inner in reversed(faults):
            onward = _inside(inner, onward)
        return onward(asked)

    return fault


def _inside(fault: Fault, onward: Pass) -> Pass:
    return lambda asked: fault(asked, onward)


# ---- the proxy ----------------------------------------------------------------------------------------------


class FaultyS3:
    """Listens on a port of the loopback interface. With `certificate` (a .crt and a .key) it speaks TLS."""

    def __init__(self, upstream: str, certificate: tuple[Path, Path] | None = None) -> None:
        self.fault: Fault = untouched
        self.asked: list[Asked] = []
        self._upstream = urlsplit(upstream).netloc
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._certificate = certificate
        if certificate is not None:
            self.trust(certificate)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.server_address[1]}"

    def trust(self, certificate: tuple[Path, Path]) -> None:
        """Show this certificate to those who connect from now on."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        self._server.context = context

    def hang_up(self) -> None:
        """End the connections that stand, so that the next requests make new ones."""
        self._server.hang_up()

    def heal(self) -> None:
        self.fault = untouched
        self.asked.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()
        self._thread.join()

    def answer(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        return self.fault(asked, self._pass)

    def _pass(self, asked: Asked) -> Answer:
        connection = http.client.HTTPConnection(self._upstream, timeout=UPSTREAM_SECONDS)
        try:
            connection.putrequest(asked.method, asked.path, skip_host=True, skip_accept_encoding=True)
            for name, value in asked.headers.items():
                if name not in HOP_BY_HOP:
                    connection.putheader(name, value)
            if asked.method in ("PUT", "POST"):
                connection.putheader("content-length", str(len(asked.body)))
            connection.endheaders(asked.body or None)
            response = connection.getresponse()
            headers = tuple((name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP)
            return Answer(response.status, headers, response.read())
        except (OSError, http.client.HTTPException):
            return refusing(502, "BadGateway")(asked, self._pass)
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    context: ssl.SSLContext | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._standing: set[Any] = set()

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            if self.context is not None:  # in the connection's own thread: a slow handshake holds up nobody else
                request = self.context.wrap_socket(request, server_side=True)
            self._standing.add(request)
            super().finish_request(request, client_address)
        except OSError:
            pass  # a client that does not trust us, or that went away
        finally:
            self._standing.discard(request)
            request.close()

    def hang_up(self) -> None:
        for request in list(self._standing):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyS3
    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        answer = self.owner.answer(Asked(self.command, self.path, headers, body))
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD" and answer.status != 304:
            self.wfile.write(answer.body[: len(answer.body) // 2] if answer.cut else answer.body)
        if answer.cut:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
