"""Convolutions with what follows them in one kernel: `convolve`, and `convolve_pixels` for the stem of a ResNet.

Images as in `vla_accel.kernels.image.ops`. A convolution runs in cuDNN with an op after it, or in Triton as an implicit
GEMM with the op inside; which is faster depends on the size, so programs measure both.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.config import cheapest, deepest, too_large
from vla_accel.kernels.dispatch import kernels, op, path
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.image.ops import Sum, add_up, conv
from vla_accel.runtime import current

STEM, STEM_STRIDE = 7, 2
"""Taps along a side of the stem's convolution, and its stride."""
STEM_COLUMNS = 160
"""Columns of a packed weight of the stem: 7 x 7 x 3, then zeros up to whole tiles."""
_DEPTH, _STAGES, _TRIED, _CALLS = 64, range(4, 1, -1), 5, 20
_FIXED, _EXCHANGE = 16_384, 32_768
"""Costs of a program's start and end, and of the hand-over between parts, in numbers loaded (estimates)."""


@dataclass(frozen=True)
class ConvSizes:
    """A convolution as a product. `rows`: pixels of the result; `columns`: its channels; `taps`: along a side."""

    rows: int
    columns: int
    channels: int
    taps: int
    stride: int

    @property
    def chunks(self) -> int:
        """Blocks of K."""
        return self.taps * self.taps * self.channels // _DEPTH


