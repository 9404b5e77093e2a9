"""Record the noise that a policy draws, and draw the same kind again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DRAWS = ("aten::randn", "aten::normal")


class RecordedNoise(TorchDispatchMode):
    """Within this context, keep every tensor (B, *shape) of normally distributed numbers that torch draws."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_noise = func.name().startswith(_DRAWS) and isinstance(result, Tensor)
        if is_noise and tuple(result.shape[1:]) == self.shape:
            self.drawn.append(result.detach().clone())
        return result


def draw_like(drawn: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Draw as many tensors of the same kind from torch's global generator, for a batch of another size."""
    return [torch.randn(batch, *one.shape[1:], dtype=one.dtype, device=one.device) for one in drawn]
