"""Components of a few numbers, for tests of engines."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def component(rows: int = 2, module: nn.Module | None = None) -> Component:
    x = TensorSpec("x", (rows, 3), torch.float32, {0: (1, 4)})
    return Component("double", module or Doubled(), (x,), (TensorSpec("y", (rows, 3), torch.float32),))


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, factor)
        nn.init.constant_(self.linear.bias, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def small(factor: float = 1.0, rows: int = 2, most: int = 4) -> Component:
    x = TensorSpec("x", (rows, 4), torch.float32, {0: (1, most)})
    return Component("small", Scaled(factor).requires_grad_(False), (x,), (TensorSpec("y", (rows, 4), torch.float32),))
