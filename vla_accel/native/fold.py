"""Exact rewrites of weights, done once at load: a norm's weights move into the product that follows it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vla_accel.errors import EngineError
from vla_accel.fp8 import NO_SCALES, Products, Scales
from vla_accel.models.gemma import RmsNorm
from vla_accel.numeric import DTYPES


def compute_dtype(precision: str) -> torch.dtype:
    """What everything but the FP8 products themselves is stored in."""
    return DTYPES.get(precision, torch.bfloat16)


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


def amax_of(scales: Scales | None, precision: str, layer: str, products: Products) -> Callable[[str], float | None]:
    """Looks the calibrated input amax of a layer's product up by name; None unless FP8 is asked for and takes it."""

    def find(name: str) -> float | None:
        if precision != "fp8" or name not in products.names:
            return None
        if scales is None:
            raise EngineError(NO_SCALES)
        return scales.of(f"{layer}.{name}")

    return find
