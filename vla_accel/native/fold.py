"""Exact rewrites of weights, done once at load: a norm's weights move into the product that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from vla_accel.errors import EngineError
from vla_accel.models.gemma import RmsNorm


def compute_dtype(precision: str) -> torch.dtype:
    """What everything but the FP8 products themselves is stored in."""
    return {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


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


def amax_of(scales: Mapping[str, float] | None, precision: str, layer: str) -> Callable[[str], float | None]:
    """Looks a product's calibrated input amax up by name; None unless `precision` is fp8."""

    def find(name: str) -> float | None:
        if precision != "fp8":
            return None
        key = f"{layer}.{name}"
        if scales is None or key not in scales:
            raise EngineError(f"FP8: no calibrated scale of {key}; calibrate this checkpoint again")
        return scales[key]

    return find
