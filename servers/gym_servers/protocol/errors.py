"""Refusals a peer can act on, as they go over the wire.

ProtocolError
 ├─ one code each: what the caller has to do differently
 └─ status: the HTTP status that goes with the code
"""

from __future__ import annotations

from typing import Any, Literal

Code = Literal[
    "rollout_id_required",
    "unauthorized",
    "invalid_request",
    "stale_checkpoint",
    "checkpoint_conflict",
    "invalid_phase",
    "deadline_exceeded",
    "stale_attempt",
    "admission_closed",
    "activation_out_of_order",
    "checkpoint_error",
    "install_failed",
    "session_lost",
    "invalid_checkpoint_state",
]

STATUS: dict[Code, int] = {
    "rollout_id_required": 400,
    "unauthorized": 401,
    "invalid_request": 422,
    "stale_checkpoint": 409,
    "checkpoint_conflict": 409,
    "invalid_phase": 409,
    "deadline_exceeded": 409,
    "stale_attempt": 409,
    "admission_closed": 409,
    "activation_out_of_order": 409,
    "checkpoint_error": 409,
    "install_failed": 409,
    "session_lost": 409,
    "invalid_checkpoint_state": 422,
}


class ProtocolError(Exception):
    """A call that was refused and had no effect. `detail` tells people why; it never holds a secret."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code: Code = code
        self.detail = detail

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def body(self) -> dict[str, Any]:
        """The reply body of the wire."""
        return {"error": {"code": self.code, "detail": self.detail}}


def refusal_of(status: int, body: Any) -> ProtocolError | None:
    """The refusal a peer's reply carries, or None where the reply is not one of ours."""
    if not isinstance(body, dict) or not isinstance(error := body.get("error"), dict):
        return None
    code = error.get("code")
    if code in STATUS and STATUS[code] == status:
        return ProtocolError(code, str(error.get("detail", "")))
    return None
