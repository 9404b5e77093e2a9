"""A script: into how many codes, but for the name of the target, Triton compiles a launch for a generation of GPUs.

    python -m tests.support.compile_generations

Prints a JSON list for each generation of several capabilities and each of `KERNELS`: both, and the number of codes.
"""

from __future__ import annotations

import json
import re

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from tests.support.compile_each import of_model
from tests.support.compile_kernels import Launch, compile_on, number_of, source_of
from tests.support.gpus import ARCHITECTURES, GENERATIONS

KERNELS = ("_attention", "_int8_product", "_pipelined_pair")


def code_of(launch: Launch, version: str) -> str:
    """The assembly for a capability, without the lines that name it."""
    target = GPUTarget("cuda", number_of(version), 32)
    made = triton.compile(source_of(launch)[0], target=target, options=launch[2])
    return re.sub(r"^\.(version|target) .*$", "", made.asm["ptx"], flags=re.MULTILINE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for versions in GENERATIONS:
        if len(versions) > 1:
            compile_on(gpu := ARCHITECTURES[versions[0]])
            knobs.nvidia.dump_ptxas_log = False
            with torch.inference_mode():
                found = {launch[0].__name__: launch for launch in of_model(gpu, "pi0 int8")}
            for name in KERNELS:
                codes = {code_of(found[name], version) for version in versions}
                print(json.dumps([name, versions, len(codes)]))
