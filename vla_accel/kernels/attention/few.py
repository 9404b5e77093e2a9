"""Self-attention of short sequences of actions, with the norms of heads and their rotation in the same kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_accel.kernels import reference
from vla_accel.kernels.dispatch import op
from vla_accel.kernels.rows.rows import HeadNorms, rotate

MOST_ROWS = 64
"""Rows of a sequence that a program holds."""


@op("attention.triton_few")
def few_attention(qkv: Tensor, rope: tuple[Tensor, Tensor], out: Tensor, *, heads: int, eps: float) -> None:
    """Attention of rotated queries and keys, whose heads are normed first, without weights.

    Args:
        qkv: (B * T, 3 * heads * d), contiguous.
        rope: cos and sin, (T, d / 2) float32; T is at most `MOST_ROWS`.
        out: (B * T, heads * d), contiguous.
        eps: of the norm of each head.
    """
    one = torch.ones(2 * rope[0].shape[1], device=qkv.device)
    rows = qkv.clone()
    rotate(rows, *rope, heads, HeadNorms(one, one, eps))
    q, k, v = rows.view(-1, len(rope[0]), 3, heads, len(one)).unbind(2)
    out.copy_(reference.attention(q, k, v, None).reshape(out.shape))
