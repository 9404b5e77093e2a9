"""Kernels on a GPU against their references."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support import kernel_calls as calls
from tests.support import kernel_cases as cases
from tests.support.gpu_policies import DEVICE, NAN
from tests.support.kernel_shapes import check_on_gpu
from vla_accel.fp8 import E4M3
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gpu import Gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", cases.CASES)
def test_a_kernel_computes_what_its_reference_does(name: str) -> None:
    check_on_gpu(name)


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 64, 128), (17, 1152, 4352), (51, 4352, 1152), (100, 256, 48)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("what", ["plain", "bias", "gelu"])
def test_a_product_of_cublas(rows: int, k: int, n: int, fp8: bool, what: str) -> None:
    if fp8 and what == "gelu":
        pytest.skip("FP8 has its GELU in a kernel of its own")
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(n, k, generator=generator) / k**0.5, torch.randn(n, generator=generator)
    x = torch.randn(rows, k, generator=generator).bfloat16()
    from vla_accel.kernels.gemm import ops, weights
    from vla_accel.kernels.gemm.epilogue import Epilogue

    def layer(device: str) -> weights.Linear:
        return weights.make_linear(
            weight.to(device), None if what == "plain" else bias.to(device), torch.bfloat16, 6.0 if fp8 else None
        )

    host = layer("cpu")
    if fp8:
        x = (x.float() * (host.inverse_scale or 1.0)).clamp(-448, 448).to(E4M3.dtype)
    want, got = torch.full((rows, n), NAN), torch.full((rows, n), NAN, dtype=torch.bfloat16, device=DEVICE)
    epilogue = Epilogue(activation=Activation.GELU if what == "gelu" else Activation.NONE)
    ops.gemm(x, host, want, epilogue)
    with torch.inference_mode():
        ops.gemm(x.to(DEVICE), layer(DEVICE), got, epilogue)
    found = calls.difference(got, want)
    assert found.worst <= 0.03 and found.mean <= 0.004, found


def test_the_patch_product_is_exact_to_float32() -> None:
    from vla_accel.kernels.gemm import ops

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (37, 1184), generator=generator).bfloat16()
    weight = torch.randn(72, 1184, generator=generator).bfloat16()
    got = torch.full((37, 72), NAN, device=DEVICE)
    ops.patch_product(rows.to(DEVICE), weight.to(DEVICE), got)
    want = (rows.double() @ weight.double().T).float()
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=float(want.abs().max()) * 1e-5)


CONVOLUTIONS = [(64, 64, 3, 1, 24, 32), (64, 128, 3, 2, 25, 31), (64, 128, 1, 2, 24, 32), (512, 512, 3, 1, 15, 20)]


@pytest.mark.parametrize(("channels", "outs", "taps", "stride", "height", "width"), CONVOLUTIONS)
def test_a_convolution_in_triton_is_the_librarys(
    channels: int, outs: int, taps: int, stride: int, height: int, width: int
) -> None:
    """In all tiles that a program measures, twice in a row as dependent launches, and bit for bit the same."""
    from vla_accel.kernels.chain import Chain
    from vla_accel.kernels.image import convolution
    from vla_accel.kernels.image.convolution import ConvPlan, ConvSizes, convolve

    draw = torch.Generator(DEVICE).manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=DEVICE).bfloat16()

    x, weight = half(2, height, width, channels), half(outs, channels, taps, taps) / (channels * taps * taps) ** 0.5
    weight = weight.contiguous(memory_format=torch.channels_last)
    residual = half(2, -(-height // stride), -(-width // stride), outs)
    shift = torch.randn(outs, generator=draw, device=DEVICE)
    call = partial(convolve, stride=stride, shift=shift, residual=residual, activation=Activation.RELU)
    want = call(x.float(), weight.float())
    sizes, gpu = ConvSizes(residual.numel() // outs, outs, channels, taps, stride), Gpu.of(torch.device(DEVICE))
    tiles = convolution.candidates(gpu, sizes)
    assert tiles
    for tile in tiles:
        plan = ConvPlan(tile, convolution.workspace(sizes, tile, x.device))
        with torch.inference_mode(), Chain(gpu).resumed():
            got, again = (call(x, weight, plan=plan) for _ in range(2))
        assert torch.equal(got, again), tile
        assert (got.float() - want).norm() < 0.01 * want.norm(), tile


def test_a_stem_in_triton_is_the_librarys() -> None:
    from vla_accel.kernels.image.convolution import convolve_pixels, pack_stem

    draw = torch.Generator(DEVICE).manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 50, 71, 3), generator=draw, device=DEVICE, dtype=torch.uint8)
    scales = torch.randn(2, 2, 3, generator=draw, device=DEVICE) / 64
    weight = torch.randn(64, 3, 7, 7, generator=draw, device=DEVICE) / 12
    want, got = (torch.empty(2, 2, 24, 35, 64, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16))
    with torch.inference_mode():
        for out in (want, got):
            convolve_pixels(pack_stem(weight, out.dtype), images[:, 1:, 1:49, 1:], scales, out)
    assert (got.float() - want).norm() < 0.01 * want.norm()
