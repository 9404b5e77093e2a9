"""The Hopper GEMM (`ops/cuda/gemm/`) itself, in the emulator, against float32: what blocks fetch for each other, what
they add up, and every epilogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.emulated_gemm import BF16, FP8, FP16, EmulatedGemm, drawn, is_close, room
from tests.support.gemm_reference import product
from tests.support.gpus import H200, MIG_SLICE
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm import hopper as gemm
from vla_accel.kernels.gemm.hopper import Tiling
from vla_accel.kernels.gpu import Gpu

TILINGS = (
    Tiling(1, 1, 1, 64, 4), Tiling(2, 1, 1, 40, 3), Tiling(1, 2, 1, 56, 3), Tiling(2, 1, 2, 24, 3),
    Tiling(1, 1, 1, 64, 3, 2, 1), Tiling(2, 1, 1, 32, 3, 1, 2), Tiling(1, 1, 1, 40, 3, 2, 2),
    Tiling(2, 1, 1, 40, 3, split=2), Tiling(1, 1, 1, 48, 3, 2, 1, 3), Tiling(1, 1, 1, 40, 3, resident=2),
    Tiling(2, 1, 1, 32, 3, persistent=True), Tiling(1, 1, 2, 24, 3, 2, 1, persistent=True),
)  # fmt: skip
QUICK = (1, 6, 7, 10)
SOME = [t if i in QUICK else pytest.param(t, marks=pytest.mark.slow) for i, t in enumerate(TILINGS)]
FEW = replace(MIG_SLICE, multiprocessors=6)
"""Of these fewer are there than tiles."""
Multiply = Callable[..., None]


@pytest.fixture
def multiply(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> Multiply:
    """`gemm.gemm` by an emulated kernel."""
    gemms = EmulatedGemm(monkeypatch, emulated)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gpu: Gpu = H200, **options: Any) -> None:
        norm = options.get("norm")
        constant, produced = [weight, bias], [x, out, options.get("moments")]
        if norm is not None:
            constant, produced = [*constant, norm.weight_sums], [*produced, norm.moments]
        gemms.touch(constant, produced)
        with Chain(gpu).resumed():
            gemm.gemm(x, weight, bias, out, gpu=gpu, **options)

    return call


def moments_of(x: Tensor) -> Tensor:
    parts = x.float().unflatten(1, (-1, 64)).transpose(0, 1)
    return torch.stack((parts.mean(2), parts.var(2, unbiased=False) * 64), 2)


@pytest.mark.parametrize("tiling", SOME)
@pytest.mark.parametrize("kind", [BF16, pytest.param(FP16, marks=pytest.mark.slow), FP8])
def test_tilings_compute_the_product(tiling: Tiling, kind: torch.dtype, multiply: Multiply) -> None:
    rows, n, k = 101, 176, 528 if kind == FP8 else 272
    x, weight = drawn(rows, k).to(kind), drawn(n, k, seed=1).to(kind)
    wide = BF16 if kind == FP8 else kind
    bias = drawn(n, seed=2).to(wide)
    out, whole = room(rows, n, wide)
    for gpu in (H200, FEW):
        multiply(x, weight, bias, out, gpu=gpu, tiling=tiling, scale=0.05)
        is_close(out, product(x, weight, bias, 0.05, Activation.NONE), wide)
        assert whole[0].isnan().all() and whole[-1].isnan().all()


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GEGLU, Activation.SWIGLU])
@pytest.mark.parametrize(("kind", "narrow"), [(BF16, False), (FP8, True)])
def test_epilogues(activation: Activation, kind: torch.dtype, narrow: bool, multiply: Multiply) -> None:
    rows, n, k = 75, 192, 256
    x, weight = drawn(rows, k).to(kind), drawn(n, k, seed=1).to(kind)
    bias = None if activation.gated else drawn(n, seed=2).bfloat16()
    out, _ = room(rows, n // 2 if activation.gated else n, FP8 if narrow else BF16)
    for tiling in (TILINGS[0], TILINGS[2], TILINGS[7]):
        multiply(
            x, weight, bias, out, tiling=tiling, activation=activation, scale=k**-0.5,
            inverse_scale=40.0 if narrow else None,
        )  # fmt: skip
        want = product(x, weight, bias, k**-0.5, activation)
        is_close(out, (want * 40).clamp(-448, 448) if narrow else want, out.dtype)


@pytest.mark.parametrize("tiling", [*SOME[:4], *SOME[5:9]])
def test_a_residual_and_its_moments(tiling: Tiling, multiply: Multiply) -> None:
    rows, n, k = 101, 192, 320
    x, weight, bias = drawn(rows, k).bfloat16(), drawn(n, k, seed=1).bfloat16(), drawn(n, seed=2).bfloat16()
    onto, whole = room(rows, n, BF16)
    before = drawn(rows, n, seed=3).bfloat16()
    onto.copy_(before)
    moments = torch.full((n // 64, rows, 2), float("nan"))
    multiply(x, weight, bias, onto, tiling=tiling, scale=0.05, moments=moments)
    is_close(onto, before.float() + product(x, weight, bias, 0.05, Activation.NONE), BF16)
    torch.testing.assert_close(moments, moments_of(onto), atol=1e-4, rtol=1e-4)
    assert whole[0].isnan().all() and whole[-1].isnan().all()


@pytest.mark.parametrize("tiling", SOME[:10])
@pytest.mark.parametrize("norm", [pytest.param("rms", marks=pytest.mark.slow), "layer", "gated"])
def test_norms_of_the_rows(tiling: Tiling, norm: str, multiply: Multiply) -> None:
    rows, n, k, activation = 101, 192, 192, Activation.GEGLU if norm == "gated" else Activation.NONE
    x, weight = (2 * drawn(rows, k) + 1).bfloat16(), drawn(n, k, seed=1).bfloat16()
    out, _ = room(rows, n // 2 if activation.gated else n, BF16)
    sums = weight.float().sum(1) if norm == "layer" else None
    given = gemm.Norm(moments_of(x), sums, 1e-6)
    multiply(x, weight, None, out, tiling=tiling, activation=activation, scale=0.07, norm=given)
    normed = (F.layer_norm if norm == "layer" else F.rms_norm)(x.float(), (k,), eps=1e-6)
    is_close(out, product(normed, weight, None, 0.07, activation), BF16)
