"""What the denoise kernels must know of a model: its numbers, and what depends on the denoising step alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vla_accel.kernels.activation import Activation

WHOLE = 64
"""What the kernels' width is a multiple of, so that blocks can share it; what a model lacks of it is zero."""


@dataclass(frozen=True)
class Sizes:
    """Of an action expert. `tokens`: suffix tokens of a sequence, the last `horizon` of them actions of `action_dim`
    numbers; one more is the state (π0). `adaptive`: norms that depend on the step (π0.5), otherwise a time MLP.
    `width`: a multiple of 32, of which the first `normed` columns are the model's, the others zero. `causal`: an action
    sees itself and those before it. `activation`: GEGLU or SWIGLU. `self_every`: every so many layers,
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
    activation: Activation = Activation.GEGLU
    self_every: int = 1

    def crosses(self, layer: int) -> bool:
        """Whether the suffix attends in this layer to the prefix only."""
        return self.self_every < 1 or layer % self.self_every > 0


@dataclass(frozen=True)
class StepTables:
    """Constants by step (and layer), float32, contiguous.

    π0.5: `*_scale`, `*_gate` (steps, L, W) of the norm before q/k/v (input) and before the MLP (post); `*_shift`: the
    norm's shift already multiplied by the weight that follows, (steps, L, N); `final_*` (steps, W); `b_in` (W,).
    π0: None, but `final_scale` (W,), the norm's weight, and `b_in` (steps, W), which holds the time's part. `w_in`
    (A, W): actions to suffix tokens; in π0 to the hidden layer of the time MLP. On the host: `times` t and `gains` w(t)
    of the guidance (`vla_accel.nn.rtc`). `trained`: of a model that was trained with clean prefixes; every row but
    those of `final_*` is two, (2, ·), of the step and of t = 0, where pinned actions are.
    """

    input_scale: Tensor | None
    input_shift: Tensor | None
    input_gate: Tensor | None
    post_scale: Tensor | None
    post_shift: Tensor | None
    post_gate: Tensor | None
    final_scale: Tensor
    final_shift: Tensor | None
    b_in: Tensor
    w_in: Tensor
    times: tuple[float, ...]
    gains: tuple[float, ...]
    trained: bool = False

    @property
    def steps(self) -> int:
        return len(self.times)

    def of(self, table: Tensor | None, step: int, layer: int | None = None) -> Tensor | None:
        """A row of one of the tables; None where there is none."""
        if table is None:
            return None
        return table[step] if layer is None else table[step, layer]

    @property
    def adaptive(self) -> bool:
        return self.final_shift is not None
