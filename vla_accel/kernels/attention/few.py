"""Attention of one sequence of up to 16 rows, in one kernel with the product before or after it.

For denoise loops of few rows, where the launches between products take as long as the products. Heads of queries and
keys are normed without weights. Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vla_accel.kernels import reference
from vla_accel.kernels.attention.config import KeySplit, SuffixShape
from vla_accel.kernels.attention.suffix import AttentionWorkspace, Prefix, prefix_attention
from vla_accel.kernels.config import too_large
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.gemm.config import GemmSizes, Skinny, skinny
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows.rows import HeadNorms, normed, rotate
from vla_accel.numeric import power_of_two

ROWS = 16
WARPS = 8
MOST_VALUES = 16 * 64
"""Columns of all heads that a program holds in registers, for `ROWS` rows."""


@dataclass(frozen=True)
class Queries:
    """The product that makes queries.

    `weights`: (heads * d, W); `norm`: of the rows, without moments; `shift`: (heads * d,) float32, added to the
    product; `eps`: of the norm of each head.
    """

    weights: Linear
    norm: Norm
    shift: Tensor
    eps: float


def why_not(gpu: Gpu | None, sizes: SuffixShape) -> str | None:
    """Explain why neither `attention_into` nor `query_attention` runs a shape; None if the former does."""
    if sizes.batch != 1 or sizes.tokens > ROWS:
        return f"it is for one sequence of up to {ROWS} rows, not {sizes.batch} of {sizes.tokens}"
    if sizes.heads != sizes.kv_heads:
        return f"it is for as many key heads as query heads, not {sizes.kv_heads} and {sizes.heads}"
    values = power_of_two(sizes.heads) * sizes.block_d
    if values > MOST_VALUES:
        return f"its registers do not hold {sizes.heads} heads of {sizes.head_dim}"
    return too_large("it", 3 * ROWS * values * sizes.bytes, gpu)


def head_tile(gpu: Gpu | None, sizes: SuffixShape, k: int, keys: int) -> Skinny | None:
    """Return the tile of the product of K columns in `query_attention` with so many keys: all columns of a head, and as
    many chunks of weights before the wait as shared memory holds. None if it holds none."""
    tile = skinny(GemmSizes(sizes.tokens, k, sizes.head_dim, sizes.heads, row_bytes=sizes.bytes), gpu)
    others = ROWS * tile.block_k + 2 * keys * sizes.block_d
    for early in range(tile.early, 0, -1):
        if too_large(tile, sizes.bytes * (early * tile.block_k * sizes.block_d + others), gpu) is None:
            return replace(tile, columns=sizes.block_d, early=early)
    return None


def query_splits(gpu: Gpu | None, sizes: SuffixShape, k: int) -> list[KeySplit]:
    """Return the configs of `query_attention` worth measuring: one tile of keys a program. `k`: columns of a row."""
    found = (KeySplit(ROWS, keys, 1, 1, WARPS) for keys in (64, 128, 32))
    return [split for split in found if head_tile(gpu, sizes, k, split.keys) is not None]


def attention_into(
    qkv: Tensor, rope: tuple[Tensor, Tensor], weights: Linear, out: Tensor, epilogue: Epilogue, eps: float
) -> None:
    """out = epilogue(attention(qkv) Wᵀ), of rotated queries and keys, whose heads are normed first.

    Args:
        qkv: (T, 3 * heads * d), contiguous.
        rope: cos and sin, (T, d / 2) float32.
        weights: (N, heads * d).
        out: (T, N), contiguous.
        epilogue: bias or shift, gate, and residual. No moments are written.
        eps: of the norm of each head.
    """
    if path(qkv) != "reference":
        return kernels("attention.triton_few").attention_into(qkv, rope, weights, out, epilogue, eps)
    rows, one = qkv.clone(), torch.ones(2 * rope[0].shape[1], device=qkv.device)
    heads = weights.weight.shape[1] // len(one)
    rotate(rows, *rope, heads, HeadNorms(one, one, eps))
    q, k, v = rows.view(1, len(rows), 3, heads, -1).unbind(2)
    gemm(reference.attention(q, k, v, None).flatten(2)[0].contiguous(), weights, out, epilogue)


def query_attention(
    x: Tensor, queries: Queries, prefix: Prefix, out: Tensor, workspace: AttentionWorkspace,
    config: KeySplit | None = None,
) -> None:  # fmt: skip
    """Norm, query product, norm of each head, and attention to the first `lengths[0]` keys of the prefix.

    Args:
        x: (T, W).
        out: (T, heads * d). All tensors are contiguous.
        workspace: made by `suffix_workspace` for the same `config`, one of `query_splits`.
    """
    if path(x) != "reference":
        return kernels("attention.triton_few").query_attention(x, queries, prefix, out, workspace, config)
    heads, head_dim = prefix.keys.shape[2:]
    q = torch.empty(
        len(x), len(queries.weights.weight), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
    )
    gemm(x, queries.weights, q, Epilogue(queries.shift), queries.norm)
    q = normed(q.view(1, len(x), heads, head_dim), False, queries.eps).to(x.dtype)
    prefix_attention(q, prefix, out, workspace)
