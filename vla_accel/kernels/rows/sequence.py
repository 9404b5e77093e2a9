"""Ops of a multimodal prompt: patches in blocks, placed tokens, normed and rotated heads, causal attention.

Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.kernels.dispatch import kernels, path


def patchify_blocks(images: Tensor, out: Tensor, patch: int, merge: int) -> None:
    """As `rows.patchify`, for images (N, H, W, 3) of any size, in blocks of `merge` x `merge` patches that follow one
    another. out (N * patches, 2 * stride), stride at least 3 * patch²."""
    if path(images) != "reference":
        return kernels("rows.triton_sequence").patchify_blocks(images, out, patch, merge)
    n, height, width = images.shape[:3]
    side, stride = patch * merge, out.shape[1] // 2
    split = images.permute(0, 3, 1, 2).reshape(n, 3, height // side, merge, patch, width // side, merge, patch)
    rows = split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(out), -1).to(out.dtype)
    rows = F.pad(rows, (0, stride - 3 * patch * patch))
    out.copy_(torch.cat((rows, rows), 1))


def place_tokens(image_tokens: Tensor, tokens: Tensor, table: Tensor, order: Tensor, x: Tensor) -> None:
    """Write the rows x (B * S, W) of prompts: row s is number order[s] of the image tokens (B, I, W) followed by the
    embedded `tokens` (B, L) int64. order (S,) int64, S = I + L.
    """
    if path(x) != "reference":
        return kernels("rows.triton_sequence").place_tokens(image_tokens, tokens, table, order, x)
    both = torch.cat((image_tokens, table[tokens].to(image_tokens.dtype)), 1)
    x.copy_(both[:, order].reshape(x.shape))


def add_at(y: Tensor, places: Tensor, x: Tensor) -> None:
    """Add y (B, I, W) to the rows `places` (I,) int64, all different, of every S rows of x (B * S, W)."""
    if path(x) != "reference":
        return kernels("rows.triton_sequence").add_at(y, places, x)
    x.view(len(y), -1, x.shape[1]).index_add_(1, places, y.to(x.dtype))


def norm_rope(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, *,
    eps: float,
) -> None:  # fmt: skip
    """Norm and rotate q and k in `qkv` (B * T, (heads + 2 kv_heads) * d) in place; v stays unchanged.

    Args:
        q_norm, k_norm: (d,) float32, weights of an RMSNorm of each head, or both None for no norm.
        cos, sin: (T, d / 2) float32.
    """
    if path(qkv) != "reference":
        return kernels("rows.triton_sequence").norm_rope(qkv, q_norm, k_norm, cos, sin, heads, kv_heads, eps=eps)
    both = qkv.view(-1, len(cos), heads + 2 * kv_heads, 2 * cos.shape[1])
    for start, count, weight in ((0, heads, q_norm), (heads, kv_heads, k_norm)):
        part = both[:, :, start : start + count]
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        part.copy_(reference.apply_rope(wide, cos[:, None].to(wide.dtype), sin[:, None].to(wide.dtype)))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Causal attention. q (B, T, heads, d); k, v (B, T, kv_heads, d) of equal strides; out (B, T, heads * d),
    contiguous.
    """
    if path(q) != "reference":
        return kernels("rows.triton_sequence").causal_attention(q, k, v, out)
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril().expand(len(q), -1, -1)
    out.copy_(reference.attention(q, k, v, mask).flatten(2).reshape(out.shape))


def exact_gelu(x: Tensor) -> None:
    """GELU with the error function, in place."""
    if path(x) != "reference":
        return kernels("rows.triton_sequence").exact_gelu(x)
    x.copy_(F.gelu(x))
