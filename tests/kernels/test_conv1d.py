"""What lies between the products of a 1-D U-Net: references against torch's convolutions, kernels against references in
Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.scripts import lines_of, needs_triton
from vla_accel.errors import EngineError
from vla_accel.families.diffusion_policy.network import doubling
from vla_accel.kernels.conv1d.ops import MOST_TARGETS, Film, Target, normed
from vla_accel.kernels.image.ops import GroupNorm

BATCH, LENGTH, CHANNELS = 2, 6, 24


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(x: Tensor) -> Tensor:
    """(B, C, T) as rows."""
    return x.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize(("taps", "stride"), [(5, 1), (3, 2), (1, 1)])
def test_gathered_rows_make_a_convolution(taps: int, stride: int) -> None:
    x, weight = randn(BATCH, CHANNELS, LENGTH), randn(7, CHANNELS + 8, taps, seed=1)
    behind = randn(BATCH, 8, LENGTH, seed=2)
    rows = torch.zeros(BATCH * LENGTH // stride, taps * (CHANNELS + 8), dtype=torch.float64)
    target = Target(rows, CHANNELS + 8, taps, stride, taps // 2)
    normed(rows_of(x), LENGTH, [target])
    normed(rows_of(behind), LENGTH, [Target(rows, CHANNELS + 8, taps, stride, taps // 2, CHANNELS)])
    want = F.conv1d(torch.cat((x, behind), 1), weight, stride=stride, padding=taps // 2)
    torch.testing.assert_close(rows @ weight.transpose(1, 2).flatten(1).T, rows_of(want))


def test_gathered_rows_make_a_transposed_convolution() -> None:
    x, weight = randn(BATCH, CHANNELS, LENGTH), randn(CHANNELS, 7, 4, seed=1)
    rows = torch.zeros(BATCH * LENGTH, 3 * 32, dtype=torch.float64)
    normed(rows_of(x), LENGTH, [Target(rows, 32, 3, pad=1)])
    got = (rows @ doubling(weight).T).view(BATCH * 2 * LENGTH, 7)
    torch.testing.assert_close(got, rows_of(F.conv_transpose1d(x, weight, stride=2, padding=1)))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_pass_norms_conditions_and_adds(scaled: bool) -> None:
    x, residual = randn(BATCH, CHANNELS, LENGTH), randn(BATCH, CHANNELS, LENGTH, seed=1)
    norm = GroupNorm(8, randn(CHANNELS, seed=2), randn(CHANNELS, seed=3), 1e-5)
    step, own = randn((1 + scaled) * CHANNELS, seed=4), randn(BATCH, (1 + scaled) * CHANNELS, seed=5)
    rows = torch.zeros(BATCH * LENGTH, CHANNELS, dtype=torch.float64)
    normed(rows_of(x), LENGTH, [Target(rows, CHANNELS)], norm, Film(step, own), rows_of(residual))
    y, condition = F.mish(F.group_norm(x, 8, norm.weight, norm.bias, 1e-5)), (step + own)[..., None]
    y = condition[:, :CHANNELS] * y + condition[:, CHANNELS:] if scaled else y + condition
    torch.testing.assert_close(rows, rows_of(y + residual))


@pytest.mark.slow
@needs_triton
def test_the_kernels_compute_what_their_references_do() -> None:
    lines = (line.partition(" ") for line in lines_of("interpret_conv1d"))
    found = {name: worst for worst, _, name in lines}
    assert len(found) == 15
    assert {name: worst for name, worst in found.items() if not float(worst) < 2e-6} == {}


@pytest.mark.slow
@needs_triton
def test_the_passes_of_the_published_size_compile(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in lines_of("compile_conv1d", cache=tmp_path)]
    assert {row["kernel"] for row in rows} == {"_normed", "_scheduler_step"} and len(rows) > 10
    assert all(row["fits"] and not row["spilled"] and row["registers"] <= 128 for row in rows)
    # The first pass begins the chain; each of the others waits for the kernel before.
    assert sum(not row["waits"] for row in rows) == 1


@needs_triton
def test_more_targets_than_a_kernel_takes_are_refused() -> None:
    from vla_accel.kernels.conv1d import triton_conv1d

    targets = [Target(torch.zeros(4, 8), 8)] * (MOST_TARGETS + 1)
    with pytest.raises(EngineError, match=f"expected at most {MOST_TARGETS} targets, got {MOST_TARGETS + 1}"):
        triton_conv1d.normed(torch.zeros(4, 8), 4, targets, None, None, None)
