"""SmolLM2 as SmolVLA uses it, in Gemma's pieces: norms whose weight is the factor itself, SwiGLU, rotation in float32.

Knows nothing about images, actions or time. The base of the rotation is 10,000, as in lerobot, not SmolLM2's 100,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vla_accel.kernels import reference
from vla_accel.nn.gemma import GemmaConfig, GemmaLayer, GemmaPrefix, RmsNorm


@dataclass(frozen=True)
class SmolLmConfig(GemmaConfig):
    """Sizes of one SmolLM2 stack; the first 16 layers of SmolLM2 360M unless said otherwise."""

    width: int = 960
    depth: int = 16
    mlp_dim: int = 2560
    heads: int = 15
    kv_heads: int = 5
    head_dim: int = 64
    eps: float = 1e-5


class SmolLmNorm(RmsNorm):
    """RMSNorm that multiplies by its weight."""

    offset: ClassVar[float] = 0.0


class SmolLmLayer(GemmaLayer):
    """One block."""

    norm_type: ClassVar[type[RmsNorm]] = SmolLmNorm

    @staticmethod
    def activate(gate_up: Tensor) -> Tensor:
        return reference.swiglu(gate_up)


class SmolLmPrefix(GemmaPrefix):
    """The prefix stack."""

    layer_type: ClassVar[type[GemmaLayer]] = SmolLmLayer

    @staticmethod
    def rope_dtype(x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, torch.float32)
