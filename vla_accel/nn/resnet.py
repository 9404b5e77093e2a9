"""ResNets up to their last feature map, which is 32 times smaller than the image: in torch, and in fused operations
that fold a frozen batch norm into its convolution.

Module names are torchvision's, from `conv1` to `layer4`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError, unknown
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.convolution import (
    STEM_STRIDE,
    ConvPlan,
    convolve,
    convolve_pixels,
    pack_stem,
    plan_convolution,
    stem_in_triton,
)
from vla_accel.kernels.image.ops import GroupNorm, Sum
from vla_accel.kernels.image.pool import max_pool
from vla_accel.nn.network import Network
from vla_accel.pictures import IMAGENET_DEVIATION, IMAGENET_MEAN

REDUCTION = 32
"""Pixels along a side of the image for one pixel of the last feature map."""
_STAGES = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}
_EPS = 1e-5
Channels = tuple[float, float, float]
_GROUP = 16  # channels of a group, as in lerobot's Diffusion Policy
_NORM_PARTS = ("weight", "bias", "running_mean", "running_var")
MapShape = tuple[int, int, int, int]
"""Images, height, width and channels."""
Pack = Callable[[Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class ResNetConfig:
    """`name`: resnet18, resnet34 or resnet50; `norm`: a batch norm with fixed statistics, or a group norm."""

    name: str = "resnet18"
    norm: Literal["batch", "group"] = "batch"

    def __post_init__(self) -> None:
        if self.name not in _STAGES:
            raise ConfigError(unknown("vision_backbone", self.name, _STAGES))

    @property
    def stages(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return _STAGES[self.name]

    @property
    def expansion(self) -> int:
        """Output channels of a block for each of its inner ones."""
        return 4 if self.name == "resnet50" else 1

    @property
    def channels(self) -> int:
        """Channels of the last feature map."""
        return 512 * self.expansion

    def blocks(self) -> list[list[tuple[int, int, int]]]:
        """Return the channels that come in, the inner channels and the stride of every block, by stage."""
        made, incoming = [], 64
        for index, count in enumerate(self.stages):
            inner, stage = 64 << index, []
            for number in range(count):
                stage.append((incoming, inner, 2 if index and not number else 1))
                incoming = inner * self.expansion
            made.append(stage)
        return made


def feature_size(height: int, width: int) -> tuple[int, int]:
    """Return the size of the last feature map of an image."""
    return -(-height // REDUCTION), -(-width // REDUCTION)


@dataclass(frozen=True)
class Camera:
    """Size of a camera's images, and the mean and the divisor of each channel of their pixels in [0, 1]."""

    height: int
    width: int
    mean: Channels = IMAGENET_MEAN
    deviation: Channels = IMAGENET_DEVIATION

    @property
    def feature_size(self) -> tuple[int, int]:
        """Height and width of its last feature map."""
        return feature_size(self.height, self.width)


# -- in torch -----------------------------------------------------------------------------------------------------


class FrozenBatchNorm(nn.Module):
    """A batch norm with fixed statistics. They are parameters, so that a network reads them as all other weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in _NORM_PARTS:
            start = torch.zeros if name in ("bias", "running_mean") else torch.ones
            self.register_parameter(name, nn.Parameter(start(channels)))

    def forward(self, x: Tensor) -> Tensor:
        factor, shift = scale_of(*(self.get_parameter(name) for name in _NORM_PARTS))
        return (x.to(factor.dtype) * factor[:, None, None] + shift[:, None, None]).to(x.dtype)


def scale_of(weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor and the shift of a frozen batch norm, by channel."""
    factor = weight * (variance + _EPS).rsqrt()
    return factor, bias - mean * factor


