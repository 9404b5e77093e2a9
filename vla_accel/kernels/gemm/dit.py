"""Ops on the few rows of a diffusion transformer: products with a LayerNorm inside, and the step of the flow.

Conventions as in `rows.py`. FP8 and INT8 weights are widened in registers; activations are never quantised.
`cut`: the tile config, one of `suffix_tilings.unshared`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.gemm import suffix, suffix_tilings
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.suffix_tilings import Pipelined
from vla_accel.kernels.gemm.suffix_types import Guidance
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.runtime import current


@dataclass(frozen=True)
class NormTables:
    """A LayerNorm before a product, in one step of the flow.

    `scale` (K,) float32: the rows are multiplied by 1 + scale, or None; `sums` (N,) float32: of the weight's rows times
    1 + scale. The norm's shift is part of the `shift` of the product.
    """

    scale: Tensor | None
    sums: Tensor
    eps: float


def product(
    x: Tensor, layer: Linear, shift: Tensor, out: Tensor, *, norm: NormTables | None = None,
    activation: Activation = Activation.NONE, cut: Pipelined | None = None,
    moments: Moments | None = None,
) -> None:  # fmt: skip
    """out (R, N) = activation(norm(x) Wᵀ + shift). x (R, K); `shift` (N,) float32 replaces the bias of the layer.

    The norm rounds only x ∘ (1 + scale): norm(x) Wᵀ = rstd ((x ∘ (1 + scale)) Wᵀ - mean sums).
    """
    if path(x) != "reference":
        cut = cut or suffix_tilings.unshared(current(x).gpu, suffix.project_product(x, layer))[0]
        return kernels("gemm.triton_dit").product(
            x, layer, shift, out, norm=norm, activation=activation, cut=cut,
            moments=moments,
        )  # fmt: skip
    wide = torch.promote_types(torch.float32, x.dtype)
    rows, weight = x.to(wide), layer.true_weight(wide)
    if norm is None:
        y = rows @ weight.T + shift
    else:
        mean = rows.mean(-1, keepdim=True)
        rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) - mean.square() + norm.eps)
        scaled = rows if norm.scale is None else (rows * (1.0 + norm.scale)).to(x.dtype).to(wide)
        y = (scaled @ weight.T - mean * norm.sums) * rstd + shift
    out.copy_(reference.activate(y, activation))


def flow_step(
    velocity: Tensor, before: Tensor, guidance: Guidance, w_in: Tensor, b_in: Tensor, after: Tensor,
    hidden: Tensor, *, dt: float, tokens: int, first: bool, last: bool,
) -> None:  # fmt: skip
    """Euler step of a flow from noise to actions, and the input of the next evaluation.

    Args:
        velocity: (B * T, A) float32, T = `tokens`; its last H rows of every T are read, none if `first`.
        before, after: (B, H, A) float32: after = before + dt (1 - weights) velocity. If `first`, after = target where a
            weight is above zero, and before elsewhere.
        w_in, b_in: (A, W), (W,) float32.
        hidden: (B * T, W); its last H rows of every T receive silu(after · w_in + b_in), unless `last`.
    """
    if path(before) != "reference":
        return kernels("gemm.triton_dit").flow_step(
            velocity, before, guidance, w_in, b_in, after, hidden, dt=dt, tokens=tokens, first=first, last=last,
        )  # fmt: skip
    batch, horizon, _ = before.shape
    if first:
        after.copy_(torch.where(guidance.weights[..., None] > 0, guidance.target, before))
    else:
        moved = velocity.view(batch, tokens, -1)[:, tokens - horizon :]
        after.copy_(before + dt * (1.0 - guidance.weights[..., None]) * moved)
    if not last:
        embedded = F.silu(after.to(w_in.dtype) @ w_in + b_in)
        hidden.view(batch, tokens, -1)[:, tokens - horizon :] = embedded.to(hidden.dtype)
