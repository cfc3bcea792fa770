"""What is said of a restore."""

from __future__ import annotations

from typing import Any

from gym_operator.plugin.views import restores as views


def body(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "back"}, "status": status}


def test_progress_is_a_line() -> None:
    assert views.progress_of({"metadata": {"name": "back"}}) == "Pending: waits for the operator"
    assert views.progress_of(body(phase="Restoring", message="servers are replaced")) == (
        "Restoring: servers are replaced"
    )


def test_what_came_of_it_is_a_line() -> None:
    cells = [
        {"index": 0, "uri": "u", "digest": "d", "attempt": 4},
        {"index": 1, "uri": "u", "digest": "d", "attempt": 2},
    ]
    done = body(checkpoint={"name": "one", "id": "one-1"}, continuedCount=1, cells=cells)
    assert views.outcome_of(done) == (
        "rollouts that continue from one: 1; cell 0 under attempt 4, cell 1 under attempt 2"
    )
    assert views.failure_of(body(reason="Misfit", message="other servers")) == "Misfit: other servers"
    assert views.failure_of(body()) == "without a reason"
