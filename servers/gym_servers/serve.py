"""Runs one server process: its data port, and its control port where checkpointing is on.

The process begins closed; whoever coordinates the cell opens it. It ends without unwinding: a handler that is
cancelled would answer its peer with an error that the peer must take for an answer. A connection that breaks off is
tried again, and finds the fresh process. When it ends after SIGTERM says `gym_servers.control.departure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import uvicorn
from fastapi import FastAPI

from gym_servers.assemble import Server, assemble
from gym_servers.control.app import control_app
from gym_servers.control.departure import Departure
from gym_servers.control.plane import ControlPlane
from gym_servers.control.tokens import tokens_of_process
from gym_servers.stack.settings import AWAIT_FINAL, ServerSettings, SettingsError, read_secret

log = logging.getLogger("gym_servers")


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's, not one of its servers'."""
        yield


def listener(app: FastAPI, host: str, port: int) -> uvicorn.Server:
    return _Uvicorn(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            backlog=1024,
        )
    )


def refuse_workers(settings: ServerSettings) -> None:
    """Raise SettingsError where several workers are asked for: sessions and phases are in the memory of one process,
    and a call that lands on another worker would find a session lost, or pass a gate that is closed."""
    wanted = os.environ.get("WEB_CONCURRENCY", "").strip()
    if settings.checkpoint.enabled and wanted not in ("", "1"):
        raise SettingsError(
            f"WEB_CONCURRENCY={wanted[:20]}: a server with checkpoints is one process, which alone has its sessions; "
            "set it to 1 or leave it out, and run more cells instead"
        )


def prepare(settings: ServerSettings) -> tuple[list[uvicorn.Server], Server]:
    """What a process serves, before anything is opened. Raises SettingsError."""
    refuse_workers(settings)
    enabled = settings.checkpoint.enabled
    cookies, tokens = read_secret("GYM_COOKIE_SECRET"), tokens_of_process() if enabled else None
    server = assemble(settings, cookies, tokens)
    listeners = [listener(server.app, settings.host, settings.data_port)]
    if tokens is not None:
        plane = ControlPlane(
            server.participant, server.author, server.open_store, grace=settings.checkpoint.lease_grace_seconds
        )
        control = control_app(plane, tokens)
        listeners.insert(0, listener(control, settings.host, settings.control_port))
        departure = Departure(plane, patient=bool(os.environ.get(AWAIT_FINAL)))
        server = replace(server, ending=departure.told)
    return listeners, server


async def run(listeners: list[uvicorn.Server], server: Server | None = None) -> None:
    """Run listeners, and a server's background work, until a signal or until one of them fails."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, server)
    background = None
    if server is not None and server.background is not None:
        background = asyncio.ensure_future(server.background())
        background.add_done_callback(_report)
    try:
        await asyncio.gather(*(each.serve() for each in listeners))
    finally:
        if background is not None:
            background.cancel()


def _end(server: Server | None) -> None:
    """At once, or once what is still to be done is done."""
    parking = server.ending() if server is not None else None
    if parking is None:
        os._exit(0)
    else:
        asyncio.ensure_future(parking).add_done_callback(lambda _: os._exit(0))


def _report(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background work failed: %s", error, exc_info=error)
