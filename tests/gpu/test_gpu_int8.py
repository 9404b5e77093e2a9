"""Products of INT8 on a GPU, by every tile that it has room for, against their reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.gpu_policies import DEVICE, NAN
from vla_accel.fp8 import INT8
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm import int8
from vla_accel.kernels.gemm.epilogue import PLAIN, Epilogue
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.gpu import Gpu

pytestmark = pytest.mark.gpu
SHAPES = [(1, 128, 64), (50, 272, 200), (130, 4352, 1152), (968, 2048, 2048)]


def operands(rows: int, n: int, k: int, *, paired: bool = False) -> tuple[Tensor, Linear]:
    """Integers of the whole range, with scales and a bias that bring sums to a few units."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    layer = make_linear(weight, torch.randn(n, generator=generator), torch.float32, 3.0, form=INT8)
    return torch.randint(-127, 128, (rows, k), generator=generator, dtype=torch.int8), replace(layer, paired=paired)


def on_gpu(layer: Linear) -> Linear:
    names = ("weight", "bias", "weight_scale", "input_scale")
    return replace(layer, **{name: getattr(layer, name).to(DEVICE) for name in names})


def tiles(rows: int) -> list[int8.Int8Tile]:
    gpu = Gpu.of(torch.device(DEVICE))
    assert gpu is not None
    return int8.candidates(gpu, rows)


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_every_tile_sums_exactly(rows: int, n: int, k: int) -> None:
    """To the last bit of float32, so an integer that is off by one is seen."""
    x, layer = operands(rows, n, k)
    want = torch.empty(rows, n)
    gemm(x, layer, want)
    there, x = on_gpu(layer), x.to(DEVICE)
    for tile in tiles(rows):
        got = torch.full((rows, n), NAN, device=DEVICE)
        int8.launch(x, there, got, PLAIN, tile)
        # The bias may be added by a fused instruction.
        torch.testing.assert_close(got.cpu(), want, rtol=3e-7, atol=3e-7, msg=str(tile))


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GEGLU, Activation.SWIGLU])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_every_tile_has_the_activation_inside(rows: int, n: int, k: int, activation: Activation) -> None:
    for paired in (False, True) if activation.gated else (False,):
        x, layer = operands(rows, n, k, paired=paired)
        want = torch.empty(rows, n // 2 if activation.gated else n, dtype=torch.int8)
        epilogue = Epilogue(activation=activation, quantize=20.0)
        gemm(x, layer, want, epilogue)
        assert want.float().abs().mean() > 1
        there, on_device = on_gpu(layer), x.to(DEVICE)
        for tile in tiles(rows):
            got = torch.full_like(want, 99, device=DEVICE)
            int8.launch(on_device, there, got, epilogue, tile)
            apart = (got.cpu().int() - want.int()).abs()
            # A value that lies half-way between two integers may go either way.
            assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) <= 0.002, (tile, paired)


def test_a_measured_product_is_the_usual_ones() -> None:
    x, layer = operands(544, 1024, 512)
    there, x = on_gpu(layer), x.to(DEVICE)
    before, after = torch.empty(544, 1024, device=DEVICE), torch.empty(544, 1024, device=DEVICE)
    gemm(x, there, before)
    int8.tune(there, Activation.NONE, 544)
    gemm(x, there, after)
    assert torch.equal(before, after)
