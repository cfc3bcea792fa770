"""Sessions ride in signed cookies, in the format of Starlette's SessionMiddleware.

Records keep what is inside a cookie, never its signature: `unsign` when it comes in, `sign` when it goes out, so a
checkpoint restores under another secret. A server's cookie is named after its class and instance.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from itsdangerous import BadSignature, TimestampSigner

from gym_servers.protocol.errors import ProtocolError

Jar = dict[str, dict[str, Any]]  # cookie name -> unsigned session contents


def cookie_name(server: str, instance: str) -> str:
    return f"{server}___{instance}"


def sign(jar: Mapping[str, Mapping[str, Any]], secret: str) -> dict[str, str]:
    """A jar as cookies."""
    signer = TimestampSigner(secret)
    return {name: signer.sign(b64encode(json.dumps(contents).encode())).decode() for name, contents in jar.items()}


def unsign(cookies: Mapping[str, str], secret: str) -> Jar:
    """Cookies as a jar. Raises `session_lost` for one that this stack did not sign."""
    signer = TimestampSigner(secret)
    try:
        return {name: json.loads(b64decode(signer.unsign(value))) for name, value in cookies.items()}
    except (BadSignature, ValueError) as error:
        raise ProtocolError("session_lost", "a session cookie is not signed with this stack's secret") from error
