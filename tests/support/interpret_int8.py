"""The kernels of INT8 in Triton's interpreter, compared with their references (`interpreter`, test_int8). `main` prints
a JSON list for each case: its name, and how the stored values differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.runtimes import steered
from vla_accel.fp8 import INT8
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention import ops as attention_ops
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows import rows

# Rows of every tile size, columns and depths that end in the middle of a tile.
PRODUCTS = ((1, 8, 16), (33, 130, 48), (70, 128, 200), (130, 24, 64), (257, 264, 136))
# Activation, whether gate and up lie in turns, whether the output is quantised.
INSIDE = (
    (Activation.GELU, False, True),
    (Activation.GELU, False, False),
    (Activation.GEGLU, False, True),
    (Activation.GEGLU, True, True),
    (Activation.SWIGLU, True, False),
)


def product(rows_: int, n: int, k: int, bias: bool) -> Callable[[Tensor], None]:
    """Scales of one: what comes out is the sum itself, which float32 holds."""
    generator = torch.Generator().manual_seed(rows_ * n + k)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)

    x, weight, one = whole(rows_, k), whole(n, k), torch.ones(n)
    layer = Linear(weight, whole(n).float() if bias else None, one, torch.ones(()))
    return lambda out: gemm(x, layer, out)


def with_activation(activation: Activation, paired: bool, quantised: bool) -> Callable[[Tensor], None]:
    """Sums of a few units before the activation; quantised, some saturate."""
    generator = torch.Generator().manual_seed(len(activation))
    x = torch.randint(-127, 128, (70, 200), generator=generator, dtype=torch.int8)
    weight = torch.randint(-127, 128, (272, 200), generator=generator, dtype=torch.int8)
    scale = torch.rand(272, generator=generator) * 4e-5 + 1e-6
    layer = Linear(weight, torch.randn(272, generator=generator), scale, torch.ones(()), paired=paired)

    def call(out: Tensor) -> None:
        gemm(x, layer, out, Epilogue(activation=activation, quantize=40.0 if quantised else None))

    return call


def stored(op: str) -> Callable[[Tensor], None]:
    """An op whose output is quantised: some values saturate, some lie half-way between two integers."""
    generator = torch.Generator().manual_seed(len(op))
    x = torch.randn(6, 64, generator=generator) * 3

    def call(out: Tensor) -> None:
        if op == "add_norm":
            rows.add_norm(x, None, x, out, layer=True, eps=1e-6, inverse_scale=50.0)
        elif op == "geglu":
            rows.geglu(torch.cat((x, x), 1), out, inverse_scale=20.0)
        elif op == "gelu":
            # Exact halves: GELU of a large number is the number.
            rows.gelu(torch.arange(384).view(6, 64) * 0.5 + 10, out, inverse_scale=1.0)
        else:
            heads = x.view(1, 6, 2, 32)
            attention_ops.attention(heads, heads, heads, out.view(1, 6, 64), None, inverse_scale=40.0)

    return call


def main() -> None:
    cases: list[tuple[str, Callable[[Tensor], None], Any]] = [
        (f"product {shape} bias={bias}", product(*shape, bias), torch.empty(shape[0], shape[1]))
        for shape in PRODUCTS
        for bias in (False, True)
    ]
    cases += [
        (
            f"inside {activation} paired={paired} quantised={quantised}",
            with_activation(activation, paired, quantised),
            torch.empty(
                70, 272 if activation is Activation.GELU else 136, dtype=INT8.dtype if quantised else torch.float32
            ),
        )
        for activation, paired, quantised in INSIDE
    ]
    cases += [
        (op, stored(op), torch.empty(6, 64, dtype=INT8.dtype)) for op in ("add_norm", "geglu", "gelu", "attention")
    ]
    for name, call, out in cases:
        found = []
        for way in ("triton", "reference"):
            got = torch.full_like(out, 99)
            with steered(way):  # type: ignore[arg-type]
                call(got)
            found.append(got.double())
        difference = float((found[0] - found[1]).abs().max())
        print(
            json.dumps([name, difference, float((found[0] != found[1]).double().mean()), float(found[1].abs().max())])
        )
