"""Fused image operations: references against torch's own, kernels against references in Triton's interpreter.
`test_kernels_compile.py` compiles the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.agreement import RATIO
from tests.support.scripts import lines_of, needs_triton
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.depthwise import Depthwise, depthwise_norm
from vla_accel.kernels.image.ops import GroupNorm, Sum
from vla_accel.kernels.image.pool import max_pool


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


# -- references ---------------------------------------------------------------------------------------------------


def test_a_sum_adds_value_residual_and_shift_of_each_image() -> None:
    value, residual, shift = randn(2, 3, 5, 4), randn(2, 3, 5, 4, seed=1), randn(2, 4, seed=2)
    want = value + residual + shift[:, None, None]
    torch.testing.assert_close(ops.add_up(Sum(value, residual, shift)), want)
    torch.testing.assert_close(ops.add_up(Sum(value, None, shift[0])), value + shift[0])
    positive = ops.add_up(Sum(value, residual, shift), activation=Activation.RELU)
    torch.testing.assert_close(positive, want.clamp(min=0))


def test_pixels_are_scaled_by_channel_and_padded_with_zeros() -> None:
    images = torch.arange(2 * 3 * 5 * 3, dtype=torch.uint8).reshape(2, 3, 5, 3)
    scale, out = randn(2, 3), torch.full((2, 3, 5, 8), 9.0, dtype=torch.float64)
    ops.normalise_pixels(images, scale, out)
    torch.testing.assert_close(out[..., :3], images.double() * scale[0] + scale[1])
    assert not out[..., 3:].any()


def test_a_depthwise_convolution_adds_to_its_rows_and_norms_the_sum() -> None:
    x, layer = randn(2, 3, 5, 4), Depthwise(randn(9, 4), *(randn(4, seed=seed) for seed in range(1, 5)))
    convolved = F.conv2d(nchw(x), layer.weight.T.reshape(4, 1, 3, 3), layer.bias, padding=1, groups=4)
    want = x + convolved.permute(0, 2, 3, 1)
    x_out, h = torch.empty_like(x), torch.empty_like(x)
    depthwise_norm(x, layer, x_out, h, eps=1e-3)
    torch.testing.assert_close(x_out, want + layer.shift)
    torch.testing.assert_close(h, F.layer_norm(want, (4,), layer.norm_weight, layer.norm_bias, 1e-3))


@pytest.mark.parametrize("size", [(6, 8), (5, 7)], ids=["even", "odd"])
def test_a_maximum_is_shifted_and_activated(size: tuple[int, int]) -> None:
    x, shift = randn(2, *size, 4) - 1, randn(4, seed=1)
    want = F.max_pool2d(nchw(x), 3, 2, 1).permute(0, 2, 3, 1)
    torch.testing.assert_close(max_pool(x), want)
    torch.testing.assert_close(max_pool(x, shift, activation=Activation.RELU), (want + shift).clamp(min=0))


def test_padding_is_zeros_at_the_far_edges() -> None:
    value = randn(1, 3, 5, 4)
    padded = ops.add_up(Sum(value, shift=torch.ones(4, dtype=torch.float64)), pad=True)
    assert padded.shape == (1, 4, 6, 4)
    torch.testing.assert_close(padded[:, :3, :5], value + 1)
    assert not padded[:, 3].any() and not padded[:, :, 5].any()


def test_group_act_is_group_norm_and_silu_over_sum_and_skip() -> None:
    x, skip = Sum(randn(2, 3, 5, 8), randn(2, 3, 5, 8, seed=1), randn(2, 8, seed=2)), randn(2, 3, 5, 4, seed=3)
    norm = GroupNorm(3, randn(12, seed=4), randn(12, seed=5), 1e-3)
    whole = torch.cat((ops.add_up(x), skip), -1)
    want = F.silu(F.group_norm(nchw(whole), 3, norm.weight, norm.bias, 1e-3))
    total, normed = ops.group_act(x, norm, activation=Activation.SILU, keep=True, skip=skip)
    torch.testing.assert_close(nchw(normed), want)
    torch.testing.assert_close(total, whole)


def test_layer_norm_of_a_sum() -> None:
    x, residual, shift = randn(4, 6), randn(4, 6, seed=1), randn(6, seed=2)
    weight, bias = randn(6, seed=3), randn(6, seed=4)
    total, normed = ops.add_layer_norm(x, residual, shift, weight, bias, 1e-5)
    torch.testing.assert_close(total, x + residual + shift)
    torch.testing.assert_close(normed, F.layer_norm(total, (6,), weight, bias))


@pytest.mark.parametrize("size", [(4, 6), (5, 3)])
def test_doubling_folds_into_the_convolution(size: tuple[int, int]) -> None:
    x, weight = randn(2, *size, 3), randn(5, 3, 3, 3, seed=1)
    want = F.conv2d(F.interpolate(nchw(x), scale_factor=2.0), weight, padding=1)
    folded = ops.conv_phases(x, ops.phase_weights(weight))
    assert folded.shape == (2, 2 * size[0], 2 * size[1], 5)
    torch.testing.assert_close(nchw(ops.add_up(folded)), want)


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (1, 0)])
def test_a_convolution_is_one_product(stride: int, padding: int) -> None:
    x, weight = randn(2, 6, 7, 3), randn(5, 3, 3, 3, seed=1).contiguous(memory_format=torch.channels_last)
    got = ops.conv_product(x, weight, stride, padding)
    torch.testing.assert_close(got, ops.conv(x, weight, stride, padding))


@pytest.mark.parametrize("how", list(ops.SCORES))
def test_attention_by_products(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small enough that the rows come in several parts, the last one short.
    monkeypatch.setitem(ops.SCORES, how, 1)
    q, k, v = (randn(2, 300, 12, seed=s) for s in range(3))
    torch.testing.assert_close(ops.attend(q, k, v, how=how), ops.attend(q, k, v))
    with pytest.raises(ValueError, match="expected sdpa, products, products-wide, flash, flash-64, got 'fast'"):
        ops.attend(q, k, v, how="fast")
    with pytest.raises(NotImplementedError, match="flash needs a GPU and BF16 or FP16"):
        ops.attend(q, k, v, how="flash")


# -- kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_triton
def test_kernels_compute_what_the_references_do() -> None:
    cases = [line.split(" ", 1) for line in lines_of("interpret_image")]
    assert len(cases) == 157
    # float16 holds 11 bits: two roundings of one value differ by at most 2 ** -10.
    assert not [name for difference, name in cases if not float(difference) < 2e-3]


@needs_triton
@pytest.mark.slow
def test_whole_models_run_on_the_kernels() -> None:
    pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")
    found = {name: float(value) for value, name in (line.split(" ", 1) for line in lines_of("interpret_image_models"))}
    assert len(found) == 7 and 0 < max(found.values()) < RATIO, found
