"""Plain data of the image operations: a value that is not added up yet, and a group norm's parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sum:
    """`value` + `residual` + `shift`, (B, H, W, C).

    `shift` is float32, (C,) or (B, C). With `phased`, `value` is what `conv_phases` gives, (B, H/2 + 1, W/2 + 1, 4 C).
    """

    value: Tensor
    residual: Tensor | None = None
    shift: Tensor | None = None
    phased: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, height, width, channels = self.value.shape
        return (
            (batch, 2 * height - 2, 2 * width - 2, channels // 4) if self.phased else (batch, height, width, channels)
        )


@dataclass(frozen=True)
class GroupNorm:
    """A group norm's parameters in float32, so that the kernels need no casts."""

    groups: int
    weight: Tensor
    bias: Tensor
    eps: float
