"""DaViT's stages in fused operations.

Exact savings: the bias of a branch's last product is added by the convolution before it, so that the product adds to
the rows in place; windows are gathered after the products, so that padding has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.choice import Choice, choose
from vla_accel.kernels.attention.config import AttentionShape
from vla_accel.kernels.attention.ops import attend
from vla_accel.kernels.gemm.choice import products_by
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.depthwise import Depthwise, depthwise_norm
from vla_accel.nn.davit import DavitConfig, Size, Stage, Windows, channel_attention
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
    """A stage on maps of a size. The rows are in `x` after a call, (N, H, W, C)."""

    def __init__(self, weights: StageWeights, config: DavitConfig, size: Size, images: int, attention: str) -> None:
        self.weights, stage, device = weights, weights.stage, weights.conv.device
        self.images, self.size, (height, width) = images, size, size
        dtype = weights.conv.dtype

        def buffer(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.x, self.y, self.h = (buffer(images, height, width, stage.width) for _ in range(3))
        self.rows = images * height * width
        self.hidden = buffer(self.rows * max(3, config.expansion) * stage.width)
        # Behind an image's rows the bias, which is what padding has for queries, keys and values.
        self.qkv = buffer(images, height * width + 1, 3 * stage.width)
        windows = Windows.of(size, config.window, device)
        self.pixels, self.places = windows.pixels.flatten(), windows.places
        count, inside = windows.pixels.shape
        self.windows = buffer(images * count, inside, 3, stage.heads, stage.width // stage.heads)
        self.context = buffer(images * count, inside, stage.width)
        shape = AttentionShape(
            len(self.windows), inside, inside, stage.heads, stage.heads, stage.width // stage.heads, dtype,
            padded=False, quantised=False,
        )  # fmt: skip
        self.attention: Choice = choose(attention, shape, current(device))
        firsts = zip(("qkv", "fc1"), weights.halves, (Activation.NONE, Activation.GELU_ERF), strict=False)
        self.products, _ = products_by(self.rows, {name: (half.first, kind) for name, half, kind in firsts})

    def __call__(self, image: Tensor) -> Tensor:
        """Enqueue the stage on a map (N, H, W, C)."""
        w, stage = self.weights, self.weights.stage
        if stage.norm_first:
            _, image = ops.add_layer_norm(image, None, None, *w.norm, _EPS)
        made = ops.conv(image, w.conv, stage.stride, stage.padding) + w.bias
        if not stage.norm_first:
            _, made = ops.add_layer_norm(made, None, None, *w.norm, _EPS)
        self.x.copy_(made)
        for index, half in enumerate(w.halves):
            depthwise_norm(self.x, half.conv, self.y, self.h, eps=_EPS)
            self.x, self.y = self.y, self.x
            rows, h = self.x.view(-1, stage.width), self.h.view(-1, stage.width)
            if index % 2:
                hidden = self.columns(len(half.first.weight))
                gemm(h, half.first, hidden, Epilogue(activation=Activation.GELU_ERF), workspace=(hidden,))
                add = hidden
            else:
                add = self.attend(h, half.first, by_window=index % 4 == 0)
            torch.addmm(rows, add, half.last.weight.t(), out=rows)
        return self.x

    def columns(self, count: int) -> Tensor:
        """The buffer of a first product, (rows, count)."""
        return self.hidden[: self.rows * count].view(self.rows, count)

    def attend(self, h: Tensor, product: Linear, *, by_window: bool) -> Tensor:
        """Enqueue attention, up to its last product."""
        stage = self.weights.stage
        qkv = self.columns(3 * stage.width)
        gemm(h, product, qkv)
        qkv = qkv.view(self.images, -1, 3 * stage.width)
        if not by_window:
            return channel_attention(qkv, stage.groups).reshape(len(h), -1)
        assert product.bias is not None
        self.qkv[:, :-1] = qkv
        self.qkv[:, -1] = product.bias.to(qkv.dtype)
        torch.index_select(self.qkv, 1, self.pixels, out=self.windows.view(self.images, -1, 3 * stage.width))
        q, k, v = self.windows.unbind(2)
        attend(self.attention.backend, q, k, v, self.context, None, tile=self.attention.tile)
        return self.context.view(self.images, -1, stage.width).index_select(1, self.places).view(len(h), -1)
