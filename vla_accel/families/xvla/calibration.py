"""Scales of X-VLA's transformer for FP8 and INT8: the largest input of every product over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.families.xvla.network import Xvla
from vla_accel.fp8 import Scales, fingerprint
from vla_accel.nn.calibration import folded_block
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.processing import Inputs


@torch.no_grad()
def calibrate(model: Xvla, inputs: Sequence[Inputs], source: str) -> Scales:
    """Measure scales from prepared observations, with noise of fixed seeds. `source`: where they come from."""
    config, amax = model.config, dict[str, float]()
    # The inputs are those of products with the norms' weights folded in, as engines compute them.
    blocks = nn.ModuleList(folded_block(model, f"layers.{i}", config.block) for i in range(config.depth))

    def measure(name: str, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        amax[name] = max(amax.get(name, 0.0), float(arguments[0].abs().max()))

    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(measure, f"layers.{name}"))
    others = [name for name, _ in model.named_children() if name != "layers"]
    own, schedule = model.layers, Schedule.uniform(config.num_steps)
    with model.present(*others, "frame", "position_embedding", "soft_prompts"):
        model.layers = blocks
        try:
            for index, one in enumerate(inputs):
                _denoised(model, one, schedule, torch.Generator().manual_seed(index))
        finally:
            model.layers = own
    return Scales(amax, len(inputs), source, "none", fingerprint(model, amax))


def _denoised(model: Xvla, inputs: Inputs, schedule: Schedule, generator: torch.Generator) -> Tensor:
    def placed(value: Any) -> Tensor:
        return torch.as_tensor(value).to(model.device)[None]

    tokens = model.image_tokens(model.pixels(*map(placed, inputs.images)))
    context = model.context(tokens, placed(inputs.tokens))
    noise = torch.randn(model.config.action_horizon, model.config.action_dim, generator=generator)
    constants = model.step_constants(schedule)
    return model.denoise(placed(noise), placed(inputs.state), context, constants, schedule=schedule)
