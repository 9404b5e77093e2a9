"""A script: compile, without a GPU, every Triton kernel that π0-FAST's decode program launches at full size.

For the compute capability on its command line, or Hopper's. As compile_groot.py, whose rows it prints; `--count`
prints how many kernels a token launches instead, of Triton's alone.
"""

from __future__ import annotations

import sys

import torch

from tests.support.compile_kernels import META, Launch, print_compiled, recorded
from tests.support.runtimes import steered
from vla_accel.config import EngineSpec
from vla_accel.families.pi0.native import Pi0FastStore
from vla_accel.families.pi0_fast.native_decode import NativeDecode
from vla_accel.families.pi0_fast.network import Pi0Fast, pi0_fast
from vla_accel.kernels.gpu import Gpu


def launches_of(gpu: Gpu, precision: str, batch: int) -> list[Launch]:
    """What a token launches behind two views and a prompt of the first bucket but two."""
    with META:
        model = Pi0Fast(pi0_fast()).to_compute_dtype(torch.bfloat16).requires_grad_(False).eval()
    with steered("triton", META):
        spec = EngineSpec("native", precision=precision)  # type: ignore[arg-type]
        program = Pi0FastStore(model).decode(batch, model.config.prefix_tokens(2, 96), 64, spec)
        assert isinstance(program, NativeDecode)
        return recorded(program.decode_next)


def main(words: list[str]) -> None:
    gpu = print_compiled(words, launches_of)
    if "--count" in words:
        print(len(launches_of(gpu, "auto", 1)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main(sys.argv[1:])
