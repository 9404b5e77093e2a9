"""Models with random weights of any size, for measuring speed and agreement where no checkpoint can be had.

Weights are drawn so that activations stay of order one through every layer: a residual branch adds 1 / √(2 depth).
"""

from __future__ import annotations

import math

import torch

from vla_accel.models.pi0 import Pi0, Pi0Config

# The products that end a residual branch.
_BRANCH_ENDS = ("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")


@torch.no_grad()
def random_model(config: Pi0Config, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Pi0:
    """A model of `config` with seeded random weights, on `device`, large products in `dtype`, in eval mode.

    Drawn on the device: the same seed gives the same weights on one kind of device, not across kinds.
    """
    with torch.device("meta"):
        model = Pi0(config)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.02, generator=generator)
        elif name == "vision.position_embedding":
            parameter.normal_(0.0, 0.5, generator=generator)
        elif name == "embed.weight":
            # Scaled by √width on the way in, to the size of the image tokens.
            parameter.normal_(0.0, 1.0 / math.sqrt(config.prefix.width), generator=generator)
        elif "norm" in name and name.endswith("dense.weight"):
            parameter.normal_(0.0, 0.2 / math.sqrt(parameter.shape[1]), generator=generator)
        elif "norm" in name:
            parameter.normal_(1.0 if name.startswith("vision.") else 0.0, 0.1, generator=generator)
        else:
            fan_in = parameter[0].numel()
            gain = 1.0 / math.sqrt(2 * _depth(config, name)) if name.endswith(_BRANCH_ENDS) else 1.0
            parameter.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
    # A norm's gate multiplies a branch: around one, as trained models have it, not around zero.
    for name, parameter in model.named_parameters():
        if name.startswith("expert.") and name.endswith("norm.dense.bias"):
            parameter[2 * config.expert.width :] += 1.0
    return model.to_compute_dtype(dtype).requires_grad_(False).eval()


def _depth(config: Pi0Config, name: str) -> int:
    return {"vision": config.vision.depth, "prefix": config.prefix.depth}.get(name.split(".")[0], config.expert.depth)
