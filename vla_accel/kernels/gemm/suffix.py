"""Ops on the few rows of a suffix. Each fuses several operations, because launches cost more than arithmetic here.

Conventions as in `vla_accel.kernels.rows.rows`, and of these ops:

- FP8 and INT8 weights are widened in registers; activations are never quantised.
- `cut`: the tile config, one of `suffix_tilings.candidates`; None takes the first. `Library` and `Own` require rows
  with moments and support no pinned rows (`ops/many.py`).
- `pinned` (R,) int32, 0 or 1: scale, shift and gate, which depend on the flow's time, have two rows (2, ·), and each
  row of x selects its own. Moments are not supported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention import config as attention_config
from vla_accel.kernels.attention.config import CrossShape, CrossTile, KeySplit, SuffixShape
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.gemm import many, suffix_tilings
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.moments import write as write_moments
from vla_accel.kernels.gemm.suffix_tilings import Library, Own, Product, Skinny, Tiling
from vla_accel.kernels.gemm.suffix_types import ActionInput, ActionOutput, EulerStep, Guidance, Heads, Rotation
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.rows import normed
from vla_accel.runtime import current

AttentionWorkspace = tuple[Tensor, Tensor, Tensor]
"""Parts and statistics of programs that share keys, and the counters of those that have arrived."""
ProductWorkspace = tuple[Tensor, ...]
"""Parts of programs that share K, and the counters of those that have arrived; of the library's product its sums."""


def qkv_rope(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None, rotation: Rotation, out: Heads, *, eps: float,
    pinned: Tensor | None = None, cut: Tiling | None = None, workspace: ProductWorkspace | None = None,
    moments: Moments | None = None,
) -> None:  # fmt: skip
    """Norm, q/k/v projection and rotation of the suffix.

    Args:
        x: (B * T, W).
        scale: (W,) float32; the norm multiplies by 1 + scale. Or None.
        shift: (N,) float32, the norm's shift times the weight, or None.
        moments: of x with this scale, if the rows come with them.
        workspace: made by `product_workspace` for the same `cut`.
    """
    if path(x) != "reference":
        cut = cut or suffix_tilings.default(current(x).gpu, qkv_product(x, layer, out.q, out.k))
        if isinstance(cut, (Library, Own)):
            assert pinned is None
            return many.qkv_rope(x, layer, shift, rotation, out, eps=eps, cut=cut, workspace=workspace, moments=moments)
        return _kernels(cut).qkv_rope(
            x, layer, scale, shift, rotation, out, eps=eps, pinned=pinned, cut=cut,
            **_reading(cut, moments),
        )  # fmt: skip
    batch, tokens, heads, head_dim = out.q.shape
    y = _modulated_product(x, layer, scale, shift, eps, pinned).view(batch, tokens, -1, head_dim)
    place = rotation.starts[:, None] + torch.arange(tokens, device=x.device)
    c, s = (table[place][:, :, None].to(y.dtype) for table in (rotation.cos, rotation.sin))
    kv_heads = out.k.shape[2]
    out.q.copy_(reference.apply_rope(y[:, :, :heads], c, s))
    out.k.copy_(reference.apply_rope(y[:, :, heads : heads + kv_heads], c, s))
    out.v.copy_(y[:, :, heads + kv_heads :])


