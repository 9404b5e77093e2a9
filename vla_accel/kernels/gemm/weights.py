"""Weights of linear layers, ready for the tensor cores: cast, quantised, padded, paired."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.fp8 import E4M3, INT8, Format

_ROWS = 2048
"""Rows of a weight that are cast at a time: copies of all of a large one would take more memory than a layer."""
_MOST_PREFETCHED = 16 << 20
"""Bytes of a weight that is prefetched, at most: L2 caches are several times as large."""


@dataclass(frozen=True)
class Linear:
    """A weight ready for the tensor cores.

    `weight` (N, K) in BF16/FP16/FP32, or float8_e4m3fn with `weight_scale` (true weight = stored x scale) and
    `input_scale` (true input = stored x scale), both of which are 0-dimensional float32 on the weight's device, or int8
    with a `weight_scale` (N,) of its own for each output; `bias` (N,) or None. The `*_value` fields are the same scales
    on the host, where there is one. `paired`: the rows of gate and up of a GeGLU by turns, eight of each, so that one
    block of the tensor cores has both. `sums` (N,) float32: sums of the true weight's rows, for a LayerNorm before the
    product.
    """

    weight: Tensor
    bias: Tensor | None = None
    weight_scale: Tensor | None = None
    input_scale: Tensor | None = None
    weight_scale_value: float = 1.0
    input_scale_value: float = 1.0
    paired: bool = False
    sums: Tensor | None = None

    @property
    def inverse_scale(self) -> float | None:
        """What the producer of this product's input must multiply by; None when it takes the plain dtype."""
        return None if self.input_scale is None else 1.0 / self.input_scale_value

    @property
    def sums_scale(self) -> Tensor | float:
        """What sums of stored weights must be multiplied by: (N,) float32 where each output has a scale of its own."""
        by_channel = self.weight_scale is not None and self.weight_scale.ndim == 1
        return self.weight_scale if by_channel else self.weight_scale_value  # type: ignore[return-value]

    def true_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) that is computed with, in a wide dtype."""
        scale = self.sums_scale
        return self.weight.to(dtype) * (scale.to(dtype)[:, None] if isinstance(scale, Tensor) else scale)

    @property
    def prefetchable(self) -> Tensor | None:
        """The weight, if a cache holds it next to what another product reads; else None (`Epilogue.prefetch`)."""
        # The copy engine takes pieces of 16 bytes.
        return self.weight if self.bytes <= _MOST_PREFETCHED and self.bytes % 16 == 0 else None

    @property
    def integers(self) -> bool:
        """Whether the weight is INT8."""
        return self.weight.dtype == INT8.dtype

    @property
    def bytes(self) -> int:
        """Bytes that one product reads of it."""
        return self.weight.numel() * self.weight.element_size()


def make_linear(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, input_amax: float | None = None, pad_k: int = 0,
    pad_n: int = 0, form: Format = E4M3,
) -> Linear:  # fmt: skip
    """A `Linear` from (N, K) in any dtype: padded with zeros, in `dtype`, or in `form` where `input_amax` is given.

    Scales of the weight are per tensor or output channel, as the format has it, and per tensor of the calibrated input
    (`fp8.Format.scale`).
    """
    if pad_k or pad_n:
        weight = F.pad(weight, (0, pad_k, 0, pad_n))
        bias = F.pad(bias, (0, pad_n)) if bias is not None else None
    bias = bias.to(dtype).contiguous() if bias is not None else None
    if input_amax is None:
        return Linear(weight.to(dtype).contiguous(), bias)
    device, input_scale = weight.device, form.scale(input_amax)
    if form.by_channel:
        scales = (weight.float().abs().amax(1).clamp(min=1e-12) / form.largest).contiguous()
        stored = torch.empty(weight.shape, dtype=form.dtype, device=device)
        for rows, scale, place in zip(weight.split(_ROWS), scales.split(_ROWS), stored.split(_ROWS), strict=True):
            place.copy_(form.saturated(rows.float() / scale[:, None]))
        return Linear(stored, bias, scales, torch.tensor(input_scale, device=device), 1.0, input_scale)
    weight_scale = form.scale(_amax(weight))
    stored = torch.empty(weight.shape, dtype=form.dtype, device=device)
    for rows, place in zip(weight.split(_ROWS), stored.split(_ROWS), strict=True):
        place.copy_(form.saturated(rows.float() / weight_scale))
    scales = (torch.tensor(weight_scale, device=device), torch.tensor(input_scale, device=device))
    return Linear(stored, bias, *scales, weight_scale, input_scale)


def _amax(weight: Tensor) -> float:
    """The largest magnitude. On the meta device, where bytes are counted, any number does."""
    if weight.is_meta:
        return 1.0
    return max(float(rows.abs().amax()) for rows in weight.split(_ROWS))


def pair(layer: Linear) -> Linear:
    """A product whose first half of rows are a GeGLU's gate and the others its up, with its rows `paired`.

    The same product where those halves are no whole eights.
    """
    if layer.weight.shape[0] % 16:
        return layer

    def mixed(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2).contiguous()

    scale = layer.weight_scale
    scale = mixed(scale) if scale is not None and scale.ndim else scale
    return replace(layer, weight=mixed(layer.weight), bias=mixed(layer.bias), weight_scale=scale, paired=True)


def with_sums(weights: Linear) -> Linear:
    """Add the sums of the weight's rows, which a LayerNorm inside needs. FP8 layers stay unchanged."""
    if weights.weight_scale is not None:
        return weights
    return replace(weights, sums=weights.weight.sum(1, dtype=torch.float64).float())
