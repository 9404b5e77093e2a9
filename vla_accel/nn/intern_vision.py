"""InternViT, the vision tower of InternVL: images of one size to image tokens.

Source of the mathematics: InternVL in transformers 5.5.4 (Apache-2.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import Block
from vla_accel.nn.qwen_vision import Grid, PatchMerger, Placed, QwenVision, QwenVisionConfig, in_blocks
from vla_accel.pictures import IMAGENET_DEVIATION, IMAGENET_MEAN

_MERGER_EPS = 1e-5


@dataclass(frozen=True)
class InternVisionConfig(QwenVisionConfig):
    """Sizes of the tower, of InternViT-300M by default. `positions`: patches of an image, whose size is fixed."""

    patch_size: int = 14
    frames: int = 1
    positions: int = 1024
    deepstack: tuple[int, ...] = ()
    out_width: int = 896

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deepstack or self.frames != 1 or math.isqrt(self.positions) % self.merge:
            raise ConfigError(
                f"vision: expected one frame, no deepstack and whole tokens, got {self.frames}, {[*self.deepstack]} "
                f"and {self.positions} patches, {self.merge} x {self.merge} to a token"
            )

    @property
    def rotates(self) -> bool:
        return False

    @property
    def class_token(self) -> bool:
        return True

    @property
    def side(self) -> int:
        """Pixels a side of an image."""
        return math.isqrt(self.positions) * self.patch_size

    @property
    def image_tokens(self) -> int:
        """Tokens of an image."""
        return self.positions // self.merge**2

    @property
    def block(self) -> Block:
        return replace(super().block, activation=Activation.GELU_ERF, layer_scale=True)

    def patch_product(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        # ((u + 1) / 2 - mean) / std of pixels u in [-1, 1].
        channels = weight.unbind(1)
        scaled = [w * (0.5 / std) for w, std in zip(channels, IMAGENET_DEVIATION, strict=True)]
        for w, mean, std in zip(channels, IMAGENET_MEAN, IMAGENET_DEVIATION, strict=True):
            bias = bias + w.sum((1, 2)) * ((0.5 - mean) / std)
        return torch.stack(scaled, 1).flatten(1), bias

    def place_embedding(self, table: Tensor, grid: Grid) -> Tensor:
        """The embeddings of the patches, without that of the class token, which is first in the table."""
        rows, columns = grid[0] * self.merge, grid[1] * self.merge
        return in_blocks(table[1:].unflatten(0, (rows, columns)), self.merge)


class InternMerger(PatchMerger):
    """From the tower to the language model."""

    def __init__(self, config: InternVisionConfig) -> None:
        super().__init__(config, late=True)
        self.norm = nn.LayerNorm(self.joined, eps=_MERGER_EPS)
        self.fc1 = nn.Linear(self.joined, config.out_width)
        self.fc2 = nn.Linear(config.out_width, config.out_width)


class InternVision(QwenVision):
    """The tower. Patches are in the order of `QwenVision`; the class token follows them."""

    fixed = ("position_embedding", "class_embedding")

    def __init__(self, config: InternVisionConfig) -> None:
        super().__init__(config)
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch_size, config.patch_size)
        self.class_embedding = nn.Parameter(torch.zeros(1, config.width))
        self.position_embedding = nn.Parameter(torch.zeros(1 + config.positions, config.width))
        self.merger = InternMerger(config)

    def placed(self, grid: Grid) -> Placed:
        table = self.position_embedding
        patches = self.config.place_embedding(table, grid)
        return Placed(torch.cat((patches, self.class_embedding + table[:1])))
