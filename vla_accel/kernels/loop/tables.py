"""An action expert as data for its denoise loop: its sizes, and the constants of the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vla_accel.kernels.activation import Activation

WIDTH_MULTIPLE = 64
"""The streamed kernels split a width that is a multiple of this among blocks; missing columns are zero."""


@dataclass(frozen=True)
class ExpertSpec:
    """An action expert.

    Args:
        width: of the rows in the streamed kernels, a multiple of 32.
        model_width: of the rows in the model; the other columns are zero.
        tokens: of a sequence. The last `horizon` of them are actions of `action_dim` numbers. One more is the state
            (π0), which attends to the prefix and itself only.
        adaptive: whether the norms depend on the step (π0.5); otherwise an MLP of the time embeds the actions.
        causal: whether an action attends only to itself and earlier actions.
        activation: GEGLU or SWIGLU.
        self_every: layers 0, n, 2 n, … attend to the prefix and the suffix, the others to the prefix only (SmolVLA).
            With 0, no layer attends to the suffix.
    """

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
    model_width: int
    causal: bool = False
    activation: Activation = Activation.GEGLU
    self_every: int = 1

    def crosses(self, layer: int) -> bool:
        """Whether a layer attends to the prefix only."""
        return self.self_every < 1 or layer % self.self_every > 0

    @property
    def has_state(self) -> bool:
        """Whether the first token is the state."""
        return self.tokens > self.horizon


class LayerTables(NamedTuple):
    """The constants of a layer in one step, float32; None where the norm or the residual has none.

    `scale` (W,), `shift` (N,) and `gate` (W,) of the norm before q/k/v and its residual, then of those of the MLP.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    gate: Tensor | None = None
    mlp_scale: Tensor | None = None
    mlp_shift: Tensor | None = None
    mlp_gate: Tensor | None = None


@dataclass(frozen=True)
class StepTables:
    """The constants of the steps, float32, contiguous.

    Args:
        input_scale, input_gate, post_scale, post_gate: (steps, L, W), of the norms before q/k/v (input) and before the
            MLP (post) in π0.5; None where the norms are plain.
        input_shift, post_shift: (steps, L, N), the shift of the norm times the next weight; or None.
        final_scale, final_shift: (steps, W), of the last norm. If it is plain, (W,) and None.
        b_in: (W,), or (steps, W) with the time's part if the norms are plain.
        w_in: (A, W), from actions to suffix tokens, or to the hidden layer of the time MLP.
        times, dts, gains: t, the size of the Euler step (negative) and the guidance's w(t) (`vla_accel.nn.rtc`) of each
            step, on the host.
        trained: whether the model was trained with clean prefixes. Then all rows but `final_*` are pairs (2, ·), of the
            step's t and of t = 0, which pinned actions have.
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
    dts: tuple[float, ...]
    gains: tuple[float, ...]
    trained: bool = False

    @property
    def steps(self) -> int:
        return len(self.times)

    @property
    def adaptive(self) -> bool:
        return self.final_shift is not None

    def layer(self, step: int, index: int) -> LayerTables:
        """The constants of a layer in a step."""
        tables = (
            self.input_scale, self.input_shift, self.input_gate, self.post_scale, self.post_shift, self.post_gate
        )  # fmt: skip
        return LayerTables(*(None if table is None else table[step, index] for table in tables))

    def final(self, step: int) -> tuple[Tensor, Tensor | None]:
        """The scale and shift of the last norm in a step."""
        if self.final_shift is None:
            return self.final_scale, None
        return self.final_scale[step], self.final_shift[step]

    def input_bias(self, step: int) -> Tensor:
        """The bias of the projection of actions in a step."""
        return self.b_in if self.adaptive else self.b_in[step]
