"""Norms fused into the products around them, which saves a pass over the rows.

A product that adds to the residual also writes the moments of the new rows. The next product multiplies the rows as
they are and applies the norm to the sums. Only Hopper's own kernels can do this (`can_be_inside`); without a GPU the
torch reference runs. Norms have no weights: these are folded into the next product. Conventions as in
`vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import path
from vla_accel.kernels.gemm.linear import has_own_gemm, launched_own_gemm, linear
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.reference import MOMENTS_OF
from vla_accel.kernels.rows.rows import geglu


def with_sums(layer: Linear) -> Linear:
    """Add the sums of the weight's rows, which `normed_linear` needs for a LayerNorm. FP8 layers stay unchanged."""
    if layer.weight_scale is not None:
        return layer
    return replace(layer, sums=layer.weight.sum(1, dtype=torch.float64).float())


def can_be_inside(rows: int, width: int, *products: tuple[Linear, Activation]) -> bool:
    """Return whether `residual_linear`, `normed_linear` and `normed_gate_up` take these products on this GPU.

    Args:
        rows, width: shape of the rows that are normed.
        products: each with its activation.
    """
    # The rows of a quantised product are quantised after their norm.
    quantised = any(kind.gated and layer.weight_scale is not None for layer, kind in products)
    if quantised or width % MOMENTS_OF:
        return False
    return all(has_own_gemm(rows, layer, kind, inside=True) for layer, kind in products)


def moments_buffer(rows: int, width: int, device: torch.device, eps: float | None = None) -> Tensor:
    """Allocate moments (width / 64, rows, 2) float32. With `eps` they are those of rows that are normed already."""
    moments = torch.zeros(-(-width // MOMENTS_OF), rows, 2, device=device)
    if eps is not None:
        moments[..., 1] = MOMENTS_OF * (1.0 - eps)
    return moments


def residual_linear(x: Tensor, layer: Linear, onto: Tensor, moments: Tensor) -> None:
    """onto += x Wᵀ + b, and write the moments of the new rows. Requires `can_be_inside`.

    Args:
        x: (R, K).
        onto: (R, N), N a multiple of 64.
        moments: (N / 64, R, 2) float32: mean and sum of squared deviations of every 64 columns.
    """
    if path(x) == "cuda":
        if not launched_own_gemm(x, layer, onto, Activation.NONE, None, moments=moments):
            raise EngineError(f"residual_linear: no kernel for {len(x)} rows by a weight {tuple(layer.weight.shape)}")
        return
    y = torch.empty_like(onto)
    linear(x, layer, y)
    onto += y
    parts = onto.to(moments.dtype).unflatten(1, (-1, MOMENTS_OF))
    mean = parts.mean(2)
    moments[..., 0] = mean.T
    moments[..., 1] = (parts - mean[..., None]).square().sum(2).T


def normed_linear(
    x: Tensor, moments: Tensor, layer: Linear, out: Tensor, *, layer_norm: bool, eps: float,
    activation: Activation = Activation.NONE,
) -> None:  # fmt: skip
    """out = activation(norm(x) Wᵀ + b), NONE or GELU. Requires `can_be_inside`.

    The product takes x itself, so that the norm rounds nothing: norm(x) Wᵀ = rstd (x Wᵀ - mean (1 Wᵀ)).

    Args:
        x: (R, K), not normed.
        moments: of x, as `residual_linear` writes them.
        out: (R, N).
        layer_norm: LayerNorm, for a layer `with_sums`; otherwise RMSNorm.
    """
    assert not layer_norm or layer.sums is not None
    if path(x) == "cuda":
        sums = layer.sums if layer_norm else None
        return _launch("normed_linear", x, moments, sums, layer, out, activation, inverse_scale=None, eps=eps)
    wide = torch.promote_types(torch.float32, out.dtype)
    mean, square = moments[..., 0].to(wide), moments[..., 1].to(wide).sum(0)
    middle = mean.mean(0) if layer_norm else torch.zeros_like(mean[0])
    square = square + MOMENTS_OF * (mean - middle).square().sum(0)
    rstd = torch.rsqrt(square / x.shape[1] + eps)
    y = x.to(wide) @ layer.weight.to(wide).T
    if layer.sums is not None and layer_norm:
        y = y - middle[:, None] * layer.sums.to(wide)
    y = y * rstd[:, None]
    if layer.bias is not None:
        y = y + layer.bias.to(wide)
    out.copy_(reference.activate(y, activation))


def normed_gate_up(
    x: Tensor, moments: Tensor, layer: Linear, out: Tensor, *, eps: float, activation: Activation,
    inverse_scale: float | None = None,
) -> None:  # fmt: skip
    """`linear.gate_up` of the RMSNorm of x (R, K), by a `paired` layer. Requires `can_be_inside`.

    `moments`: of x, as `residual_linear` writes them.
    """
    if path(x) == "cuda":
        return _launch("normed_gate_up", x, moments, None, layer, out, activation, inverse_scale=inverse_scale, eps=eps)
    y = torch.empty(len(x), len(layer.weight), dtype=torch.promote_types(torch.float32, x.dtype), device=x.device)
    normed_linear(x, moments, layer, y, layer_norm=False, eps=eps)
    geglu(y, out, inverse_scale=inverse_scale, paired=layer.paired, activation=activation)


def _launch(
    name: str,
    x: Tensor,
    moments: Tensor,
    weight_sums: Tensor | None,
    layer: Linear,
    out: Tensor,
    activation: Activation,
    *,
    inverse_scale: float | None,
    eps: float,
) -> None:
    """Launch the own GEMM after a norm. `weight_sums`: for a LayerNorm; `name`: the op in error messages."""
    from vla_accel.kernels.gemm.hopper import Norm

    norm = Norm(moments, weight_sums, eps)
    if not launched_own_gemm(x, layer, out, activation, inverse_scale, norm=norm):
        raise EngineError(f"{name}: no kernel for {len(x)} rows by a weight {tuple(layer.weight.shape)}")
