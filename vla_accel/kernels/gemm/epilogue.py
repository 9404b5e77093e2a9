"""The norm of the rows before a product, and the epilogue of its sums after.

B sequences of T tokens make the R rows of a suffix.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.moments import Moments

Workspace = tuple[Tensor, ...]
"""The sums of cuBLAS, or the parts of programs that share K and the counters of those that have arrived."""


@dataclass(frozen=True)
class Heads:
    """Queries (B, T, heads, d), keys and values (B, T, kv_heads, d), contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Rotation:
    """Rotary embeddings: `cos`, `sin` (positions, d / 2) float32; `starts` (B,) int32: the first positions."""

    cos: Tensor
    sin: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Norm:
    """A norm of the rows x (R, K) of a product, without weights of its own. It is a factor of the product's sums, so
    that nothing is rounded but x ∘ (1 + scale): norm(x) Wᵀ = rstd ((x ∘ (1 + scale)) Wᵀ - mean sums).

    Attributes:
        moments: of x. None: the kernel computes them.
        scale: (K,) float32, or None; (2, K) with `Epilogue.pinned`.
        sums: (N,) float32, the sum of each weight row, times 1 + scale: for a LayerNorm. None: RMSNorm.
    """

    eps: float
    moments: Moments | None = None
    scale: Tensor | None = None
    sums: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows that the product multiplies: x, or the scaled rows that were stored with its moments."""
        return x if self.moments is None or self.moments.scaled is None else self.moments.scaled


@dataclass(frozen=True)
class Epilogue:
    """What follows the sums of a product, in this order: shift or bias, activation, rotation, gate, residual.

    Attributes:
        shift: (N,) float32, added instead of the layer's bias; (2, N) with `pinned`.
        activation: a gated one takes the first half of the weight rows as gate, or, if the layer is `paired`, eight
            rows of gate and eight of up in turns.
        rope: rotates q and k; the output is `Heads`.
        gate: (N,) float32, multiplies the product; (2, N) with `pinned`.
        residual: adds to the output instead of overwriting it.
        skip_every: if not zero, the first of every `skip_every` rows of the output stays unchanged.
        moments: receives the moments of the new output, in tiles of the config's columns.
        next_scale: (N,) float32, the scale of the next norm, for `moments.scaled`.
        pinned: (R,) int32, 0 or 1: which row of the constants with two rows applies to each row of x.
        prefetch: a weight of a later product, which the Hopper GEMM prefetches to the L2 cache. Other kernels ignore
            it. Pass `Linear.prefetchable`.
        quantize: the output is multiplied by it and saturated in FP8 or INT8, by the dtype of the output.
    """

    shift: Tensor | None = None
    activation: Activation = Activation.NONE
    rope: Rotation | None = None
    gate: Tensor | None = None
    residual: bool = False
    skip_every: int = 0
    moments: Moments | None = None
    next_scale: Tensor | None = None
    pinned: Tensor | None = None
    quantize: float | None = None
    prefetch: Tensor | None = None


PLAIN = Epilogue()
