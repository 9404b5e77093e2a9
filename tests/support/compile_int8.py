"""A script: compile, without a GPU, products of INT8 by every tile that a build would measure.

    python -m tests.support.compile_int8 [VERSION]

for this compute capability, or 9.0. Prints a JSON object a kernel, as compile_kernels.py does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.support.compile_kernels import META, Launch, print_compiled, recorded
from vla_accel.fp8 import INT8
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm import int8
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.gpu import Gpu

ROWS, WIDTH, HIDDEN = 544, 2048, 4096


def launches_of(gpu: Gpu, precision: str, batch: int) -> Iterator[Launch]:
    """Each activation by each tile; of INT8 alone."""
    if precision != "int8":
        return

    def empty(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    layer: Linear = make_linear(empty(HIDDEN, WIDTH), None, torch.bfloat16, 1.0, form=INT8)
    x = empty(ROWS, WIDTH)
    for tile in int8.candidates(gpu, ROWS):
        for activation in (Activation.NONE, Activation.GELU, Activation.GEGLU):
            columns = HIDDEN // 2 if activation.gated else HIDDEN
            scale, dtype = (None, torch.bfloat16) if activation is Activation.NONE else (1.0, torch.int8)
            out = empty(ROWS, columns, dtype=dtype)
            epilogue = Epilogue(activation=activation, quantize=scale)
            yield from recorded(functools.partial(int8.launch, x, layer, out, epilogue, tile))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        print_compiled(sys.argv[1:], launches_of)
