"""One step of a network that predicts actions: its rows become actions; mixed with noise, these become its next rows.

Conventions as in `vla_accel.kernels.rows.rows`. B sequences of T rows of W numbers; the first H rows are actions of A
numbers, the others do not depend on the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.dispatch import op
from vla_accel.kernels.rows.rows import normed, store


@dataclass(frozen=True)
class Head:
    """Actions of the last rows: LayerNorm(x) · weightᵀ + bias. `weight` (A, W), `bias` (A,) float32."""

    weight: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True)
class MixedInput:
    """Rows of actions: actions · weight + base + shift.

    Attributes:
        weight: (A, W) float32.
        base: (B, H, W) float32.
        shift: (W,) float32, of the step.
        others: (B, T - H, W) in the dtype of the rows, the rows that are no actions.
    """

    weight: Tensor
    base: Tensor
    shift: Tensor
    others: Tensor


@dataclass(frozen=True)
class Mix:
    """Where a step is: `time` is the share of noise in the next rows. `first`: no actions are predicted yet, they count
    as zero; `last`: no rows follow."""

    time: float = 0.0
    first: bool = False
    last: bool = False


@op("rows.triton_mix")
def mix_step(
    x: Tensor, h: Tensor, head: Head, noise: Tensor, into: MixedInput, actions: Tensor, at: Mix, *,
    inverse_scale: float | None = None,
) -> None:  # fmt: skip
    """Between two evaluations: actions of the rows, the next rows, and their LayerNorm.

    Args:
        x: (B * T, W): the rows after all blocks, which are read unless `at.first`, and the next rows. Not written if
            `at.last`.
        h: (B * T, W): the norm of the next rows, for the first block.
        noise: (B, H, A) float32.
        actions: (B, H, A) float32, written if `at.last`.
    """
    (batch, horizon, _), width = noise.shape, x.shape[1]
    rows = x.view(batch, -1, width)
    predicted = torch.zeros_like(noise)
    if not at.first:
        predicted = (normed(rows[:, :horizon], True, head.eps) @ head.weight.T + head.bias).to(noise.dtype)
    if at.last:
        actions.copy_(predicted)
        return
    noisy = torch.lerp(predicted, noise, at.time)
    rows[:, :horizon] = (noisy @ into.weight + (into.base + into.shift)).to(x.dtype)
    rows[:, horizon:] = into.others
    store(h, normed(x, True, head.eps), inverse_scale)
