"""Exact rewrites of weights, done once at load: a norm's weights move into the product that follows it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_accel.nn.reference import RmsNorm

_ROWS = 2048


def fold_norm(linear: nn.Linear, norm: nn.LayerNorm | RmsNorm) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of `linear(norm(x))` for a norm without weights.

    LayerNorm: W diag(γ), b + W β. RMSNorm: W diag(1 + w) in Gemma, W diag(w) in Llama. Formed in
    float64, returned in float32.
    """
    bias = None if linear.bias is None else linear.bias.double()
    if isinstance(norm, RmsNorm):
        return _scaled(linear.weight, norm.factor), None if bias is None else bias.float()
    shift = linear.weight.double() @ norm.bias.double()
    bias = shift if bias is None else bias + shift
    return _scaled(linear.weight, norm.weight.double()), bias.float()


def plain(norm: nn.Module) -> RmsNorm:
    """A norm of the prefix's or of π0's expert, whose weights can be folded; π0.5's adaptive ones cannot."""
    assert isinstance(norm, RmsNorm)
    return norm


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """W diag(scale), a part of the rows at a time: all of a large product in float64 would be four times its bytes."""
    folded = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for rows, place in zip(weight.split(_ROWS), folded.split(_ROWS), strict=True):
        place.copy_(rows.double() * scale)
    return folded
