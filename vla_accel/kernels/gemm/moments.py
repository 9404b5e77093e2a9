"""Moments of rows for the next norm, written by the kernel that writes the rows.

The product after the norm then reads the rows straight into the tensor cores, and the norm is a factor of its sums.
Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.dispatch import kernels, path


@dataclass(frozen=True)
class Moments:
    """Moments of rows x (R, W) in T tiles of `columns` columns.

    `sums`, `squares` (T, R) float32: of x and of x²; `scaled` (R, W): x ∘ (1 + scale) in the dtype of x, or None if the
    norm has no scale.
    """

    sums: Tensor
    squares: Tensor
    scaled: Tensor | None
    columns: int

    @classmethod
    def like(cls, x: Tensor, columns: int, scaled: bool) -> Moments:
        """Allocate moments for x (R, W)."""
        rows, width = x.shape
        sums = torch.zeros(-(-width // columns), rows, device=x.device)
        return cls(sums, torch.zeros_like(sums), torch.zeros_like(x) if scaled else None, columns)


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
