"""DaViT (Ding et al. 2022), the vision tower of Florence-2: stages of blocks that attend by windows and by channels.

Rows are pixels of a stage's map, (N, height * width, W). Every attention and every MLP follows a depthwise convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.kernels.attention.maps import Windows, by_channel, by_window

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class Stage:
    """A stage of `depth` blocks on maps of `width` channels, with heads (and groups of channels) by number.

    It begins with a convolution of `patch` pixels a side, at every `stride`-th pixel, and a norm before it
    (`norm_first`) or after it.
    """

    width: int
    depth: int
    heads: int
    groups: int
    patch: int
    stride: int
    padding: int
    norm_first: bool

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width % self.groups:
            raise ConfigError(f"davit: expected heads and groups that divide {self.width}, got {self}")

    def size(self, size: Size) -> Size:
        """The size of this stage's map for that of its input."""
        height, width = ((side + 2 * self.padding - self.patch) // self.stride + 1 for side in size)
        return height, width


@dataclass(frozen=True)
class DavitConfig:
    """Sizes of the tower. `window`: pixels along a window's side; `expansion`: width of an MLP in widths of its
    stage; `positions`: most rows and columns of the last map."""

    stages: tuple[Stage, ...] = (
        Stage(256, 1, 8, 8, 7, 4, 3, False),
        Stage(512, 1, 16, 16, 3, 2, 1, True),
        Stage(1024, 9, 32, 32, 3, 2, 1, True),
        Stage(2048, 1, 64, 64, 3, 2, 1, True),
    )
    window: int = 12
    expansion: int = 4
    positions: int = 50

    @property
    def width(self) -> int:
        """Channels of the last map."""
        return self.stages[-1].width

    def sizes(self, size: Size) -> list[Size]:
        """The size of each stage's map for an image of `size`."""
        found = []
        for stage in self.stages:
            size = stage.size(size)
            found.append(size)
        return found


class Half(nn.Module):
    """A residual branch after a depthwise convolution: x += conv(x), then x += branch(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)

    def enter(self, x: Tensor, size: Size) -> tuple[Tensor, Tensor]:
        """Return the rows after the convolution, and their norm."""
        image = x.transpose(1, 2).unflatten(2, size)
        x = x + self.conv(image).flatten(2).transpose(1, 2)
        return x, reference.layer_norm(x, self.norm)


class AttentionHalf(Half):
    """Attention by windows, or (`window` None) by channels."""

    def __init__(self, stage: Stage, window: int | None) -> None:
        super().__init__(stage.width)
        self.stage, self.window = stage, window
        self.qkv_proj = nn.Linear(stage.width, 3 * stage.width)
        self.out_proj = nn.Linear(stage.width, stage.width)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        x, h = self.enter(x, size)
        qkv = self.qkv_proj(h)
        if self.window is None:
            return x + self.out_proj(by_channel(qkv, self.stage.groups))
        # Florence-2 pads normed rows with zeros, so the products of padding are the bias.
        windows = Windows(*size, self.window)
        return x + self.out_proj(by_window(qkv, self.qkv_proj.bias, windows, self.stage.heads))


class MlpHalf(Half):
    """An MLP with the exact GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        x, h = self.enter(x, size)
        return x + self.fc2(F.gelu(self.fc1(h)))


class StageBlocks(nn.Module):
    """A stage. `halves`: of each block attention by windows, MLP, attention by channels, MLP."""

    def __init__(self, stage: Stage, channels: int, config: DavitConfig) -> None:
        super().__init__()
        self.stage = stage
        self.conv = nn.Conv2d(channels, stage.width, stage.patch, stage.stride, stage.padding)
        self.norm = nn.LayerNorm(channels if stage.norm_first else stage.width)
        hidden = config.expansion * stage.width
        self.halves = nn.ModuleList(
            half for _ in range(stage.depth) for window in (config.window, None)
            for half in (AttentionHalf(stage, window), MlpHalf(stage.width, hidden))
        )  # fmt: skip

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """x (N, pixels, channels) of a map of `size`."""
        if self.stage.norm_first:
            x = reference.layer_norm(x, self.norm)
        x = self.conv(x.transpose(1, 2).unflatten(2, size)).flatten(2).transpose(1, 2)
        if not self.stage.norm_first:
            x = reference.layer_norm(x, self.norm)
        size = self.stage.size(size)
        for half in self.halves:
            x = half(x, size)
        return x


class Davit(nn.Module):
    """Normalised pixels (N, 3, height, width) to the rows of the last map, (N, pixels, W)."""

    def __init__(self, config: DavitConfig) -> None:
        super().__init__()
        self.config = config
        channels = (3, *(stage.width for stage in config.stages))
        self.stages = nn.ModuleList(
            StageBlocks(stage, before, config) for stage, before in zip(config.stages, channels, strict=False)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        size = pixels.shape[2], pixels.shape[3]
        x = pixels.flatten(2).transpose(1, 2)
        for stage, following in zip(self.stages, self.config.sizes(size), strict=True):
            x, size = stage(x, size), following
        return x
