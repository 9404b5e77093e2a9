"""Record the noise that a policy draws, and draw the same kind again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NORMAL, _UNIFORM = ("aten::randn", "aten::normal"), ("aten::rand",)


@dataclass(frozen=True)
class Draws:
    """Random numbers that a call of a policy drew.

    Attributes:
        tensors: In the order of the draws, each (B, *shape) or (B, numbers).
        shape: Of the noise of one observation.
        uniform: Whether they lie in [0, 1), and the noise in [-1, 1); otherwise they are the noise.
    """

    tensors: tuple[Tensor, ...] = ()
    shape: tuple[int, ...] = ()
    uniform: bool = False

    def again(self, batch: int) -> Draws:
        """Draw as many tensors of the same kind from torch's global generator, for a batch of another size."""
        draw = torch.rand if self.uniform else torch.randn
        made = (draw(batch, *one.shape[1:], dtype=one.dtype, device=one.device) for one in self.tensors)
        return replace(self, tensors=tuple(made))

    def noise(self) -> Tensor | None:
        """Return the noise (B, *shape), or of several draws (B, draws, *shape); None without draws."""
        rows = [one.reshape(-1, *self.shape) for one in self.tensors]
        rows = [one * 2 - 1 if self.uniform else one for one in rows]
        return torch.stack(rows, 1) if len(rows) > 1 else rows[0] if rows else None


class RecordedNoise(TorchDispatchMode):
    """Within this context, keep the random numbers that torch draws for noise of this shape in `draws`."""

    def __init__(self, shape: Sequence[int], *, uniform: bool) -> None:
        super().__init__()
        self.draws = Draws((), tuple(shape), uniform)
        self._kinds = _UNIFORM if uniform else _NORMAL
        self._shapes = (self.draws.shape, (math.prod(shape),))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.name().partition(".")[0]
        is_noise = name.removesuffix("_like").rstrip("_") in self._kinds and isinstance(result, Tensor)
        if is_noise and tuple(result.shape[1:]) in self._shapes:
            kept = result.detach().clone()
            self.draws = replace(self.draws, tensors=(*self.draws.tensors, kept))
        return result