def suffix_workspace(sizes: SuffixShape, device: torch.device, cut: KeySplit | None = None) -> AttentionWorkspace:
    """Allocate what `suffix_attention` keeps between its programs. The counters start as zero, and each call resets
    them.
    """
    if path(device) == "reference":
        return (torch.empty(0), torch.empty(0), torch.empty(0))
    cut = cut or attention_config.key_splits(current(device).gpu, sizes)[0]
    parts, stats, counters = cut.workspace(sizes)
    return (
        torch.empty(parts, device=device),
        torch.empty(stats, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def product_workspace(product: Product, device: torch.device, cut: Tiling) -> ProductWorkspace | None:
    """Allocate what a product keeps between programs that share K, or between cuBLAS and the kernels around it.

    None if it needs nothing. Counters as in `suffix_workspace`.
    """
    if isinstance(cut, (Skinny, Own)) or path(device) == "reference":
        return None
    if isinstance(cut, Library):
        columns = product.groups * product.sides * product.columns
        dtype = torch.bfloat16 if product.activation == 2 else torch.float32
        return (torch.empty(product.rows, columns, dtype=dtype, device=device),)
    if cut.split == 1:
        return None
    parts, counters = cut.workspace(product)
    return torch.empty(parts, device=device), torch.zeros(counters, dtype=torch.int32, device=device)


def qkv_product(x: Tensor, layer: Linear, q: Tensor, k: Tensor) -> Product:
    """Describe the product of `qkv_rope`."""
    return _product(x, layer, q.shape[3] // 2, q.shape[2] + 2 * k.shape[2], 2)


def gate_up_product(x: Tensor, layer: Linear) -> Product:
    """Describe the product of `gate_up_geglu`."""
    return _product(x, layer, layer.weight.shape[0] // 2, 1, 2)


def project_product(a: Tensor, layer: Linear) -> Product:
    """Describe the product of `project`."""
    return _product(a, layer, layer.weight.shape[0], 1, 1)


def crossing(x: Tensor, layer: Linear, keys: Tensor) -> CrossShape:
    """Describe the problem of `cross_attention`."""
    batch, source, _, head_dim = keys.shape
    return CrossShape(
        batch, len(x) // batch, x.shape[1], source, layer.weight.shape[0] // head_dim, head_dim,
        layer.weight.element_size(), x.element_size(), layer.weight.dtype == torch.int8,
    )  # fmt: skip


def suffix_attention(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor,
    workspace: AttentionWorkspace, *, state_first: bool, causal: bool = False,
    cut: KeySplit | None = None,
) -> None:  # fmt: skip
    """Attention of the suffix to the first `lengths[b]` keys of the prefix and to itself.

    Args:
        q: (B, T, heads, d).
        prefix_k, prefix_v: (B, S, kv_heads, d).
        k, v: (B, T, kv_heads, d), of the suffix.
        out: (B * T, heads * d). All tensors are contiguous.
        workspace: made by `suffix_workspace` for the same `cut`.
        state_first: the first token attends to the prefix and itself only (π0).
        causal: no token attends to a later one.
    """
    if path(q) != "reference":
        batch, tokens, heads, head_dim = q.shape
        prefix_tokens, kv_heads = prefix_k.shape[1:3]
        sizes = SuffixShape(batch, tokens, prefix_tokens, heads, kv_heads, head_dim, q.element_size())
        cut = cut or attention_config.key_splits(current(q).gpu, sizes)[0]
        return kernels("attention.triton_attention").suffix_attention(
            q, prefix_k, prefix_v, k, v, lengths, out, workspace, state_first=state_first, causal=causal,
            cut=cut,
        )  # fmt: skip
    batch, tokens = q.shape[:2]
    inner = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    if state_first:
        inner[0, 1:] = False
    if causal:
        inner = inner.tril()
    outer = torch.arange(prefix_k.shape[1], device=q.device) < lengths[:, None]
    mask = torch.cat((outer[:, None].expand(-1, tokens, -1), inner.expand(batch, -1, -1)), 2)
    keys, values = torch.cat((prefix_k, k), 1), torch.cat((prefix_v, v), 1)
    values = values.masked_fill(~torch.cat((outer, outer.new_ones(batch, tokens)), 1)[:, :, None, None], 0)
    out.copy_(reference.attention(q, keys, values, mask).reshape(out.shape))


def project(
    a: Tensor, layer: Linear, gate: Tensor | None, x: Tensor, *, residual: bool = True, skip_every: int = 0,
    pinned: Tensor | None = None, cut: Tiling | None = None,
    workspace: ProductWorkspace | None = None, moments: Moments | None = None, next_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """x += gate ∘ (a Wᵀ + b), or x = gate ∘ (a Wᵀ + b) without `residual`.

    Args:
        a: (R, K).
        gate: (N,) float32, or None.
        x: (R, N).
        skip_every: if not zero, the first of every `skip_every` rows of x stays unchanged.
        workspace: made by `product_workspace` for the same `cut`.
        moments: receives the moments of the new x, in tiles of the columns of `cut`; `Skinny` writes none.
        next_scale: (N,) float32, the scale of the next norm, or None.
    """
    if path(a) != "reference":
        cut = cut or suffix_tilings.default(current(a).gpu, project_product(a, layer))
        if isinstance(cut, (Library, Own)):
            assert pinned is None
            return many.project(
                a, layer, gate, x, residual=residual, skip_every=skip_every, cut=cut,
                workspace=workspace, moments=moments, next_scale=next_scale,
            )  # fmt: skip
        return _kernels(cut).project(
            a, layer, gate, x, residual=residual,
            skip_every=skip_every, pinned=pinned, cut=cut, workspace=workspace,
            **({} if isinstance(cut, Skinny) else {"moments": moments, "next_scale": next_scale}),
        )  # fmt: skip
    wide = torch.promote_types(torch.float32, x.dtype)
    y = a.to(wide) @ layer.true_weight(wide).T
    if layer.bias is not None:
        y = y + layer.bias.to(wide)
    if gate is not None:
        y = y * _own(gate, pinned)
    if residual:
        y = y + x.to(wide)
    if skip_every:
        y = torch.where((torch.arange(len(x), device=x.device) % skip_every > 0)[:, None], y, x.to(wide))
    x.copy_(y)
    if moments is not None:
        write_moments(x, next_scale, moments)


def gate_up_geglu(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None, out: Tensor, *, eps: float,
    activation: Activation = Activation.GEGLU, pinned: Tensor | None = None, cut: Tiling | None = None,
    workspace: ProductWorkspace | None = None, moments: Moments | None = None,
) -> None:  # fmt: skip
    """Norm, gate and up projections, and GEGLU or SWIGLU. x (R, W), out (R, H). Other arguments as in `qkv_rope`."""
    if path(x) != "reference":
        cut = cut or suffix_tilings.default(current(x).gpu, gate_up_product(x, layer))
        if isinstance(cut, (Library, Own)):
            assert pinned is None
            return many.gate_up_geglu(
                x, layer, shift, out, eps=eps, activation=activation, cut=cut, workspace=workspace, moments=moments
            )
        return _kernels(cut).gate_up_geglu(
            x, layer, scale, shift, out, eps=eps, activation=activation, pinned=pinned,
            cut=cut, **_reading(cut, moments),
        )  # fmt: skip
    y = _modulated_product(x, layer, scale, shift, eps, pinned)
    out.copy_(reference.activate(y, activation))


def cross_attention(
    x: Tensor, layer: Linear, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, out: Tensor, *,
    eps: float, cut: CrossTile | None = None, moments: Moments | None = None,
) -> None:  # fmt: skip
    """Norm, query projection and rotation of the suffix, and attention to the prefix only. Positions start at 0.

    Args:
        x: (B * T, W).
        layer: of the queries, (heads * d, W).
        keys, values: (B, S, kv_heads, d), of which row b has lengths[b].
        out: (B * T, heads * d). All tensors are contiguous.
        cut: one of `attention_config.cross_tiles`.
        moments: of x, if the rows come with them.
    """
    if path(x) != "reference":
        if cut is None:
            cut = attention_config.cross_tiles(current(x).gpu, crossing(x, layer, keys))[0]
        return kernels("attention.triton_cross").cross_attention(
            x, layer, cos, sin, keys, values, lengths, out, eps=eps,
            cut=cut, moments=moments,
        )  # fmt: skip
    batch, source, _, head_dim = keys.shape
    tokens = len(x) // batch
    q = _modulated_product(x, layer, None, None, eps).view(batch, tokens, -1, head_dim)
    q = reference.apply_rope(q, cos[:tokens, None].to(q.dtype), sin[:tokens, None].to(q.dtype))
    real = torch.arange(source, device=x.device) < lengths[:, None]
    values = values.masked_fill(~real[:, :, None, None], 0)
    mask = real[:, None].expand(-1, tokens, -1)
    out.copy_(reference.attention(q.to(keys.dtype), keys, values, mask).reshape(out.shape))


def step(
    x: Tensor, output: ActionOutput, actions: Tensor, guidance: Guidance, into: ActionInput, following: Tensor,
    at: EulerStep, *, tokens: int,
) -> None:  # fmt: skip
    """Between two evaluations of a flow: final norm, output projection, Euler step, and the next evaluation's input.

    Args:
        x: (B * T, W), T = `tokens`, the output of the last evaluation. Not read if `at.first`.
        actions: (B, H, A) float32, += dt * velocity. The guidance subtracts
            gain * weights ∘ (target - (actions - time * velocity)) from the velocity.
        following: (B * T, W); its last H rows of every T receive the next input. Not written if `at.last`.
    """
    if path(x) != "reference":
        return kernels("gemm.triton_skinny").step(x, output, actions, guidance, into, following, at, tokens=tokens)
    batch, horizon, _ = actions.shape
    weights, stays = guidance.weights, guidance.weights > 0
    if not at.first:
        assert output.scale is not None
        tail = x.view(batch, tokens, -1)[:, tokens - horizon :]
        final = normed(tail, False, output.eps) * (1.0 + output.scale)
        final = final if output.shift is None else final + output.shift
        velocity = (final @ output.weight.T + output.bias).to(actions.dtype)
        if guidance.pinned:
            velocity = velocity.masked_fill(stays[..., None], 0)
        else:
            error = guidance.target - (actions - at.time * velocity)
            velocity = velocity - at.gain * (weights[..., None] * error)
        actions += at.dt * velocity
    if not at.last:
        bias = into.bias if into.bias.ndim == 1 else into.bias[stays.long()]
        embedded = reference.activate(actions.to(into.weight.dtype) @ into.weight + bias, into.activation)
        following.view(batch, tokens, -1)[:, tokens - horizon :] = embedded.to(following.dtype)


def _reading(cut: Tiling, moments: Moments | None) -> dict[str, Moments | None]:
    return {} if isinstance(cut, Skinny) else {"moments": moments}


def _kernels(cut: Tiling) -> Any:
    return kernels(f"gemm.triton_{'skinny' if isinstance(cut, Skinny) else 'pipelined'}")


def _product(x: Tensor, layer: Linear, columns: int, groups: int, sides: int) -> Product:
    sizes = layer.weight.element_size(), x.element_size()
    return Product(x.shape[0], x.shape[1], columns, groups, sides, *sizes, layer.weight.dtype == torch.int8)


def _own(table: Tensor, pinned: Tensor | None) -> Tensor:
    return table if pinned is None else table[pinned.long()]


def _modulated_product(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None, eps: float, pinned: Tensor | None = None
) -> Tensor:
    wide = torch.promote_types(torch.float32, x.dtype)
    rstd = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    scaled = x.to(wide) if scale is None else (x.to(wide) * (1.0 + _own(scale, pinned))).to(x.dtype).to(wide)
    y = scaled @ layer.true_weight(wide).T * rstd
    return y if shift is None else y + _own(shift, pinned)
