"""`/ng-rollout/<capture_key>/<path>` carries a call's episode; this middleware strips it for every handler.

Pure ASGI, because it sits on every request: no task, no body copy. Handlers read `current_episode()`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, InvalidIdentity, parse_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/ng-rollout/"
CAPTURE = "training-token-capture/"

_episode: ContextVar[Episode | None] = ContextVar("episode", default=None)


def current_episode() -> Episode | None:
    """The episode of the call being handled, None for a call without one."""
    return _episode.get()


def required_episode() -> Episode:
    """The call's episode. Raises `rollout_id_required`."""
    episode = _episode.get()
    if episode is None:
        raise ProtocolError("rollout_id_required", "call this path below /ng-rollout/<rollout id>/")
    return episode


def episode_path(episode: Episode | None, path: str) -> str:
    """`path` as a call for `episode`."""
    return path if episode is None else f"{PREFIX}{episode.key}{path}"


class EpisodePathMiddleware:
    """Strips the prefix and sets the current episode. A prefix that names none is answered 422."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        key, _, rest = scope["path"].removeprefix(PREFIX).partition("/")
        try:
            episode = parse_key(key)
        except InvalidIdentity as error:
            from starlette.responses import JSONResponse

            refusal = ProtocolError("invalid_request", str(error))
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
            return
        path = "/" + rest.removeprefix(CAPTURE)
        token = _episode.set(episode)
        try:
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        finally:
            _episode.reset(token)
