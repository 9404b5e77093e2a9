"""The action expert of π0 and π0.5 for the denoise loop (`vla_accel.nn.loop`)."""

from __future__ import annotations

from vla_accel.families.pi0.network import Pi0, Pi0Config
from vla_accel.families.pi0.step_tables import step_tables
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.loop import ExpertSpec, StepTables, why_not
from vla_accel.nn.expert import ExpertWeights
from vla_accel.nn.flow import Schedule
from vla_accel.nn.weights import compute_dtype
from vla_accel.runtime import current


def expert_spec(config: Pi0Config) -> ExpertSpec:
    """Describe the expert."""
    e = config.expert
    return ExpertSpec(
        e.width, e.mlp_dim, e.heads, e.kv_heads, e.head_dim, e.depth, config.suffix_tokens, config.action_horizon,
        config.action_dim, config.kind == "pi05", e.eps, e.width,
    )  # fmt: skip


def expert_weights(model: Pi0, precision: str, *, streamed: bool = False) -> ExpertWeights:
    """Prepare the weights of the expert. Arguments as of `ExpertWeights.of`."""
    state = mix = None
    if model.config.kind == "pi0":
        state = Linear(model.weight("state_proj.weight").float(), model.weight("state_proj.bias").float())
        mix = make_linear(
            model.weight("action_time_mlp_out.weight"), model.weight("action_time_mlp_out.bias"),
            compute_dtype(precision),
        )  # fmt: skip
    return ExpertWeights.of(model, expert_spec(model.config), precision, mix, state, streamed=streamed)


def why_not_streamed(model: Pi0, precision: str, batch: int) -> str | None:
    """Explain why the streamed kernels do not run a model on its device; None if they do."""
    return why_not(current(model.device).gpu, expert_spec(model.config), batch, precision)


def steps_of(
    model: Pi0, weights: ExpertWeights, schedule: Schedule, max_weight: float | None = None, trained: bool = False
) -> StepTables:
    """Return the constants of the steps for these weights; they are the same for all shapes."""
    return step_tables(model, weights.normed_products(), schedule, max_weight, trained)
