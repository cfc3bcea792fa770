"""`sandbox`: state outside the server's process - per session a directory, and a process whose commands change it.

A checkpoint takes the directory's files; a restore builds a fresh directory with a fresh process from them. A sandbox
whose process died is a lost session: it is said so, never replaced by a blank one and never scored. It keeps the
server's secrets out of its environment; it is no wall against code that means harm.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from gym_servers.protocol.errors import ProtocolError
from gym_servers.resources.file_tree import Tree, check, contents, of_texts
from gym_servers.resources.sandbox_box import Box, BoxLost, Limits
from gym_servers.resources.server import ResourcesServer, Tool, ToolCall

PARALLEL = 8  # sandboxes that work at the same time

T = TypeVar("T")


class SandboxServer(ResourcesServer):
    """Row: `files` and `expected_files`, both path -> text. Tool: `run_command{command}` -> `{exit_code, output}`;
    the exit code is null where the command took too long and was ended.

    Reward 1.0 where every expected file has its text at verify, else 0.0. Configuration: `directory`, below which the
    sandboxes live; `max_bytes` and `max_files` of one; `command_timeout_seconds`.
    """

    name = "sandbox"
    checkpoint_mode: ClassVar[Literal["stateless", "exported", "restart_only"]] = "exported"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        known = {"directory", "max_bytes", "max_files", "command_timeout_seconds"}
        if unknown := set(config) - known:
            raise ValueError(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
        base = Limits()
        self._limits = Limits(
            max_bytes=int(config.get("max_bytes", base.max_bytes)),
            max_files=int(config.get("max_files", base.max_files)),
            seconds=float(config.get("command_timeout_seconds", base.seconds)),
        )
        self._root = Path(config.get("directory") or tempfile.gettempdir(), "gym-sandboxes")
        self._boxes: dict[str, Box] = {}
        # Threads of its own: commands take their time, and checkpoints must not wait for one of the loop's threads.
        self._pool = ThreadPoolExecutor(PARALLEL, "sandbox")

    def tools(self) -> Mapping[str, Tool]:
        return {"run_command": self._run_command}

    async def _do(self, work: Callable[[], T]) -> T:
        """Run blocking work. Raises `session_lost` for a sandbox that is not what it was."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except BoxLost as error:
            raise ProtocolError("session_lost", f"the sandbox is lost: {error}") from error

    async def seed(self, session_id: str, task_data: Mapping[str, Any]) -> None:
        tree = check(of_texts(_texts(task_data, "files")), self._limits.max_bytes)
        _expected(task_data)
        await self._build({session_id: (tree, 0)})

    async def _build(self, trees: Mapping[str, tuple[Tree, int]]) -> None:
        for session_id, (_, commands) in trees.items():
            # Known before it is begun: a build that is cut short is freed by its session's name.
            self._boxes[session_id] = Box(self._place(session_id), self._limits, commands)
        await asyncio.gather(
            *(self._do(partial(self._boxes[session_id].create, tree)) for session_id, (tree, _) in trees.items())
        )

    def _place(self, session_id: str) -> Path:
        return self._root / f"{hashlib.sha256(session_id.encode()).hexdigest()[:16]}-{uuid.uuid4().hex[:8]}"

    async def _run_command(self, call: ToolCall, arguments: dict[str, Any]) -> Any:
        command = arguments.get("command")
        if not isinstance(command, str):
            raise ValueError("`command` must be a text")
        box = self._boxes[call.session_id]
        await call.effect(box.commands, box.commands + 1)
        return await self._do(partial(box.run, command))

    async def verify(self, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        files = contents(await self._do(self._boxes[session_id].tree))
        expected = _expected(body)
        wrong = sorted(name for name, text in expected.items() if files.get(name) != text.encode())
        return {"reward": 0.0 if wrong else 1.0, "wrong_files": wrong}

    async def export_session_states(self, ids: Sequence[str]) -> Mapping[str, Any]:
        states = await asyncio.gather(*(self._do(partial(_state, self._boxes[one])) for one in ids))
        return dict(zip(ids, states, strict=True))

    async def restore_session_states(self, states: Mapping[str, Any]) -> None:
        trees, lost = {}, {}
        for session_id, state in states.items():
            if state.get("lost"):
                lost[session_id] = str(state["lost"])
            else:
                trees[session_id] = check(state["files"], self._limits.max_bytes), int(state["commands"])
        # All are valid.
        for session_id, reason in lost.items():
            self._boxes[session_id] = Box(self._place(session_id), self._limits, lost=reason)
        await self._build(trees)

    async def retire_session_state(self, session_id: str) -> None:
        box = self._boxes.get(session_id)
        if box is not None:
            await self._do(box.remove)
            self._boxes.pop(session_id, None)

    async def park_session_states(self, ids: Sequence[str]) -> None:
        await asyncio.gather(*(self._do(self._boxes[one].leave) for one in ids))

    async def unpark_session_states(self, ids: Sequence[str]) -> None:
        await asyncio.gather(*(self._do(self._boxes[one].start) for one in ids if not self._boxes[one].lost))


def _state(box: Box) -> dict[str, Any]:
    """A lost sandbox is carried as lost: restored, it is still no blank one."""
    try:
        return {"commands": box.commands, "files": box.tree()}
    except BoxLost as error:
        return {"lost": str(error)}


def _expected(row: Mapping[str, Any]) -> dict[str, str]:
    """What the row asks for. Raises ValueError where it asks for nothing: any work at all would be paid for."""
    if not (expected := _texts(row, "expected_files")):
        raise ValueError("`expected_files` must name at least one file; a row for `sandbox` says what it wants")
    return expected


def _texts(row: Mapping[str, Any], name: str) -> dict[str, str]:
    files = row.get(name, {})
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ValueError(f"`{name}` must map paths to texts")
    return files
