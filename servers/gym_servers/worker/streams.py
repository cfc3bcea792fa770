"""The tokens of every stream that an engine sends, by ticket, as they pass."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from gym_servers.capture.chunks import Lines, add, delta_of
from gym_servers.capture.tokens import Frozen, Tokens

MOST_ENDED = 1024  # streams that have ended and may not have arrived yet


class PassingStream:
    """One stream. Bytes come in any pieces; what cannot be understood makes the stream unusable, never the reply."""

    def __init__(self) -> None:
        self._tokens, self._lines, self._broken = Tokens(), Lines(), False

    def feed(self, data: bytes, version: str = "") -> None:
        """Bytes as they pass, under the weights of a version where the engine itself does not say which."""
        if self._broken:
            return
        try:
            for line in self._lines.feed(data):
                if (delta := delta_of(line)) is not None:
                    add(self._tokens, delta if delta.version else replace(delta, version=version), 0)
        except ValueError:  # NoChunk is one too
            self._broken = True

    def frozen(self) -> Frozen:
        """Raises ValueError where the stream could not be followed."""
        if self._broken:
            raise ValueError("a chunk could not be read")
        return self._tokens.frozen()


class Streams:
    """Streams by ticket; those that have ended are kept for a while, oldest first to go."""

    def __init__(self) -> None:
        self._running: dict[str, PassingStream] = {}
        self._ended: OrderedDict[str, PassingStream] = OrderedDict()

    def begin(self, ticket: str) -> PassingStream:
        stream = self._running[ticket] = PassingStream()
        return stream

    def end(self, ticket: str, stream: PassingStream) -> None:
        if self._running.get(ticket) is not stream:
            return  # whoever stands between has sent the request again: the later stream has its place
        self._ended[ticket] = self._running.pop(ticket)
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def find(self, ticket: str) -> PassingStream | None:
        return self._running.get(ticket) or self._ended.get(ticket)
