"""A script: compile, without a GPU, the passes between the products of a Diffusion Policy of the published size.

    python -m tests.support.compile_conv1d [VERSION …]

for these capabilities, or 9.0. Prints a JSON object a kernel, as `compile_kernels` does, which compiles products.
"""

from __future__ import annotations

import sys

import torch

from tests.support.compile_kernels import META, compile_on, print_row, recorded, source_of
from tests.support.gpus import ARCHITECTURES
from tests.support.runtimes import steered
from vla_accel.config import EngineSpec
from vla_accel.families.diffusion_policy.bench import ddpm
from vla_accel.families.diffusion_policy.native import DiffusionPolicyStore
from vla_accel.families.diffusion_policy.network import DiffusionPolicy
from vla_accel.kernels.gpu import Gpu

PASSES = ("_normed", "_scheduler_step")
STEPS = 2


def compile_for(gpu: Gpu) -> None:
    """Record what a call of two steps launches, and compile each pass once."""
    compile_on(gpu)
    config = ddpm()
    with META:
        model = DiffusionPolicy(config).to_compute_dtype(torch.bfloat16).requires_grad_(False).eval()
    with steered("triton", META):
        program = DiffusionPolicyStore(model).denoise(1, STEPS, EngineSpec("native"))
    views, chunk = config.history * len(config.cameras), (config.action_horizon, config.action_dim)
    shapes = {
        "noise": (1, STEPS, *chunk), "features": (1, views, 2 * config.keypoints),
        "state": (1, config.history, config.state_dim), "actions": (1, *chunk),
    }  # fmt: skip
    tensors = {name: torch.empty(shape, device=META) for name, shape in shapes.items()}
    launches = recorded(lambda: program(tensors, tensors))
    once = {source_of(launch)[1]: launch for launch in launches if launch[0].__name__ in PASSES}
    for launch in once.values():
        print_row(gpu, launch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        for version in sys.argv[1:] or ["9.0"]:
            compile_for(ARCHITECTURES[version])
