"""What a denoise step adds to the expert: everything that depends on the step alone, computed once for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.models.pi0 import Pi0, euler_times
from vla_accel.models.rtc import step_gains
from vla_accel.ops.linear import Linear


@dataclass(frozen=True)
class StepTables:
    """Constants by step (and layer), float32, contiguous.

    π0.5: `*_scale`, `*_gate` (steps, L, W) of the norm before q/k/v (input) and before the MLP (post); `*_shift`: the
    norm's shift already multiplied by the weight that follows, (steps, L, N); `final_*` (steps, W); `b_in` (W,).
    π0: None, but `final_scale` (W,), the norm's weight, and `b_in` (steps, W), which holds the time's part. `w_in`
    (A, W): actions to suffix tokens; in π0 to the hidden layer of the time MLP. On the host: `times` t and `gains` w(t)
    of the guidance (`vla_accel.models.rtc`).
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


@torch.inference_mode()
def step_tables(
    model: Pi0, products: Sequence[tuple[Linear, Linear]], num_steps: int, max_weight: float | None = None
) -> StepTables:
    """The tables of a model for `num_steps`; `products`: each layer's q/k/v and gate/up as the programs use them;
    `max_weight`: of the guidance, as in `RtcConfig`."""
    device = model.action_in_proj.weight.device
    euler = euler_times(num_steps)
    times = tuple(euler.tolist())
    gains = step_gains(times, max_weight)
    embeddings, modulations = model.conditioning(euler.to(device))
    action_in, bias_in = model.action_in_proj.weight.double(), model.action_in_proj.bias.double()
    if modulations is None:
        # Two linear maps in a row are one: actions → width → hidden layer. The time's half is a constant of the step.
        width = model.config.expert.width
        mlp, bias = model.action_time_mlp_in.weight.double(), model.action_time_mlp_in.bias.double()
        from_actions, from_time = mlp[:, :width], mlp[:, width:]
        rows = (from_actions @ bias_in + bias + embeddings.double() @ from_time.T).float().contiguous()
        w_in = (from_actions @ action_in).T.float().contiguous()
        final = model.expert.norm.weight.float().contiguous()  # type: ignore[union-attr]
        return StepTables(None, None, None, None, None, None, final, None, rows, w_in, times, gains)
    scale, shift, gate = modulations.float().chunk(3, dim=-1)  # each (steps, 2 L + 1, W)

    def folded(which: int) -> Tensor:
        rows = []
        for layer, pair in enumerate(products):
            weight = pair[which].weight.float() * pair[which].weight_scale_value
            rows.append(shift[:, 2 * layer + which] @ weight.T)
        return torch.stack(rows, 1).contiguous()

    return StepTables(
        scale[:, 0:-1:2].contiguous(), folded(0), gate[:, 0:-1:2].contiguous(),
        scale[:, 1:-1:2].contiguous(), folded(1), gate[:, 1:-1:2].contiguous(),
        scale[:, -1].contiguous(), shift[:, -1].contiguous(), bias_in.float().contiguous(),
        action_in.T.float().contiguous(), times, gains,
    )  # fmt: skip
