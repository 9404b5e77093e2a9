"""What a norm needs of its rows, written by whoever writes the rows: then the product behind the norm reads the rows as
they are, straight into the tensor cores, and the norm is a factor of its sums.

Conventions as in `vla_accel.ops.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.ops.dispatch import kernels, path


@dataclass(frozen=True)
class Moments:
    """Of rows x (R, W): `sums`, `squares` (T, R) float32 of each tile of `columns` columns, of x and of x²; `scaled`
    (R, W): x ∘ (1 + scale) in the dtype of x where the norm scales, else None."""

    sums: Tensor
    squares: Tensor
    scaled: Tensor | None
    columns: int

    @classmethod
    def like(cls, x: Tensor, columns: int, scaled: bool) -> Moments:
        """Room for those of x (R, W)."""
        rows, width = x.shape
        sums = torch.zeros(-(-width // columns), rows, device=x.device)
        return cls(sums, torch.zeros_like(sums), torch.zeros_like(x) if scaled else None, columns)


def measure(x: Tensor, scale: Tensor | None, out: Moments) -> None:
    """The moments of x (R, W), and x ∘ (1 + `scale`) (W,) float32, for rows that no product has written. `out` has one
    tile."""
    if path(x) != "reference":
        kernels("moments").measure(x, scale, out)
    else:
        write(x, scale, out)


def write(x: Tensor, scale: Tensor | None, out: Moments) -> None:
    """`measure` without kernels, in any number of tiles."""
    for tile, columns in enumerate(x.to(torch.promote_types(torch.float32, x.dtype)).split(out.columns, 1)):
        out.sums[tile] = columns.sum(1)
        out.squares[tile] = columns.square().sum(1)
    if out.scaled is not None:
        assert scale is not None
        out.scaled.copy_(x * (1.0 + scale))
