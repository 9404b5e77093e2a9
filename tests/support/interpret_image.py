"""Every kernel of `kernels/image/triton_image.py`, `triton_convolution.py`, `triton_depthwise.py` and `triton_pool.py`
in Triton's interpreter, compared with its torch reference (`interpreter`, test_image_ops). `main` prints for each case
the largest difference, relative to the largest value, and its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.support.runtimes import steered
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import path
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.convolution import (
    LIBRARY,
    ConvPlan,
    ConvSizes,
    ConvTile,
    convolve,
    convolve_pixels,
    pack_stem,
    workspace,
)
from vla_accel.kernels.image.depthwise import Depthwise, depthwise_norm
from vla_accel.kernels.image.ops import GroupNorm, Sum
from vla_accel.kernels.image.pool import max_pool


def convolution(stride: int, split: int = 1, activation: Activation = Activation.NONE) -> Callable[..., Tensor]:
    """`convolve` of an image, a weight, and if any a shift and a residual: by a tile of 64 x 64, or the library."""

    def call(x: Tensor, weight: Tensor, shift: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        plan = LIBRARY
        if path(x) != "reference":
            pixels = x.shape[0] * -(-x.shape[1] // stride) * -(-x.shape[2] // stride)
            sizes, tile = (
                ConvSizes(pixels, weight.shape[0], weight.shape[1], weight.shape[2], stride),
                ConvTile(64, 64, 2, split),
            )
            assert tile.why_not(None, sizes) is None
            plan = ConvPlan(tile, workspace(sizes, tile, x.device))
        return convolve(x, weight, stride, shift=shift, residual=residual, activation=activation, plan=plan)

    return call


Case = tuple[Callable[..., Any], tuple[Any, ...]]
"""An op and its arguments."""


def attend(q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
    """Attention by a kernel or by products, or in float32."""
    return ops.attend(q.float(), k.float(), v.float()) if path(q) == "reference" else ops.attend(q, k, v, how=how)


def cases(*, few: bool = False) -> dict[str, Case]:
    """By name; with `few` about half of them. Channels that are no power of two, sizes that fill no tile."""
    generator = torch.Generator().manual_seed(0)

    def wide(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def half(*shape: int) -> Tensor:
        return wide(*shape).half()

    def norm_of(groups: int, channels: int) -> GroupNorm:
        return GroupNorm(groups, 1 + wide(channels), wide(channels), 1e-5)

    def normalised(images: Tensor, scale: Tensor) -> Tensor:
        """The second of the cameras of a buffer."""
        out = torch.full((2, 3, 5, 7, 8), 9.0, dtype=torch.float16, device=images.device)
        ops.normalise_pixels(images, scale / 255, out[:, 1])
        return out

    def depthwise(x: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        x_out, h = torch.empty_like(x), torch.empty_like(x)
        depthwise_norm(x, Depthwise(*parts), x_out, h, eps=1e-5)
        return x_out, h

    def stem(weight: Tensor, images: Tensor, scales: Tensor) -> Tensor:
        """A crop of the second and third of four views, in a buffer of three."""
        out = torch.full((2, 3, 9, 10, 16), 9.0, dtype=weight.dtype, device=weight.device)
        scales = torch.stack((scales[:, 0] / 255, scales[:, 1]), 1)
        convolve_pixels(weight, images[:, 1:3, 2:19, 1:21], scales, out[:, 1:])
        return out

    def channels_last(*shape: int) -> Tensor:
        return half(*shape).contiguous(memory_format=torch.channels_last)

    pixels = torch.randint(0, 256, (2, 5, 7, 3), generator=generator, dtype=torch.uint8)
    views = torch.randint(0, 256, (2, 4, 20, 23, 3), generator=generator, dtype=torch.uint8)
    found: dict[str, Case] = {}
    rms, group, silu = ops.rms_act, ops.group_act, Activation.SILU
    every = list(itertools.product((False, True), (0, 1, 2), (False, True)))
    some = [(False, 0, False), (False, 1, True), (True, 2, False)]
    for channels, (height, width), added in ((24, (6, 4), some if few else every), (96, (2, 14), some)):
        for residual, shift, phased in added:
            shape = (2, height // 2 + 1, width // 2 + 1, 4 * channels) if phased else (2, height, width, channels)
            x = Sum(
                half(*shape), half(2, height, width, channels) if residual else None,
                (None, wide(channels), wide(2, channels))[shift], phased,
            )  # fmt: skip
            gamma, norm, skip = wide(channels), norm_of(8, channels), half(2, height, width, 16)
            both = partial(group, activation=silu, keep=True)
            runs: dict[str, Case] = {
                "add_up": (ops.add_up, (x,)),
                "add_up padded": (partial(ops.add_up, pad=True), (x,)),
                "add_up relu": (partial(ops.add_up, activation=Activation.RELU), (x,)),
                "rms_act kept": (partial(rms, activation=silu, keep=True), (x, gamma)),
                "rms_act": (partial(rms, activation=Activation.NONE, keep=False), (x, gamma)),
                "group_act kept": (both, (x, norm)),
                "group_act": (partial(group, activation=Activation.NONE, keep=False), (x, norm)),
                "group_act after": (
                    lambda x, n, r: group(x, n, activation=Activation.RELU, keep=False, after=r),
                    (x, norm, half(2, height, width, channels)),
                ),
                "group_act skip": (lambda x, n, s, op=both: op(x, n, skip=s), (x, norm_of(8, channels + 16), skip)),
            }
            what = f"{channels} residual={residual} shift={shift} phased={phased}"
            found |= {f"{name} {what}": run for name, run in runs.items()}
    # Several stretches of pixels, and groups of 42 channels, three to a program: the last program has two.
    large, skip = Sum(half(2, 10, 14, 320), half(2, 10, 14, 320), wide(2, 320)), half(2, 10, 14, 16)
    rows, residual, columns = half(10, 40), half(10, 40), (wide(40), 1 + wide(40), wide(40))
    found |= {
        "group_act large": (
            lambda x, n, s: group(x, n, activation=silu, keep=True, skip=s), (large, norm_of(8, 336), skip)
        ),
        "group_act of one tensor": (
            partial(group, activation=Activation.NONE, keep=True), (Sum(large.value), norm_of(32, 320))
        ),
        # Of 16 channels: two tiles in one program, and too many tiles for one.
        "group_act in two tiles": (
            partial(group, activation=silu, keep=False), (Sum(half(1, 17, 20, 48)), norm_of(3, 48))
        ),
        "group_act large, after": (
            lambda x, n, r: group(x, n, activation=Activation.RELU, keep=False, after=r),
            (Sum(half(1, 23, 25, 48)), norm_of(3, 48), half(1, 23, 25, 48)),
        ),
        "add_layer_norm": (ops.add_layer_norm, (rows, residual, *columns, 1e-5)),
        "layer_norm alone": (ops.add_layer_norm, (rows, None, None, *columns[1:], 1e-5)),
        "geglu_erf": (ops.geglu_erf, (rows,)),
        "normalise_pixels": (normalised, (pixels, wide(2, 3))),
        "depthwise_norm": (depthwise, (half(2, 5, 3, 24), wide(9, 24), *(wide(24) for _ in range(4)))),
        "max_pool": (max_pool, (half(2, 9, 7, 24),)),
        "max_pool relu": (partial(max_pool, activation=Activation.RELU), (half(2, 6, 70, 24), wide(24))),
        "convolve_pixels": (stem, (pack_stem(wide(16, 3, 7, 7), torch.float16), views, wide(2, 2, 3))),
        "convolve_pixels resized": (stem, (pack_stem(wide(16, 3, 7, 7), torch.float16), views.float(), wide(2, 2, 3))),
        "convolve": (convolution(1), (half(2, 9, 7, 64), channels_last(64, 64, 3, 3))),
        "convolve with stride": (
            convolution(2, activation=Activation.RELU), (half(1, 9, 8, 128), channels_last(128, 128, 3, 3), wide(128))
        ),
        "convolve with stride, one tap": (convolution(2), (half(1, 7, 8, 64), channels_last(64, 64, 1, 1), wide(64))),
        "convolve in parts": (
            convolution(1, split=3, activation=Activation.RELU),
            (half(2, 6, 7, 64), channels_last(64, 64, 3, 3), wide(64), half(2, 6, 7, 64)),
        ),
        "geglu_erf wide": (ops.geglu_erf, (half(11, 2 * 300),)),
        # Large and very unequal scores: a softmax that forgets to shift overflows here.
        "softmax": (ops.softmax, (100 * wide(6, 5000), torch.float16)),
        "attend": (attend, (*half(3, 2, 60, 48).unbind(0), "products")),
    }  # fmt: skip
    for width, how in ((384, "flash"), (512, "flash-64")):
        # Views of one product, as a layer has them; the last block of queries and of keys is not full.
        found[f"attend {how} {width}"] = attend, (*half(2, 150, 3 * width).chunk(3, dim=-1), how)
    return found


def difference(got: Any, want: Any) -> float:
    """The largest one, relative to the largest value."""
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (want, got)), strict=True)
    return max(float((a.float() - b.float().cpu()).abs().max() / a.float().abs().max()) for a, b in pairs)


def main() -> None:
    for name, (op, arguments) in cases().items():
        want = op(*arguments)
        with steered("triton"):
            got = op(*arguments)
        print(f"{difference(got, want):.3e} {name}")
