"""A script: compile, without a GPU, every Triton kernel that GR00T N1.7's programs launch at full size.

For the compute capability on its command line, or Hopper's. As compile_kernels.py, whose rows it prints a part of;
`--count` prints how many kernels a call launches instead.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch

from tests.support.compile_kernels import META, Launch, print_compiled, recorded
from tests.support.runtimes import steered
from vla_accel.config import EngineSpec
from vla_accel.families.groot.components import groot_components
from vla_accel.families.groot.language import Layout
from vla_accel.families.groot.native import GrootStore
from vla_accel.families.groot.network import Groot, groot_n17
from vla_accel.kernels.gpu import Gpu

STEPS = 4


def launches_of(gpu: Gpu, precision: str, batch: int) -> dict[str, list[Launch]]:
    """What a call launches, by component: two views of 256 x 256 and a prompt of the first bucket."""
    with META:
        model = Groot(groot_n17()).to_compute_dtype(torch.bfloat16).requires_grad_(False).eval()
    found = {}
    with steered("triton", META):
        for component in groot_components(model, Layout(2, (8, 8), 32), batch, STEPS, True, GrootStore(model)):
            assert component.native is not None
            precise = precision if component.name == "denoise" else "auto"
            program = component.native(EngineSpec("native", precision=precise))  # type: ignore[arg-type]
            for part in (program, getattr(program, "stack", None)):
                if hasattr(part, "chain"):
                    part.chain.early = gpu.dependent_launch  # type: ignore[union-attr]
            tensors = {s.name: s.empty(META) for s in (*component.inputs, *component.outputs)}
            found[component.name] = recorded(lambda p=program, t=tensors: p(t, t))
    return found


def main(words: list[str]) -> None:
    gpu = print_compiled(words, lambda *asked: itertools.chain(*launches_of(*asked).values()))
    if "--count" in words:
        print(json.dumps({name: len(found) for name, found in launches_of(gpu, "auto", 1).items()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main(sys.argv[1:])
