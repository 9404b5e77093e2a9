"""Kernels on a GPU against their references."""

from __future__ import annotations

import pytest
import torch

from tests.support import kernel_calls as calls
from tests.support import kernel_cases as cases
from tests.support.gpu_policies import DEVICE, NAN
from tests.support.kernel_shapes import check_on_gpu
from vla_accel.fp8 import E4M3
from vla_accel.kernels.activation import Activation

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
