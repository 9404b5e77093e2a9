"""Attention of a suffix: to the keys of a prefix and its own, or to a prefix alone, also with its queries' product
inside.

Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels import reference
from vla_accel.kernels.attention import config as attention_config
from vla_accel.kernels.attention.config import CrossShape, CrossTile, KeySplit, SuffixShape
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.gemm.epilogue import Heads, Norm
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.rows import normed
from vla_accel.runtime import current

AttentionWorkspace = tuple[Tensor, Tensor, Tensor]
"""Parts and statistics of programs that share keys, and the counters of those that have arrived."""


@dataclass(frozen=True)
class Prefix:
    """Keys and values (B, S, kv_heads, d), contiguous, of which sequence b has lengths[b]; `lengths` (B,) int32."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


def suffix_workspace(sizes: SuffixShape, device: torch.device, config: KeySplit | None = None) -> AttentionWorkspace:
    """Allocate what `suffix_attention` keeps between its programs. The counters start as zero, and each call resets
    them.
    """
    if path(device) == "reference":
        return (torch.empty(0), torch.empty(0), torch.empty(0))
    config = config or attention_config.key_splits(current(device).gpu, sizes)[0]
    parts, stats, counters = config.workspace(sizes)
    return (
        torch.empty(parts, device=device),
        torch.empty(stats, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def crossing(x: Tensor, layer: Linear, keys: Tensor) -> CrossShape:
    """Describe the problem of `cross_attention`."""
    batch, source, _, head_dim = keys.shape
    heads, kinds = len(layer.weight) // head_dim, (layer.weight.element_size(), x.element_size(), layer.integers)
    return CrossShape(batch, len(x) // batch, x.shape[1], source, heads, head_dim, *kinds)


def suffix_attention(
    suffix: Heads, prefix: Prefix, out: Tensor, workspace: AttentionWorkspace, *, state_first: bool,
    causal: bool = False, config: KeySplit | None = None,
) -> None:  # fmt: skip
    """Attention of the suffix to the first `lengths[b]` keys of the prefix and to itself.

    Args:
        out: (B * T, heads * d). All tensors are contiguous.
        workspace: made by `suffix_workspace` for the same `config`.
        state_first: the first token attends to the prefix and itself only (π0).
        causal: no token attends to a later one.
    """
    q = suffix.q
    batch, tokens, heads, head_dim = q.shape
    if path(q) != "reference":
        prefix_tokens, kv_heads = prefix.keys.shape[1:3]
        sizes = SuffixShape(batch, tokens, prefix_tokens, heads, kv_heads, head_dim, q.element_size())
        config = config or attention_config.key_splits(current(q).gpu, sizes)[0]
        return kernels("attention.triton_attention").suffix_attention(
            suffix, prefix, out, workspace, sizes, config, state_first=state_first, causal=causal
        )
    inner = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    if state_first:
        inner[0, 1:] = False
    if causal:
        inner = inner.tril()
    outer = torch.arange(prefix.keys.shape[1], device=q.device) < prefix.lengths[:, None]
    mask = torch.cat((outer[:, None].expand(-1, tokens, -1), inner.expand(batch, -1, -1)), 2)
    keys, values = torch.cat((prefix.keys, suffix.k), 1), torch.cat((prefix.values, suffix.v), 1)
    values = values.masked_fill(~torch.cat((outer, outer.new_ones(batch, tokens)), 1)[:, :, None, None], 0)
    out.copy_(reference.attention(q, keys, values, mask).reshape(out.shape))


def prefix_attention(
    q: Tensor, prefix: Prefix, out: Tensor, workspace: AttentionWorkspace, *, config: KeySplit | None = None,
    eps: float | None = None,
) -> None:  # fmt: skip
    """Attention of queries (B, T, heads, d) to the first `lengths[b]` keys of the prefix alone. Arguments as of
    `suffix_attention`; the workspace is that of a shape without `own` keys. `eps`: of an RMSNorm of each query first,
    without weights; None: none."""
    batch, tokens, heads, head_dim = q.shape
    prefix_tokens, kv_heads = prefix.keys.shape[1:3]
    if path(q) != "reference":
        sizes = SuffixShape(batch, tokens, prefix_tokens, heads, kv_heads, head_dim, q.element_size(), own=False)
        config = config or attention_config.key_splits(current(q).gpu, sizes)[0]
        return kernels("attention.triton_attention").suffix_attention(
            Heads(q, q, q), prefix, out, workspace, sizes, config, state_first=False, causal=False, eps=eps
        )
    q = q if eps is None else normed(q, False, eps).to(q.dtype)
    real = torch.arange(prefix_tokens, device=q.device) < prefix.lengths[:, None]
    values = prefix.values.masked_fill(~real[:, :, None, None], 0)
    out.copy_(reference.attention(q, prefix.keys, values, real[:, None].expand(-1, tokens, -1)).reshape(out.shape))


def cross_attention(
    x: Tensor, weights: Linear, rope: tuple[Tensor, Tensor], prefix: Prefix, out: Tensor, *, norm: Norm,
    config: CrossTile | None = None,
) -> None:  # fmt: skip
    """Norm, query projection and rotation of the suffix, and attention to the prefix only. Positions start at 0.

    Args:
        x: (B * T, W).
        weights: of the queries, (heads * d, W).
        rope: cos and sin, (positions, d / 2) float32.
        out: (B * T, heads * d). All tensors are contiguous.
        norm: of x, an RMSNorm without a scale.
        config: one of `attention_config.cross_tiles`.
    """
    keys, values, (cos, sin) = prefix.keys, prefix.values, rope
    if path(x) != "reference":
        config = config or attention_config.cross_tiles(current(x).gpu, crossing(x, weights, keys))[0]
        return kernels("attention.triton_cross").cross_attention(x, weights, rope, prefix, out, norm, config)
    batch, source, _, head_dim = keys.shape
    tokens = len(x) // batch
    q = torch.empty(len(x), len(weights.weight), dtype=torch.promote_types(torch.float32, x.dtype), device=x.device)
    gemm(x, weights, q, norm=norm)
    q = q.view(batch, tokens, -1, head_dim)
    q = reference.apply_rope(q, cos[:tokens, None].to(q.dtype), sin[:tokens, None].to(q.dtype))
    real = torch.arange(source, device=x.device) < prefix.lengths[:, None]
    values = values.masked_fill(~real[:, :, None, None], 0)
    mask = real[:, None].expand(-1, tokens, -1)
    out.copy_(reference.attention(q.to(keys.dtype), keys, values, mask).reshape(out.shape))
