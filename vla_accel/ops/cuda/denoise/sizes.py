"""What the denoise kernels must know of a model: numbers alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Of an action expert. `tokens`: suffix tokens of a sequence, the last `horizon` of them actions of `action_dim`
    numbers. `adaptive`: norms that depend on the step (π0.5); otherwise the first token is the state (π0)."""

    width: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    depth: int
    tokens: int
    horizon: int
    action_dim: int
    adaptive: bool
    eps: float
