"""Eagle's vision towers, SigLIP and SigLIP2: images to image tokens.

Source of the mathematics: SigLIP and SigLIP2 in transformers 5.5.4, lerobot 0.5.1's Eagle 2.5 and Isaac-GR00T's Eagle 3
(all Apache-2.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.nn.qwen_vision import Grid, PatchMerger, QwenVision, QwenVisionConfig, in_blocks


@dataclass(frozen=True)
class EagleVisionConfig(QwenVisionConfig):
    """Sizes of the tower, of Eagle 2.5 by default. `joined`: as Eagle 3, joins patches to a token and has two products
    after the tower; otherwise one."""

    width: int = 1152
    depth: int = 27
    mlp_dim: int = 4304
    patch_size: int = 14
    frames: int = 1
    merge: int = 1
    positions: int = 256
    deepstack: tuple[int, ...] = ()
    joined: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deepstack or self.frames != 1 or (self.merge > 1) != self.joined:
            raise ConfigError(
                f"vision: expected one frame, no deepstack, and patches joined or not, got {self.frames}, "
                f"{[*self.deepstack]} and {self.merge} x {self.merge} to a token"
            )

    @property
    def rotates(self) -> bool:
        return False

    def patch_product(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        # Eagle 3 takes a patch row by row, and its pixels' channels last.
        if self.joined:
            weight = weight.unflatten(1, (self.patch_size, self.patch_size, 3)).permute(0, 3, 1, 2)
        return weight.flatten(1), bias

    def place_embedding(self, table: Tensor, grid: Grid) -> Tensor:
        """Bilinear with an antialiased filter, as images are resized."""
        side, size = math.isqrt(len(table)), (grid[0] * self.merge, grid[1] * self.merge)
        square = table.unflatten(0, (side, side)).permute(2, 0, 1)[None]
        resized = F.interpolate(square, size, mode="bilinear", align_corners=False, antialias=True)
        return in_blocks(resized[0].permute(1, 2, 0), self.merge)


class EagleMerger(PatchMerger):
    """From the tower to the language model."""

    def __init__(self, config: EagleVisionConfig) -> None:
        super().__init__(config, late=True)
        self.by_channel = config.joined
        self.fc1 = nn.Linear(self.joined, config.out_width)
        self.norm = nn.LayerNorm(self.joined) if config.joined else None
        self.fc2 = nn.Linear(config.out_width, config.out_width) if config.joined else None


class EagleVision(QwenVision):
    """The tower. Patches are in the order of `QwenVision`."""

    def __init__(self, config: EagleVisionConfig) -> None:
        super().__init__(config)
        patch = config.patch_size
        self.patch_embedding = (
            nn.Linear(3 * patch**2, config.width) if config.joined else nn.Conv2d(3, config.width, patch, patch)
        )
        self.post_layernorm = nn.LayerNorm(config.width, eps=config.eps)
        self.merger = EagleMerger(config)
