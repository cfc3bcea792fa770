"""Which version the engine's weights have, as whoever changes them says, and how each stream's reader is told.

A version goes along inside of a stream as a comment, which every reader of server-sent events passes over: from there
on tokens are of that version.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gym_servers.capture.chunks import version_comment

if TYPE_CHECKING:
    from starlette.types import Message, Send

LONGEST = 256
TOLD_BY = {"/finish_weight_update": "weight_version", "/update_weight_version": "new_version"}
"""vLLM's own requests that name a version, and the field that does."""


class Weights:
    """`version` is empty until somebody has said one."""

    version = ""

    def take(self, given: Any) -> bool:
        """Whether it is a version; then it is the engine's from now on."""
        if not isinstance(given, str) or not given or len(given) > LONGEST:
            return False
        self.version = given
        return True

    def take_from(self, path: str, body: bytes) -> None:
        """A request of vLLM's own that has succeeded."""
        try:
            document = json.loads(body)
        except ValueError:
            return
        if isinstance(document, dict):
            self.take(document.get(TOLD_BY[path]))


class Telling:
    """Puts comments into one stream, between its events."""

    def __init__(self, weights: Weights, send: Send) -> None:
        self._weights, self._send = weights, send
        self._told, self._between, self._events = "", True, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message.get("headers", ()) if name.lower() == b"content-type"), b"")
            self._events = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and self._events and (body := message.get("body", b"")):
            if self._between and self._weights.version != self._told:
                self._told = self._weights.version
                message = {**message, "body": version_comment(self._told) + body}
            self._between = body.endswith(b"\n\n")
        await self._send(message)
