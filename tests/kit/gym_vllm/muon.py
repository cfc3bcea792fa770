"""Muon for a few small matrices: momentum whose singular values are all made about one (Jordan and others, 2024).

Matrices of one shape are worked on together, since a tiny one does not keep a core busy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

ITERATION = (3.4445, -4.7750, 2.0315)  # the published coefficients of its Newton-Schulz iteration
ROUNDS = 5
SCALE = 0.2  # brings an update's size to that of Adam's, so that both share one rate


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not part of every environment
    """`momentum` and `decay` as in SGD with decoupled weight decay."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
                for parameter in group["params"]:
                    shapes.setdefault(parameter.shape, []).append(parameter)
                for parameters in shapes.values():
                    self._step(parameters, group)

    def _step(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        state = self.state[parameters[0]]
        velocity = state.setdefault("velocity", torch.zeros_like(gradients))
        velocity.mul_(group["momentum"]).add_(gradients, alpha=1 - group["momentum"])
        ahead = gradients.lerp(velocity, group["momentum"])  # Nesterov's
        size = group["lr"] * SCALE * max(gradients.shape[-2:]) ** 0.5
        for parameter, update in zip(parameters, orthogonal(ahead), strict=True):
            parameter.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=size)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices, roughly."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if tall else matrices
    found = found / (found.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    first, second, third = ITERATION
    for _ in range(ROUNDS):
        square = found @ found.mT
        found = first * found + (second * square + third * square @ square) @ found
    return found.mT if tall else found
