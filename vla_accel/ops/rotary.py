"""Rotary positions inside the product that makes queries, keys and values: no pass over them is left behind it.

For own Hopper kernels alone (`can_be_inside`); elsewhere the product and `rows.rope_cache` run one after the other.
Conventions as in `vla_accel.ops.rows`.
"""

from __future__ import annotations

from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.fp8 import INT8
from vla_accel.ops.dispatch import path
from vla_accel.ops.linear import launched_own_gemm, linear
from vla_accel.ops.norms import normed_linear
from vla_accel.ops.rows import rope_cache
from vla_accel.ops.weights import Linear


def can_be_inside(rows: int, layer: Linear, head_dim: int, *, normed: bool) -> bool:
    """Whether `cached` can take this product, with an RMSNorm before it or not, on this GPU: an own kernel is known to
    be the fastest for it, and its tiles hold the halves of heads."""
    if path(layer.weight) != "cuda" or layer.weight.dtype == INT8.dtype or layer.bias is not None or head_dim % 64:
        return False
    from vla_accel.ops.gemm_choice import known

    tiling = known(layer.weight.device, layer.weight.dtype, "none", rows, *layer.weight.shape)
    return tiling is not None and tiling.why_not(normed=normed, turned=True) is None


def cached(
    x: Tensor, moments: Tensor | None, layer: Linear, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor,
    values: Tensor, heads: int, *, eps: float, inside: bool, pdl: bool = False,
) -> None:  # fmt: skip
    """Rotated queries to the first columns of `qkv` (B * S, (heads + 2 kv_heads) * d), rotated keys and values to the
    cache (B, S, kv_heads, d), of x Wᵀ, or with `moments` of rmsnorm(x) Wᵀ (`norms.normed_linear`). x (B * S, K).

    `inside`: all in the product, which leaves the other columns of `qkv` as they are; only where `can_be_inside`.
    """
    if inside and path(x) == "cuda":
        from vla_accel.ops.cuda.gemm import Norm, Rope

        norm = None if moments is None else Norm(moments, None, eps)
        rope = Rope(cos, sin, keys, values, heads)
        if not launched_own_gemm(x, layer, qkv, "none", None, pdl, norm=norm, rope=rope):
            raise EngineError(f"rotary.cached: no kernel for {len(x)} rows by a weight {tuple(layer.weight.shape)}")
        return
    if moments is None:
        linear(x, layer, qkv, pdl=pdl)
    else:
        normed_linear(x, moments, layer, qkv, layer_norm=False, eps=eps, pdl=pdl)
    rope_cache(qkv, cos, sin, keys, values, heads, pdl=pdl)
