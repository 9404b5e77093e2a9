"""A script: compile, without a GPU, the passes between the products of a Diffusion Policy of the published size.

    python -m tests.support.compile_conv1d [VERSION …]

for these capabilities, or 9.0. Prints a JSON object a kernel, as `compile_kernels` does, which compiles products.
"""

from __future__ import annotations

import sys

import torch

from tests.support.compile_each import frames
from tests.support.compile_kernels import compile_on, print_row, source_of
from tests.support.gpus import ARCHITECTURES
from vla_accel.families.diffusion_policy.bench import ddpm
from vla_accel.families.diffusion_policy.family import DIFFUSION_POLICY
from vla_accel.kernels.gpu import Gpu

PASSES = ("_normed", "_scheduler_step")


def compile_for(gpu: Gpu) -> None:
    """Record what a call of two steps launches, and compile each pass once."""
    compile_on(gpu)
    launches = frames(DIFFUSION_POLICY, ddpm(), early=gpu.dependent_launch)["denoise"]
    once = {source_of(launch)[1]: launch for launch in launches if launch[0].__name__ in PASSES}
    for launch in once.values():
        print_row(gpu, launch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        for version in sys.argv[1:] or ["9.0"]:
            compile_for(ARCHITECTURES[version])
