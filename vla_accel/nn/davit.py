"""DaViT (Ding et al. 2022), the vision tower of Florence-2: stages of blocks that attend by windows and by channels.

Rows are pixels of a stage's map, (N, height * width, W). Every attention and every MLP follows a depthwise convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference

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


@dataclass(frozen=True)
class Windows:
    """A map cut into windows, with padding on the right and below.

    Attributes:
        pixels: The pixel of each row in order of windows, int64 (windows, window * window); `height * width` for
            padding.
        places: The row of each pixel in that order, int64 (height * width,).
    """

    pixels: Tensor
    places: Tensor

    @classmethod
    def of(cls, size: Size, window: int, device: torch.device) -> Windows:
        """Return the windows of a map of `size`."""
        height, width = size
        pixels = torch.arange(height * width, device=device).view(size)
        pixels = F.pad(pixels, (0, -width % window, 0, -height % window), value=height * width)
        pixels = pixels.unflatten(1, (-1, window)).unflatten(0, (-1, window)).transpose(1, 2).flatten(2).flatten(0, 1)
        rows, columns = (torch.arange(side, device=device) for side in size)
        windows = (rows // window)[:, None] * -(-width // window) + columns // window
        inside = (rows % window)[:, None] * window + columns % window
        return cls(pixels, (windows * window**2 + inside).flatten())


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
            return x + self.out_proj(channel_attention(qkv, self.stage.groups))
        return x + self.out_proj(self.by_window(qkv, size, self.window))

    def by_window(self, qkv: Tensor, size: Size, window: int) -> Tensor:
        """Attention within each window. Florence-2 pads normed rows with zeros and does not mask them: their queries,
        keys and values are the bias."""
        windows, heads = Windows.of(size, window, qkv.device), self.stage.heads
        assert self.qkv_proj.bias is not None
        padded = torch.cat((qkv, self.qkv_proj.bias.expand(len(qkv), 1, -1)), 1)
        q, k, v = padded[:, windows.pixels].flatten(0, 1).unflatten(-1, (3, heads, -1)).unbind(2)
        attended = reference.attention(q, k, v, None).flatten(2).view(len(qkv), windows.pixels.numel(), -1)
        return attended[:, windows.places]


def channel_attention(qkv: Tensor, groups: int) -> Tensor:
    """Attention of a group's channels to each other, over all pixels. qkv (N, pixels, 3 W) to (N, pixels, W)."""
    q, k, v = qkv.unflatten(-1, (3, groups, -1)).permute(2, 0, 3, 4, 1)
    weights = (q @ k.transpose(-1, -2) * qkv.shape[1] ** -0.5).softmax(-1)
    return (weights @ v).permute(0, 3, 1, 2).flatten(2)


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
