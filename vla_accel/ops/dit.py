"""Ops of a diffusion transformer's few rows: products with a LayerNorm inside, and the flow's step.

Conventions as in `vla_accel.ops.rows`. FP8 and INT8 weights are widened in registers, activations are never quantised.
`cut`: as in `vla_accel.ops.suffix`, one of `suffix_tilings.unshared`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.ops import reference, suffix, suffix_tilings
from vla_accel.ops.activation import Activation
from vla_accel.ops.dispatch import kernels, path
from vla_accel.ops.gpu import Gpu
from vla_accel.ops.moments import Moments
from vla_accel.ops.suffix_tilings import Pipelined
from vla_accel.ops.suffix_types import Guidance
from vla_accel.ops.weights import Linear


@dataclass(frozen=True)
class NormTables:
    """A LayerNorm before a product, of one step: `scale` (K,) float32 that rows are multiplied by, plus one, or None;
    `sums` (N,) float32: of the weight's rows times that; `eps`. The norm's shift is in the product's own `shift`."""

    scale: Tensor | None
    sums: Tensor
    eps: float


def product(
    x: Tensor, layer: Linear, shift: Tensor, out: Tensor, *, norm: NormTables | None = None,
    activation: Activation = Activation.NONE, cut: Pipelined | None = None,
    moments: Moments | None = None,
) -> None:  # fmt: skip
    """out (R, N) = activation(norm(x) Wᵀ + shift). x (R, K); `shift` (N,) float32 instead of the layer's bias; GELU is
    the tanh form. The norm rounds nothing but rows times 1 + scale: rstd ((x ∘ (1 + scale)) Wᵀ - mean sums) + shift."""
    if path(x) != "reference":
        cut = cut or suffix_tilings.unshared(Gpu.of(x.device), suffix.project_product(x, layer))[0]
        return kernels("dit").product(
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
    """Euler step of a flow from noise to actions, and the next evaluation's input.

    after (B, H, A) = before + dt (1 - weights) velocity, all float32; `first`: the target where a weight is above zero,
    else `before`, and no velocity is read. Unless `last`: hidden (B * T, W) gets silu(after · w_in + b_in)
    in its last H rows of every T = `tokens`; w_in (A, W), b_in (W,) float32. velocity (B * T, A) float32, its last H
    rows.
    """
    if path(before) != "reference":
        return kernels("dit").flow_step(
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
