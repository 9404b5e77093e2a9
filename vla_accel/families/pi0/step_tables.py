"""What a denoise step adds to the expert: everything that depends on the step alone, computed once for all steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vla_accel.families.pi0.network import Pi0
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.loop import StepTables
from vla_accel.nn.flow import Schedule
from vla_accel.nn.rtc import step_gains


@torch.inference_mode()
def step_tables(
    model: Pi0,
    products: Iterable[tuple[Linear, Linear]],
    schedule: Schedule,
    max_weight: float | None = None,
    trained: bool = False,
) -> StepTables:
    """The tables of a model for a schedule; `products`: each layer's q/k/v and gate/up as the programs use them;
    `max_weight` and `trained`: as in `RtcConfig`."""
    euler = model.times(schedule)
    times = tuple(euler.tolist())
    dts = schedule.dts
    gains = step_gains(times, dts, max_weight)
    euler = torch.cat((euler, euler.new_zeros(int(trained))))
    embeddings, modulations = model.conditioning(euler.to(model.device))

    def own(table: Tensor) -> Tensor:
        return paired(table) if trained else table.contiguous()

    with model.present("action_in_proj"):
        action_in, bias_in = model.action_in_proj.weight.double(), model.action_in_proj.bias.double()
    if modulations is None:
        # Two linear maps in a row are one: actions → width → hidden layer. The time's half is a constant of the step.
        width = model.config.expert.width
        with model.present("action_time_mlp_in", "expert.norm"):
            mlp, bias = model.action_time_mlp_in.weight.double(), model.action_time_mlp_in.bias.double()
            final = model.expert.norm.weight.float().contiguous()  # type: ignore[union-attr]
        from_actions, from_time = mlp[:, :width], mlp[:, width:]
        rows = own((from_actions @ bias_in + bias + embeddings.double() @ from_time.T).float())
        w_in = (from_actions @ action_in).T.float().contiguous()
        return StepTables(None, None, None, None, None, None, final, None, rows, w_in, times, dts, gains, trained)
    scale, shift, gate = modulations.float().chunk(3, dim=-1)  # each (steps, 2 L + 1, W)

    shifted: tuple[list[Tensor], list[Tensor]] = ([], [])
    for layer, pair in enumerate(products):
        for which, product in enumerate(pair):
            weight = product.true_weight(torch.float32)
            shifted[which].append(shift[:, 2 * layer + which] @ weight.T)
    of_input, of_post = (own(torch.stack(rows, 1)) for rows in shifted)
    return StepTables(
        own(scale[:, 0:-1:2]), of_input, own(gate[:, 0:-1:2]), own(scale[:, 1:-1:2]), of_post, own(gate[:, 1:-1:2]),
        scale[:, -1].contiguous(), shift[:, -1].contiguous(), bias_in.float().contiguous(),
        action_in.T.float().contiguous(), times, dts, gains, trained,
    )  # fmt: skip


def paired(table: Tensor) -> Tensor:
    """Rows (n + 1, …, W) of n steps and of t = 0 as (n, …, 2, W): each step's row, then that of t = 0."""
    return torch.stack((table[:-1], table[-1:].expand_as(table[:-1])), -2).contiguous()
