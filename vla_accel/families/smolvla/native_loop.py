"""SmolVLA's action expert for the denoise loop (`vla_accel.nn.loop`).

The layers are so small that launches dominate. A layer is four kernels, five with fused ops if it attends to the
actions as well.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vla_accel.families.pi0.step_tables import paired
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.weights import make_linear
from vla_accel.kernels.loop import ExpertSpec, StepTables, why_not
from vla_accel.kernels.loop.tables import WIDTH_MULTIPLE
from vla_accel.nn.expert import ExpertWeights
from vla_accel.nn.flow import Schedule
from vla_accel.nn.rtc import step_gains
from vla_accel.nn.weights import compute_dtype
from vla_accel.numeric import round_up
from vla_accel.runtime import current


def expert_spec(config: SmolVlaConfig) -> ExpertSpec:
    """Describe the expert."""
    e = config.expert
    return ExpertSpec(
        round_up(e.width, WIDTH_MULTIPLE), e.mlp_dim, e.heads, e.kv_heads, e.head_dim, e.depth, config.action_horizon,
        config.action_horizon, config.action_dim, False, e.eps, e.width, causal=True, activation=Activation.SWIGLU,
        self_every=config.self_every,
    )  # fmt: skip


def expert_weights(model: SmolVla, precision: str, *, streamed: bool = False) -> ExpertWeights:
    """Prepare the weights of the expert. Arguments as of `ExpertWeights.of`."""
    spec = expert_spec(model.config)
    pad = spec.width - spec.model_width if streamed else 0
    mix = make_linear(
        model.weight("action_time_mlp_out.weight"), model.weight("action_time_mlp_out.bias"), compute_dtype(precision),
        pad_k=pad, pad_n=pad,
    )  # fmt: skip
    return ExpertWeights.of(model, spec, precision, mix, streamed=streamed)


def why_not_streamed(model: SmolVla, precision: str, batch: int) -> str | None:
    """Explain why the streamed kernels do not run a model on its device; None if they do."""
    return why_not(current(model.device).gpu, expert_spec(model.config), batch, precision)


@torch.inference_mode()
def steps_of(
    model: SmolVla,
    schedule: Schedule,
    max_weight: float | None = None,
    trained: bool = False,
    *,
    streamed: bool = False,
) -> StepTables:
    """Return the constants of the steps of a model; they are the same for all weights and shapes.

    `max_weight`, `trained`: as in `RtcConfig`; `streamed`: for the streamed kernels.
    """
    euler = model.times(schedule)
    times = tuple(euler.tolist())
    euler = torch.cat((euler, euler.new_zeros(int(trained))))
    rows, _ = model.conditioning(euler.to(model.device))
    with model.present("action_in_proj", "action_time_mlp_in", "expert.norm"):
        # Two linear maps in a row are one: actions → width → hidden layer.
        from_actions = model.action_time_mlp_in.weight[:, : model.config.expert.width].double()
        b_in = (from_actions @ model.action_in_proj.bias.double() + rows.double()).float().contiguous()
        w_in = (from_actions @ model.action_in_proj.weight.double()).T.float().contiguous()
        final = (model.expert.norm.factor - 1.0).float().contiguous()
    gains = step_gains(times, schedule.dts, max_weight)
    if streamed:
        pad = expert_spec(model.config).width - model.config.expert.width
        b_in, w_in, final = (F.pad(x, (0, pad)).contiguous() for x in (b_in, w_in, final))
    b_in = paired(b_in) if trained else b_in
    return StepTables(None, None, None, None, None, None, final, None, b_in, w_in, times, schedule.dts, gains, trained)
