"""A script: compile, without a GPU, each Triton kernel once, in the first shape that some full-size model launches.

For the compute capability on its command line, or Hopper's. With another type of operands it counts as another kernel;
what compile_kernels.py compiles for every capability is left out. As compile_groot.py, whose rows it prints.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support import compile_decode, compile_groot, compile_int8, compile_kernels
from tests.support.compile_kernels import META, MODELS, Launch, print_compiled, recorded, types_of
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm import triton_library
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Rotation
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.image import triton_image as image
from vla_accel.kernels.image.ops import GroupNorm, Sum

EVERYWHERE = ("pi05", "pi05 fp8", "pi05 int8", "pi0", "pi0 int8")
"""Models that compile_kernels.py compiles for every capability."""


def once(gpu: Gpu, precision: str, batch: int) -> Iterator[Launch]:
    """Each kernel and type of operands that `EVERYWHERE` does not have; asked for once, for all precisions."""
    if (precision, batch) != ("auto", 1):
        return
    met = {kind(launch) for name in EVERYWHERE for launch in of_model(gpu, name, everywhere=True)}
    for launch in others(gpu):
        if kind(launch) not in met:
            met.add(kind(launch))
            yield launch


def kind(launch: Launch) -> tuple[str, ...]:
    """A kernel's name, and the types of what it reads and writes."""
    return (launch[0].__name__, *sorted({word for word in types_of(launch) if word.startswith(("*", "tensordesc"))}))


def of_model(gpu: Gpu, name: str, *, everywhere: bool = False) -> list[Launch]:
    """A model's of compile_kernels.py; but for `everywhere`, its loop has INT8 weights where the model is in INT8."""
    *shape, precision = MODELS[name]
    if precision == "fp8" and not gpu.fp8:
        return []
    low = precision == "fp8" or gpu.version in compile_kernels.INT8_LOOPS or not everywhere
    return compile_kernels.launches_of(gpu, *shape, precision, loop_precision=precision if low else "auto")  # type: ignore[arg-type]


def others(gpu: Gpu) -> Iterator[Launch]:
    """All other launches, the ordinary ones first."""
    for name in MODELS:
        yield from of_model(gpu, name)
    for precision in ("auto", "int8", *(["fp8"] if gpu.fp8 else [])):
        yield from itertools.chain(*compile_groot.launches_of(gpu, precision, 1).values())
        yield from compile_decode.launches_of(gpu, precision, 1)
        yield from compile_int8.launches_of(gpu, precision, 1)
    for call in (*around_products(), *images()):
        yield from recorded(call)


def around_products() -> Iterator[Callable[[], Any]]:
    """Calls of what stands around the library's products, of a batch of eight of π0.5."""
    width, hidden, heads, head_dim, rows, tokens = 1024, 4096, 8, 256, 80, 10

    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=META)

    x, q, k = half(rows, width), half(8, tokens, heads, head_dim), half(8, tokens, 1, head_dim)
    norm, angles = Norm(1e-6, Moments.like(x, width, True)), wide(600, head_dim // 2)
    lengths = torch.empty(8, dtype=torch.int32, device=META)

    def finish(out: Tensor | Heads, columns: int, norm: Norm | None, **epilogue: Any) -> Callable[[], Any]:
        weights, y = Linear(half(columns, width)), half(rows, columns)
        return lambda: triton_library.finish(y, weights, out, Epilogue(**epilogue), norm, width)

    columns = (heads + 2) * head_dim
    yield finish(Heads(q, k, k), columns, norm, shift=wide(columns), rope=Rotation(angles, angles, lengths))
    yield finish(half(rows, hidden), 2 * hidden, norm, shift=wide(2 * hidden), activation=Activation.GEGLU)
    residual = {"gate": wide(width), "residual": True, "moments": norm.moments, "next_scale": wide(width)}
    yield finish(x, width, None, **residual)


def images() -> Iterator[Callable[[], Any]]:
    """Calls of the image models' kernels, at sizes of Stable Diffusion and of Qwen-Image's autoencoder."""

    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=META)

    added = Sum(half(2, 64, 64, 96), half(2, 64, 64, 96), wide(2, 96))
    grouped = Sum(half(2, 64, 64, 320), half(2, 64, 64, 320), wide(2, 320))
    norm = GroupNorm(32, wide(320), wide(320), 1e-5)
    rows = half(2, 4096, 320)
    yield lambda: image._launch_rows(added, wide(96), Activation.SILU, keep=True, pad=True)
    yield lambda: image.group_act(grouped, norm, activation=Activation.SILU, keep=True, skip=None)
    yield lambda: image.add_layer_norm(rows, rows, wide(320), wide(320), wide(320), 1e-5)
    yield lambda: image.geglu_erf(half(2, 4096, 2560))
    yield lambda: image.softmax(wide(4096, 4096), torch.bfloat16)
    # The narrower of its two tiles, which a GPU with little shared memory takes.
    heads = half(1, 4096, 384)
    yield lambda: image.wide_attention(heads, heads, heads, 64)


if __name__ == "__main__":
    # The loop in Triton, on Hopper, too.
    for programs in (compile_kernels.pi0_programs, compile_kernels.smolvla_programs):
        setattr(programs, "why_not_streamed", lambda *_: "Triton's is asked for")  # noqa: B010
    torch.set_num_threads(1)
    with torch.inference_mode():
        print_compiled(sys.argv[1:], once)
