"""Moments of rows for the next norm, written by the kernel that writes the rows.

The product after the norm then reads the rows straight into the tensor cores, and the norm is a factor of its sums.
Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.reference import MOMENTS_OF


@dataclass(frozen=True)
class Moments:
    """Moments of rows x (R, W) in T tiles of `columns` columns.

    `sums`, `squares` (T, R) float32: of x and of x²; `scaled` (R, W): x ∘ (1 + scale) in the dtype of x, or None if the
    norm has no scale.

    RMSNorm reads `squares` alone. A LayerNorm's variance, squares / W - (sums / W)², loses about (mean / std)² of
    float32's 2⁻²⁴ to cancellation. Rounding the rows to BF16 or FP16, which all kernels with moments take, loses
    mean / std of 2⁻⁹ or 2⁻¹², which is more for every mean below 4000 std. So deviations from a mean are not stored.
    """

    sums: Tensor
    squares: Tensor
    scaled: Tensor | None
    columns: int

    @classmethod
    def like(cls, x: Tensor, columns: int = MOMENTS_OF, scaled: bool = False) -> Moments:
        """Allocate moments for x (R, W)."""
        rows, width = x.shape
        sums = torch.zeros(-(-width // columns), rows, device=x.device)
        return cls(sums, torch.zeros_like(sums), torch.zeros_like(x) if scaled else None, columns)

    @classmethod
    def of_normed(cls, x: Tensor, eps: float) -> Moments:
        """Return moments with which a norm does not change rows x (R, W) that are normed already."""
        made = cls.like(x)
        made.squares.fill_((1.0 - eps) * x.shape[1] / len(made.squares))
        return made


def measure(x: Tensor, scale: Tensor | None, out: Moments) -> None:
    """Compute the moments of x (R, W), for rows that no product has written.

    `scale` (W,) float32 of the norm, or None; `out` has one tile.
    """
    if path(x) != "reference":
        kernels("gemm.triton_moments").measure(x, scale, out)
    else:
        write(x, scale, out)


def write(x: Tensor, scale: Tensor | None, out: Moments) -> None:
    """`measure` in torch, for any number of tiles."""
    for tile, columns in enumerate(x.to(torch.promote_types(torch.float32, x.dtype)).split(out.columns, 1)):
        out.sums[tile] = columns.sum(1)
        out.squares[tile] = columns.square().sum(1)
    if out.scaled is not None:
        assert scale is not None
        out.scaled.copy_(x * (1.0 + scale))