@dataclass(frozen=True)
class ConvTile:
    """A tile config: a program makes `rows` pixels of `columns` channels from one of `split` parts of K."""

    rows: int
    columns: int
    stages: int
    split: int = 1
    block_k: int = _DEPTH

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.block_k}, {self.stages} stages, K in {self.split}"

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 8 if self.rows * self.columns > 8192 else 4

    def why_not(self, gpu: Gpu | None, sizes: ConvSizes) -> str | None:
        """Explain why the kernel cannot run with this config; None if it can."""
        if sizes.channels % self.block_k or sizes.columns % self.columns:
            return (
                f"{sizes.channels} to {sizes.columns} channels do not fill tiles of {self.block_k} and {self.columns}"
            )
        if sizes.chunks % self.split:
            return f"{sizes.chunks} blocks of K do not make {self.split} equal parts"
        return too_large(self, self.stages * (self.rows + self.columns) * self.block_k * 2, gpu)

    def programs(self, sizes: ConvSizes) -> int:
        """Programs of a launch."""
        return -(-sizes.rows // self.rows) * (sizes.columns // self.columns) * self.split

    def cost(self, gpu: Gpu | None, sizes: ConvSizes) -> tuple[float, ...]:
        """Rounds of programs, times the numbers that each loads, and those of the parts that the last one adds."""
        rounds = -(-self.programs(sizes) // (132 if gpu is None else gpu.multiprocessors))
        loaded = sizes.chunks // self.split * (self.rows + self.columns) * self.block_k
        parts = 2 * self.split * self.rows * self.columns + _EXCHANGE if self.split > 1 else 0
        return rounds * (loaded + _FIXED) + parts, self.split


def candidates(gpu: Gpu | None, sizes: ConvSizes) -> list[ConvTile]:
    """Return the configs worth measuring, the most promising first; none where channels do not fill a tile."""
    shapes = itertools.product((64, 128), (64, 128), (1, 2, 3, 4, 6, 9))
    tiles = (deepest(ConvTile(rows, columns, 2, split), _STAGES, gpu, sizes) for rows, columns, split in shapes)
    return cheapest(filter(None, tiles), gpu, sizes, _TRIED)


def workspace(sizes: ConvSizes, tile: ConvTile, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the buffers of programs that share K: their sums, and the counters of those that have arrived."""
    if tile.split == 1:
        return None
    count = tile.programs(sizes)
    sums = torch.empty(count * tile.rows * tile.columns, device=device)
    return sums, torch.zeros(count // tile.split, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class ConvPlan:
    """How a convolution of one size runs. No `tile`: the library's."""

    tile: ConvTile | None = None
    workspace: tuple[Tensor, Tensor] | None = None


LIBRARY = ConvPlan()


def convolve(
    x: Tensor, weight: Tensor, stride: int = 1, *, shift: Tensor | None = None, residual: Tensor | None = None,
    activation: Activation = Activation.NONE, plan: ConvPlan = LIBRARY,
) -> Tensor:  # fmt: skip
    """Return act(convolution of `x` + `shift` + `residual`), padded so that a stride of 1 keeps the size.

    Args:
        x: (B, H, W, C), contiguous.
        weight: (O, C, k, k), channels-last in memory, k odd.
        shift: (O,) float32.
        residual: As the result.
        plan: Of `plan_convolution` for this size.
    """
    if plan.tile is not None:
        return kernels("image.triton_convolution").convolve(x, weight, stride, shift, residual, activation, plan)
    return add_up(Sum(_library_conv(x, weight, stride), residual, shift), activation=activation)


def _library_conv(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the library's convolution, padded as that of `convolve`."""
    fixed = current(x).deterministic
    # The library measures its convolutions on a shape's first call, unless calls are to repeat bit for bit.
    with torch.backends.cudnn.flags(enabled=True, benchmark=not fixed, deterministic=fixed, allow_tf32=True):
        return conv(x, weight, stride, weight.shape[2] // 2)


def plan_convolution(x: tuple[int, int, int, int], weight: Tensor, stride: int, *, alone: bool) -> ConvPlan:
    """Return the fastest way to convolve images of shape `x`, measured once on a GPU.

    `alone`: whether nothing is added and no activation follows. In float32 and on a CPU it is the library's.
    """
    device, runtime = weight.device, current(weight)
    if runtime.backend == "reference" or weight.dtype == torch.float32:
        return LIBRARY
    from vla_accel.kernels.autotune import remembered

    batch, height, width, channels = x
    outs, _, taps, _ = weight.shape
    sizes = ConvSizes(batch * -(-height // stride) * -(-width // stride), outs, channels, taps, stride)
    plans = {"library": LIBRARY}
    for tile in candidates(runtime.gpu, sizes):
        plans[str(tile)] = ConvPlan(tile, workspace(sizes, tile, device))
    image = torch.randn(x, device=device).to(weight.dtype)
    shift = None if alone else torch.randn(outs, device=device)
    activation, chain = Activation.NONE if alone else Activation.RELU, Chain(runtime.gpu)

    def run(plan: ConvPlan) -> None:
        with chain.resumed():
            convolve(image, weight, stride, shift=shift, activation=activation, plan=plan)

    name = f"convolution of {batch} images {height}x{width}, {sizes}, {weight.dtype}, alone {alone}"
    calls = {key: (lambda plan=plan: run(plan)) for key, plan in plans.items()}
    return plans[remembered(name, calls, runtime, _CALLS).candidate]


def pack_stem(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (O, 3, 7, 7) of a stem as `convolve_pixels` takes it: (O, 160), with the colours innermost."""
    flat = weight.permute(0, 2, 3, 1).flatten(1)
    return F.pad(flat, (0, STEM_COLUMNS - flat.shape[1])).to(dtype).contiguous()


def _half(weight: Tensor) -> bool:
    return weight.dtype in (torch.float16, torch.bfloat16)


def stem_in_triton(weight: Tensor) -> bool:
    """Return whether `convolve_pixels` runs in Triton with this weight."""
    return path(weight) != "reference" and _half(weight)


@op("image.triton_convolution", _half)
def convolve_pixels(weight: Tensor, images: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the 7x7 convolution, two pixels apart, of images whose levels become level * scale[0] + scale[1].

    Outside of an image the scaled levels are zero.

    Args:
        weight: (O, 160) of `pack_stem`, of the dtype of `out`.
        images: (B, V, H, W, 3), uint8 or float32; pixels of a row are adjacent.
        scales: (V, 2, 3) float32.
        out: (B, V, ceil(H / 2), ceil(W / 2), O); images are contiguous.
    """
    wide = torch.promote_types(torch.float32, weight.dtype)
    factor, shift = scales.to(wide)[:, :, None, None].unbind(1)
    pixels = (images.to(wide) * factor + shift).to(weight.dtype).flatten(0, 1)
    kernel = weight[:, : STEM * STEM * 3].reshape(len(weight), STEM, STEM, 3).permute(0, 3, 1, 2)
    out.copy_(_library_conv(pixels, kernel, STEM_STRIDE).view(out.shape))
