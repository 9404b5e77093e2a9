"""Attention of rows whose queries and keys have a norm over all heads together, straight from their product.

The norm, the rotation and the cache need no launch of their own: the product writes moments of its columns, from which
each program of the attention norms what it loads. Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels import reference
from vla_accel.kernels.attention.config import NormedTile
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.rows.rows import normed


@dataclass(frozen=True)
class HeadsNorm:
    """RMSNorms of queries and of keys, each over all their heads together, and their rotation.

    Attributes:
        q, k: weights (heads * d,) float32. Without k the rows are queries alone.
        rope: cos and sin (T, d / 2) float32 of a sequence's rows, or None.
    """

    eps: float
    q: Tensor
    k: Tensor | None = None
    rope: tuple[Tensor, Tensor] | None = None

    @property
    def parts(self) -> int:
        """Parts of a row: q, or q, k and v."""
        return 1 if self.k is None else 3


@dataclass(frozen=True)
class Keys:
    """Keys and values (B, S, heads, d), contiguous, and their `bias` (B, S) float32, which is added to the scores of
    every query and head; None: no bias. The first key's is finite."""

    keys: Tensor
    values: Tensor
    bias: Tensor | None = None


def normed_attention(
    x: Tensor, moments: Moments, norm: HeadsNorm, out: Tensor, prefix: Keys | None = None, cache: Keys | None = None,
    tile: NormedTile | None = None,
) -> None:  # fmt: skip
    """Attention of the queries in x to the keys of a prefix, then to those in x.

    Args:
        x: (B * T, N * heads * d), N the parts of a row.
        moments: of x, in tiles of columns that divide heads * d; or of x as (B * T * N, heads * d), in one tile.
        out: (B, T, heads, d), contiguous.
        prefix: required if x has queries alone.
        cache: receives the normed and rotated keys of x, and its values; without a bias.
        tile: one of `config.normed_tiles`.
    """
    if path(x) != "reference":
        return kernels("attention.triton_normed").normed_attention(x, moments, norm, out, prefix, cache, tile)
    q, *own = (part.view(out.shape) for part in x.chunk(norm.parts, 1))
    q, keys, values, bias = _normed(q, norm.q, norm), [], [], []
    if prefix is not None:
        keys, values = [prefix.keys], [prefix.values]
        bias = [q.new_zeros(prefix.keys.shape[:2]).float() if prefix.bias is None else prefix.bias]
    if norm.k is not None:
        k, v = _normed(own[0], norm.k, norm), own[1]
        keys, values, bias = [*keys, k], [*values, v], [*bias, q.new_zeros(k.shape[:2]).float()]
        if cache is not None:
            cache.keys.copy_(k)
            cache.values.copy_(v)
    mask = torch.cat(bias, 1)[:, None] if prefix is not None and prefix.bias is not None else None
    out.copy_(reference.attention(q, torch.cat(keys, 1), torch.cat(values, 1), mask))


def _normed(x: Tensor, weight: Tensor, norm: HeadsNorm) -> Tensor:
    """Normed and rotated heads (B, T, heads, d)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    heads = (normed(x.to(wide).flatten(2), False, norm.eps) * weight).view(x.shape)
    if norm.rope is not None:
        heads = reference.apply_rope(heads, *(table[:, None].to(wide) for table in norm.rope))
    return heads.to(x.dtype)
