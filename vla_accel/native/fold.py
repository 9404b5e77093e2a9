"""Exact rewrites of weights, done once at load: a norm's weights move into the product that follows it."""

from __future__ import annotations

from torch import Tensor, nn

from vla_accel.models.gemma import RmsNorm


def fold_norm(linear: nn.Linear, norm: nn.LayerNorm | RmsNorm) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of `linear(norm(x))` for a norm without weights.

    LayerNorm: W diag(γ), b + W β. Gemma's RMSNorm: W diag(1 + w). Formed in float64, returned in float32.
    """
    weight = linear.weight.double()
    bias = None if linear.bias is None else linear.bias.double()
    if isinstance(norm, RmsNorm):
        return (weight * (1.0 + norm.weight.double())).float(), None if bias is None else bias.float()
    shift = weight @ norm.bias.double()
    bias = shift if bias is None else bias + shift
    return (weight * norm.weight.double()).float(), bias.float()
