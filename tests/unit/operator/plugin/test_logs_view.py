"""Which pods' logs are meant, and what is said where there are none of them."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.api import names
from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.views.logs import chosen


def pod(server: str, cell: int | None) -> dict[str, Any]:
    component = names.ENGINE_COMPONENT if cell is None else server
    name = f"demo-{server}-{'7d9f-x' if cell is None else cell}"
    labels = {names.SERVER_LABEL: server, names.COMPONENT_LABEL: component}
    return {"metadata": {"uid": name, "name": name, "namespace": "team", "labels": labels}}


PODS = [pod("env", 0), pod("env", 1), pod("agent", 0), pod("vllm", None)]


def test_pods_are_chosen_by_server_and_cell() -> None:
    assert [one.name for one in chosen(PODS, "env", None)] == ["demo-env-0", "demo-env-1"]
    assert [one.name for one in chosen(PODS, None, 0)] == ["demo-agent-0", "demo-env-0"]
    assert chosen([], "nope", 7) == []


@pytest.mark.parametrize(
    ("server", "cell", "says"),
    [
        ("nope", None, "no server nope in this stack has a pod: there are agent, env, vllm"),
        ("nope", 0, "no server nope in this stack has a pod: there are agent, env, vllm"),
        (None, 7, "no pod of this stack is in cell 7: look in 0, 1"),
        ("agent", 1, "no pod of server agent is in cell 1: look in 0"),
        ("vllm", 0, "no pod of server vllm is in a cell: leave --cell out"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(server: str | None, cell: int | None, says: str) -> None:
    with pytest.raises(Unusable) as refused:
        chosen(PODS, server, cell)
    assert str(refused.value) == says
