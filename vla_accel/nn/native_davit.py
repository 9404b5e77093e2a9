"""DaViT's stages in fused operations.

Exact savings: the bias of a branch's last product is added by the convolution before it, so that the product adds to
the rows in place; windows are read from the rows of all products, so that padding has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.choice import Choice, choose, choose_fastest
from vla_accel.kernels.attention.config import AttentionShape
from vla_accel.kernels.attention.maps import Windows, channel_attention, unwindowed, window_attention, windowed
from vla_accel.kernels.attention.ops import attend
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.choice import has_hopper_gemm, products_by
from vla_accel.kernels.gemm.config import known
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.hopper import HopperTile
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.depthwise import Depthwise, depthwise_norm
from vla_accel.nn.davit import DavitConfig, Size, Stage
from vla_accel.nn.network import Network
from vla_accel.nn.weights import Affine
from vla_accel.runtime import current

LANES = 8
"""Channels of the pixels: the three colours, then zeros, as libraries read them."""
_EPS = 1e-5


@dataclass(frozen=True)
class HalfWeights:
    """Half of a block: its convolution, its first product, and the last one, without its bias, which the convolution's
    result has."""

    conv: Depthwise
    first: Linear
    last: Linear

    @classmethod
    def of(cls, model: Network, name: str, dtype: torch.dtype, *, mlp: bool) -> HalfWeights:
        """Prepare the half `name`."""
        read = model.weight
        first, last = ("fc1", "fc2") if mlp else ("qkv_proj", "out_proj")
        parts = (f"{name}.conv.bias", f"{name}.norm.weight", f"{name}.norm.bias", f"{name}.{last}.bias")
        kernel = read(f"{name}.conv.weight").float().flatten(1).T.contiguous()
        return cls(
            Depthwise(kernel, *(read(part).float().clone() for part in parts)),
            make_linear(read(f"{name}.{first}.weight"), read(f"{name}.{first}.bias"), dtype),
            make_linear(read(f"{name}.{last}.weight"), None, dtype),
        )


@dataclass(frozen=True)
class StageWeights:
    """A stage: the weight of its convolution, channels-last in memory, its bias, its norm, and the halves of blocks."""

    stage: Stage
    conv: Tensor
    bias: Tensor
    norm: Affine
    halves: tuple[HalfWeights, ...]

    @classmethod
    def of(cls, model: Network, name: str, stage: Stage, dtype: torch.dtype) -> StageWeights:
        """Prepare the stage `name`."""
        read = model.weight
        kernel = read(f"{name}.conv.weight")
        kernel = F.pad(kernel, (0, 0, 0, 0, 0, max(0, LANES - kernel.shape[1])))
        halves = (HalfWeights.of(model, f"{name}.halves.{i}", dtype, mlp=i % 2 == 1) for i in range(4 * stage.depth))
        norm = read(f"{name}.norm.weight").float().clone(), read(f"{name}.norm.bias").float().clone()
        bias = read(f"{name}.conv.bias").to(dtype).clone()
        return cls(stage, kernel.to(dtype).contiguous(memory_format=torch.channels_last), bias, norm, tuple(halves))


class StageProgram:
    """A stage on maps of a size. The rows are in `x` after a call, (N, H, W, C).

    Attention by windows has a kernel of its own, which a library's backend replaces if it is requested by name or
    measured to be faster, with the copies into windows and back.
    """

    def __init__(self, weights: StageWeights, config: DavitConfig, size: Size, images: int, attention: str) -> None:
        self.weights, stage, device = weights, weights.stage, weights.conv.device
        self.images, (height, width) = images, size
        dtype = weights.conv.dtype
        self.x, self.y, self.h = (
            torch.empty(images, height, width, stage.width, dtype=dtype, device=device) for _ in range(3)
        )
        self.rows = images * height * width
        self.hidden = self.x.new_empty(self.rows * max(3, config.expansion) * stage.width)
        self.windows = Windows(height, width, config.window)
        self.pixels, self.places = self.windows.pixels(device), self.windows.places(device)
        self.attention = self._choose_attention(attention)
        attending, mlp = weights.halves[:2]
        products = {
            "qkv": (attending.first, Activation.NONE), "out": (attending.last, Activation.NONE),
            "fc1": (mlp.first, Activation.GELU_ERF), "fc2": (mlp.last, Activation.NONE),
        }  # fmt: skip
        self.products, early = products_by(self.rows, products)
        self.chain = Chain(current(device).gpu, early)
        self.adding = [self._tile(half.last) for half in (attending, mlp)]

    def _choose_attention(self, requested: str) -> Choice:
        """The backend of attention by windows."""
        if requested in ("auto", "own"):
            return Choice("own", "attention own (windows)")
        stage, count, inside = self.weights.stage, self.windows.down * self.windows.across, self.windows.side**2
        heads, dim = stage.heads, stage.width // stage.heads
        shape = AttentionShape(
            self.images * count, inside, inside, heads, heads, dim, self.x.dtype, padded=False, quantised=False
        )
        runtime = current(self.x.device)
        if requested != "fastest":
            return choose(requested, shape, runtime)
        qkv = torch.randn(self.images, self.rows // self.images, 3 * stage.width, device=self.x.device).to(self.x.dtype)

        def trial(backend: str) -> Callable[[], None]:
            if backend != "own":
                choose(backend, shape, runtime)
            return lambda: self._by_windows(backend, qkv, qkv[0, 0])

        return choose_fastest(trial, runtime)

    def _tile(self, product: Linear) -> HopperTile | None:
        """The config of a product that adds to the rows, if the Hopper GEMM runs it."""
        if not has_hopper_gemm(self.rows, product, Activation.NONE):
            return None
        weight = product.weight
        return known(weight.device, weight.dtype, Activation.NONE, self.rows, *weight.shape)

    def __call__(self, image: Tensor) -> Tensor:
        """Enqueue the stage on a map (N, H, W, C)."""
        w, stage = self.weights, self.weights.stage
        if stage.norm_first:
            _, image = ops.add_layer_norm(image, None, None, *w.norm, _EPS)
        made = ops.conv(image, w.conv, stage.stride, stage.padding)
        torch.add(made, w.bias, out=self.x)
        if not stage.norm_first:
            self.x.copy_(ops.add_layer_norm(self.x, None, None, *w.norm, _EPS)[1])
        with self.chain:
            for index, (half, following) in enumerate(zip_longest(w.halves, w.halves[1:])):
                self._half(index, half, following)
        return self.x

    def _half(self, index: int, half: HalfWeights, following: HalfWeights | None) -> None:
        """Enqueue half of a block: attention by windows, an MLP, attention by channels, an MLP. `following`: the next
        half, whose products are prefetched."""
        depthwise_norm(self.x, half.conv, self.y, self.h, eps=_EPS)
        self.x, self.y = self.y, self.x
        rows, add = (tensor.view(self.rows, -1) for tensor in (self.x, self.h))
        hidden = self.hidden[: self.rows * len(half.first.weight)].view(self.rows, -1)
        later = following and following.first.prefetchable
        if index % 2:
            gemm(add, half.first, hidden, Epilogue(activation=Activation.GELU_ERF, prefetch=later), workspace=(hidden,))
            add = hidden
        else:
            gemm(add, half.first, hidden, Epilogue(prefetch=later))
            self._attend(hidden.view(self.images, -1, hidden.shape[1]), half.first, by_windows=index % 4 == 0)
        if tile := self.adding[index % 2]:
            later = following and following.last.prefetchable
            gemm(add, half.last, rows, Epilogue(residual=True, prefetch=later), config=tile)
        else:
            torch.addmm(rows, add, half.last.weight.t(), out=rows)

    def _attend(self, qkv: Tensor, product: Linear, *, by_windows: bool) -> None:
        """Enqueue attention of rows (N, pixels, 3 C) into `h`."""
        if by_windows:
            assert product.bias is not None
            self._by_windows(self.attention.backend, qkv, product.bias)
        else:
            channel_attention(qkv, self.h.view(self.images, -1, self.weights.stage.width), self.weights.stage.groups)

    def _by_windows(self, backend: str, qkv: Tensor, padding: Tensor) -> None:
        """Enqueue attention by windows into `h`. `padding`: (3 C,), the queries, keys and values of padding."""
        stage, out = self.weights.stage, self.h.view(self.images, -1, self.weights.stage.width)
        if backend == "own":
            return window_attention(qkv, padding, out, self.windows, stage.heads)
        q, k, v = windowed(qkv, padding, self.pixels, stage.heads)
        context = q.new_empty(*q.shape[:2], stage.width)
        attend(backend, q, k, v, context, None)
        out.copy_(unwindowed(context, self.places, self.images))