def _norm(config: ResNetConfig, channels: int) -> nn.Module:
    return FrozenBatchNorm(channels) if config.norm == "batch" else nn.GroupNorm(channels // _GROUP, channels, _EPS)


def _apply(norm: nn.Module, x: Tensor) -> Tensor:
    """A norm whose parameters may be wider than x."""
    if isinstance(norm, nn.GroupNorm) and norm.weight.dtype != x.dtype:
        return norm(x.to(norm.weight.dtype)).to(x.dtype)
    return norm(x)


class ResNetBlock(nn.Module):
    """Two 3x3 convolutions, or a 1x1, a 3x3 and a 1x1 one, around which the input is added."""

    def __init__(self, config: ResNetConfig, incoming: int, inner: int, stride: int) -> None:
        super().__init__()
        out = inner * config.expansion
        # Channels, kernel and stride of each convolution.
        if config.expansion > 1:
            plan = [(incoming, inner, 1, 1), (inner, inner, 3, stride), (inner, out, 1, 1)]
        else:
            plan = [(incoming, inner, 3, stride), (inner, out, 3, 1)]
        self.count = len(plan)
        for number, (channels, outs, kernel, step) in enumerate(plan, 1):
            self.add_module(f"conv{number}", nn.Conv2d(channels, outs, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{number}", _norm(config, outs))
        self.downsample: nn.Sequential | None = None
        if stride > 1 or incoming != out:
            self.downsample = nn.Sequential(nn.Conv2d(incoming, out, 1, stride, bias=False), _norm(config, out))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number in range(1, self.count + 1):
            y = _apply(self.get_submodule(f"bn{number}"), self.get_submodule(f"conv{number}")(y))
            y = F.relu(y) if number < self.count else y
        return F.relu(y + (x if self.downsample is None else _apply(self.downsample[1], self.downsample[0](x))))


class ResNet(nn.Module):
    """Normalised pixels (B, 3, H, W) to the feature map (B, channels, `feature_size`)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = _norm(config, 64)
        for index, stage in enumerate(config.blocks(), 1):
            self.add_module(f"layer{index}", nn.Sequential(*(ResNetBlock(config, *sizes) for sizes in stage)))

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Whether a parameter belongs to a norm (`Network.kept_wide`)."""
        return ".bn" in f".{name}" or ".downsample.1." in name

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(_apply(self.bn1, self.conv1(images))), 3, 2, 1)
        for index in range(1, len(self.config.stages) + 1):
            x = self.get_submodule(f"layer{index}")(x)
        return x


# -- in fused operations ------------------------------------------------------------------------------------------


class Convolution(NamedTuple):
    """A convolution and the norm after it.

    `weight` (O, C, kh, kw) is channels-last in memory, or that of `pack_stem`, and has the factor of a batch norm;
    `shift` (O,) float32 is the batch norm's shift, or None with a group norm.
    """

    weight: Tensor
    stride: int
    shift: Tensor | None = None
    norm: GroupNorm | None = None

    def plan(self, shape: MapShape) -> tuple[ConvPlan, MapShape]:
        """Choose how maps of this shape are convolved; return it and the shape of the result."""
        batch, height, width, _ = shape
        plan = plan_convolution(shape, self.weight, self.stride, alone=self.norm is not None)
        return plan, (batch, -(-height // self.stride), -(-width // self.stride), len(self.weight))

    def __call__(self, x: Tensor, plan: ConvPlan, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
        """x (B, H, W, C) to the activation of the normed convolution plus `residual`."""
        if self.norm is not None:
            return self.normed(convolve(x, self.weight, self.stride, plan=plan), residual, relu=relu)
        activation = Activation.RELU if relu else Activation.NONE
        return convolve(
            x, self.weight, self.stride, shift=self.shift, residual=residual, activation=activation, plan=plan
        )

    def normed(self, value: Tensor, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
        """Apply the group norm to a convolution's result."""
        assert self.norm is not None
        activation = Activation.RELU if relu else Activation.NONE
        return ops.group_act(Sum(value), self.norm, activation=activation, keep=False, after=residual)[1]


class BlockConvolutions(NamedTuple):
    """The convolutions of a block, and that of its residual."""

    convolutions: tuple[Convolution, ...]
    downsample: Convolution | None

    def plan(self, shape: MapShape) -> tuple[list[ConvPlan], MapShape]:
        """As `Convolution.plan`, in the order of the calls."""
        found = [] if self.downsample is None else [self.downsample.plan(shape)[0]]
        for convolution in self.convolutions:
            plan, shape = convolution.plan(shape)
            found.append(plan)
        return found, shape

    def __call__(self, x: Tensor, plans: Iterator[ConvPlan]) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x, next(plans), relu=False)
        for convolution in self.convolutions[:-1]:
            x = convolution(x, next(plans))
        return self.convolutions[-1](x, next(plans), residual)


class ResNetWeights(NamedTuple):
    """A ResNet's folded weights."""

    stem: Convolution
    blocks: tuple[BlockConvolutions, ...]

    @classmethod
    def of(cls, model: Network, name: str, config: ResNetConfig, dtype: torch.dtype) -> ResNetWeights:
        """Prepare the weights of the module `name` of a network."""

        def convolution(conv: str, norm: str, stride: int, pack: Pack = _laid_out) -> Convolution:
            weight = model.weight(f"{name}.{conv}.weight").double()
            if config.norm == "group":
                scale, shift = (model.weight(f"{name}.{norm}.{part}").float() for part in ("weight", "bias"))
                return Convolution(
                    pack(weight, dtype), stride, norm=GroupNorm(len(scale) // _GROUP, scale, shift, _EPS)
                )
            factor, shift = scale_of(*(model.weight(f"{name}.{norm}.{part}").double() for part in _NORM_PARTS))
            return Convolution(pack(weight * factor[:, None, None, None], dtype), stride, shift.float())

        def block(start: str, incoming: int, inner: int, stride: int) -> BlockConvolutions:
            strides: Sequence[int] = (1, stride, 1) if config.expansion > 1 else (stride, 1)
            inside = (convolution(f"{start}.conv{i}", f"{start}.bn{i}", step) for i, step in enumerate(strides, 1))
            skips = stride > 1 or incoming != inner * config.expansion
            down = convolution(f"{start}.downsample.0", f"{start}.downsample.1", stride) if skips else None
            return BlockConvolutions(tuple(inside), down)

        blocks = [
            block(f"layer{stage}.{number}", *sizes)
            for stage, group in enumerate(config.blocks(), 1) for number, sizes in enumerate(group)
        ]  # fmt: skip
        return cls(convolution("conv1", "bn1", STEM_STRIDE, pack_stem), tuple(blocks))


class NativeResNet:
    """The launches of a ResNet for images of one size. The first writes `value` from pixels, as `convolve_pixels`."""

    def __init__(self, weights: ResNetWeights, images: tuple[int, int], size: tuple[int, int]) -> None:
        """`images`: batch and images of each; `size`: height and width of an image."""
        self.weights = weights
        stem = weights.stem.weight
        height, width = (-(-side // STEM_STRIDE) for side in size)
        self.value = torch.empty(*images, height, width, len(stem), dtype=stem.dtype, device=stem.device)
        shape: MapShape = (math.prod(images), -(-height // 2), -(-width // 2), len(stem))
        self.plans: list[ConvPlan] = []
        for block in weights.blocks:
            found, shape = block.plan(shape)
            self.plans += found

    def see(self, images: Tensor, scales: Tensor, view: slice = slice(None)) -> None:
        """Convolve pixels: `images` (B, V, H, W, 3) and `scales` (V, 2, 3), as `convolve_pixels`, of some views."""
        convolve_pixels(self.weights.stem.weight, images, scales, self.value[:, view])

    def __call__(self) -> Tensor:
        """Return the feature map (B * V, h, w, channels) of the pixels seen."""
        stem, value = self.weights.stem, self.value.flatten(0, 1)
        # A shift and ReLU keep the order of values: they may follow the maximum, and see a quarter of the pixels.
        if stem.norm is None:
            x = max_pool(value, stem.shift, activation=Activation.RELU)
        else:
            x = max_pool(stem.normed(value))
        plans = iter(self.plans)
        for block in self.weights.blocks:
            x = block(x, plans)
        return x


def convolutions_by(resnets: Sequence[NativeResNet]) -> str:
    """Describe for the ledger which kernels run the convolutions of a program's ResNets."""
    plans = [plan for resnet in resnets for plan in resnet.plans]
    own = sum(plan.tile is not None for plan in plans)
    stem = "Triton" if stem_in_triton(resnets[0].weights.stem.weight) else "the library"
    return f"stem by {stem}; {own} of {len(plans)} other convolutions by Triton, the rest by the library"


def _laid_out(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).contiguous(memory_format=torch.channels_last)
