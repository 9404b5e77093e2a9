"""X-VLA's vision in fused operations: uint8 images to image tokens.

Exact savings: the bias of a branch's last product is added by the convolution before it, so that the product adds to
the rows in place; windows are gathered after the products, so that padding has none; positions are folded into a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.families.xvla.davit import DavitConfig, Size, Stage, Windows, channel_attention
from vla_accel.families.xvla.network import EPS, Xvla, XvlaConfig, pixels_of
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
from vla_accel.nn.weights import compute_dtype
from vla_accel.pictures import IMAGENET_DEVIATION, IMAGENET_MEAN
from vla_accel.runtime import current

_LANES = 8
"""Channels of the pixels: the three colours, then zeros, as libraries read them."""
Affine = tuple[Tensor, Tensor]
"""Weight and bias of a norm, float32."""


@dataclass(frozen=True)
class HalfWeights:
    """Half of a block: its convolution, its first product, and the last one, without its bias, which the convolution's
    result has."""

    conv: Depthwise
    first: Linear
    last: Linear

    @classmethod
    def of(cls, model: Xvla, name: str, dtype: torch.dtype, *, mlp: bool) -> HalfWeights:
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
    def of(cls, model: Xvla, index: int, dtype: torch.dtype) -> StageWeights:
        """Prepare a stage."""
        stage, name, read = model.config.vision.stages[index], f"vision.stages.{index}", model.weight
        kernel = read(f"{name}.conv.weight")
        kernel = F.pad(kernel, (0, 0, 0, 0, 0, max(0, _LANES - kernel.shape[1])))
        halves = (HalfWeights.of(model, f"{name}.halves.{i}", dtype, mlp=i % 2 == 1) for i in range(4 * stage.depth))
        norm = read(f"{name}.norm.weight").float().clone(), read(f"{name}.norm.bias").float().clone()
        bias = read(f"{name}.conv.bias").to(dtype).clone()
        return cls(stage, kernel.to(dtype).contiguous(memory_format=torch.channels_last), bias, norm, tuple(halves))


@dataclass(frozen=True)
class VisionWeights:
    """All stages, the projector and its norm. `scale` (2, 3) float32: factor and shift of the images' levels."""

    stages: tuple[StageWeights, ...]
    projector: Linear
    norm: Affine
    scale: Tensor

    @classmethod
    def of(cls, model: Xvla, precision: str) -> VisionWeights:
        """Prepare the weights of a model."""
        dtype, read = compute_dtype(precision), model.weight
        mean, deviation = (torch.tensor(x, dtype=torch.float64) for x in (IMAGENET_MEAN, IMAGENET_DEVIATION))
        scale = torch.stack((1.0 / (255.0 * deviation), -mean / deviation)).float().to(model.device)
        norm = read("projector_norm.weight").float().clone(), read("projector_norm.bias").float().clone()
        stages = tuple(StageWeights.of(model, index, dtype) for index in range(len(model.config.vision.stages)))
        return cls(stages, make_linear(read("projector.weight"), None, dtype), norm, scale)


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
            _, image = ops.add_layer_norm(image, None, None, *w.norm, EPS)
        made = ops.conv(image, w.conv, stage.stride, stage.padding) + w.bias
        if not stage.norm_first:
            _, made = ops.add_layer_norm(made, None, None, *w.norm, EPS)
        self.x.copy_(made)
        for index, half in enumerate(w.halves):
            depthwise_norm(self.x, half.conv, self.y, self.h, eps=EPS)
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


class NativeVision:
    """The program. Inputs `image0`, … uint8 (B, height, width, 3); output `image_tokens` (B, V, rows, W)."""

    def __init__(
        self, weights: VisionWeights, positions: Tensor, config: XvlaConfig, sizes: Sequence[Size], batch: int,
        attention: str,
    ) -> None:  # fmt: skip
        """`positions` (pixels, W) of the last map."""
        self.weights, self.config, self.positions = weights, config, positions
        self.fitted = config.fitted(sizes[0])
        dtype, device = weights.projector.weight.dtype, weights.scale.device
        images = batch * len(sizes)
        self.pixels = torch.zeros(batch, len(sizes), *self.fitted, _LANES, dtype=dtype, device=device)
        self.stages = [
            StageProgram(stage, config.vision, size, images, attention)
            for stage, size in zip(weights.stages, config.vision.sizes(self.fitted), strict=True)
        ]
        self.attention = self.stages[0].attention
        self.rows = torch.empty(images, 1 + len(positions), config.vision.width, dtype=dtype, device=device)
        self.detail = f"fused ops, {dtype}, library convolutions, {self.attention.detail}{self.stages[0].products}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        for view in range(self.pixels.shape[1]):
            self._read(inputs[f"image{view}"], self.pixels[:, view])
        fixed = current(self.pixels).deterministic
        x = self.pixels.flatten(0, 1)
        # The library measures its convolutions on a shape's first call, unless calls are to repeat bit for bit.
        with torch.backends.cudnn.flags(enabled=True, benchmark=not fixed, deterministic=fixed, allow_tf32=True):
            for stage in self.stages:
                x = stage(x)
        torch.add(x.flatten(1, 2), self.positions, out=self.rows[:, 1:])
        torch.mean(self.rows[:, 1:], 1, out=self.rows[:, 0])
        tokens = outputs["image_tokens"]
        made = tokens.new_empty(self.rows.shape[0] * self.rows.shape[1], tokens.shape[-1])
        gemm(self.rows.flatten(0, 1), self.weights.projector, made)
        _, normed = ops.add_layer_norm(made, None, None, *self.weights.norm, EPS)
        tokens.view(made.shape).copy_(normed)

    def _read(self, image: Tensor, out: Tensor) -> None:
        """Enqueue the normalised pixels of a view, to (B, h, w, lanes)."""
        if tuple(image.shape[1:3]) == self.fitted:
            ops.normalise_pixels(image, self.weights.scale, out)
        else:
            out[..., :3] = pixels_of(image, self.config.image_size).permute(0, 2, 3, 1)
