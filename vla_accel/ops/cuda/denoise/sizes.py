"""What the denoise kernels must know of a model: numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = 64
"""What the kernels' width is a multiple of, so that blocks can share it; what a model lacks of it is zero."""


@dataclass(frozen=True)
class Sizes:
    """Of an action expert. `tokens`: suffix tokens of a sequence, the last `horizon` of them actions of `action_dim`
    numbers; one more is the state (π0). `adaptive`: norms that depend on the step (π0.5), otherwise a time MLP.
    `width`: a multiple of 32, of which the first `normed` columns are the model's, the others zero. `causal`: an action
    sees itself and those before it. `silu`: the gate's activation, otherwise GELU. `self_every`: every so many layers,
    from the first on, the suffix attends to itself, in the others to the prefix alone (SmolVLA); 0: in none."""

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
    normed: int
    causal: bool = False
    silu: bool = False
    self_every: int = 1

    def crosses(self, layer: int) -> bool:
        """Whether the suffix attends in this layer to the prefix only."""
        return self.self_every < 1 or layer % self.self_every > 0
