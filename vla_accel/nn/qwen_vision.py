"""Qwen3-VL's vision tower: images to image tokens, and to deepstack features that the first language layers add.

Source of the mathematics: Qwen3-VL in transformers 5.5.4 (Apache-2.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.nn.block import Block, vit_block
from vla_accel.nn.reference import TransformerBlock

Grid = tuple[int, int]
"""Rows and columns of an image: of its patches, or of its tokens after merging."""


@dataclass(frozen=True)
class QwenVisionConfig:
    """Sizes of the tower.

    `frames` of a video that one patch spans (an image is given as so many equal ones); `merge` x `merge` patches become
    one token; `positions`: rows of the square table of position embeddings; `deepstack`: blocks whose output leaves the
    tower besides the last one's; `out_width`: of the language model.
    """

    width: int = 1024
    depth: int = 24
    mlp_dim: int = 4096
    heads: int = 16
    patch_size: int = 16
    frames: int = 2
    merge: int = 2
    positions: int = 2304
    deepstack: tuple[int, ...] = (5, 11, 17)
    out_width: int = 2048
    eps: float = 1e-6
    theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.width % (4 * self.heads):
            raise ConfigError(f"vision.width {self.width}: expected a multiple of 4 x {self.heads} heads")
        if math.isqrt(self.positions) ** 2 != self.positions:
            raise ConfigError(f"vision.positions: expected a square number, got {self.positions}")
        if any(not 0 <= block < self.depth for block in self.deepstack):
            raise ConfigError(f"vision.deepstack: expected blocks of {self.depth}, got {list(self.deepstack)}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def rotates(self) -> bool:
        """Whether patches are rotated by their places."""
        return True

    @property
    def block(self) -> Block:
        """One block of the tower."""
        return vit_block(self.width, self.heads, self.mlp_dim, self.eps, rope=self.rotates)

    @property
    def unit(self) -> int:
        """Pixels a side of one token."""
        return self.patch_size * self.merge

    def grid(self, height: int, width: int) -> Grid:
        """Tokens of an image of so many pixels. Raises ConfigError where it is not whole tokens."""
        if height % self.unit or width % self.unit or not (height and width):
            raise ConfigError(f"image: expected multiples of {self.unit} pixels a side, got {height} x {width}")
        return height // self.unit, width // self.unit

    @property
    def class_token(self) -> bool:
        """Whether each image has one more row, after those of its patches, which is no token."""
        return False

    def patch_product(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The patch embedding as a product of pixels in [-1, 1]: weight (width, 3 * patch_size²), in the order channel,
        row, column, and bias (width,)."""
        # The frames of an image are equal, so that their weights add up.
        return weight.sum(2).flatten(1), bias

    def place_embedding(self, table: Tensor, grid: Grid) -> Tensor:
        """The square table (positions, W) for an image of `grid` tokens, (patches, W)."""
        return place_embedding(table, grid, self.merge)


@dataclass(frozen=True)
class Placed:
    """What depends on an image's size alone: position `embedding` (patches, width), the class token after them, if
    there is one, and, if the tower rotates, cos and sin (patches, 1, head_dim / 2)."""

    embedding: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None


class PatchMerger(nn.Module):
    """`merge` x `merge` patches, which follow one another, to one token: norm, product, GELU, product.

    Attributes:
        norm: Of each patch or, `late`, of the joined patches; None for none.
        fc2: None for a merger of one product.
        by_channel: Whether the patches are joined channel by channel.
    """

    norm: nn.LayerNorm | None
    fc2: nn.Linear | None

    def __init__(self, config: QwenVisionConfig, late: bool) -> None:
        super().__init__()
        self.patches, self.joined, self.by_channel = config.merge**2, config.width * config.merge**2, False
        self.norm = nn.LayerNorm(self.joined if late else config.width, eps=config.eps)
        self.fc1 = nn.Linear(self.joined, self.joined)
        self.fc2 = nn.Linear(self.joined, config.out_width)

    @property
    def late(self) -> bool:
        """Whether the norm is of the joined patches."""
        return self.norm is not None and self.norm.normalized_shape[0] == self.joined

    def forward(self, x: Tensor) -> Tensor:
        """(N, patches, width) to (N, tokens, out_width)."""
        if self.norm is not None and not self.late:
            x = reference.layer_norm(x, self.norm)
        x = x.unflatten(1, (-1, self.patches))
        x = (x.transpose(2, 3) if self.by_channel else x).flatten(2)
        if self.norm is not None and self.late:
            x = reference.layer_norm(x, self.norm)
        x = self.fc1(x)
        return x if self.fc2 is None else self.fc2(F.gelu(x))


class QwenVision(nn.Module):
    """The tower. Patches stand in the order (token row, token column, row in it, column in it). `fixed`: parameters
    that only `placed` reads."""

    fixed: tuple[str, ...] = ("position_embedding",)

    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__()
        self.config = config
        kernel = (config.frames, config.patch_size, config.patch_size)
        self.patch_embedding: nn.Module = nn.Conv3d(3, config.width, kernel, kernel)
        self.position_embedding = nn.Parameter(torch.zeros(config.positions, config.width))
        self.layers = nn.ModuleList(TransformerBlock(config.block) for _ in range(config.depth))
        self.post_layernorm: nn.LayerNorm | None = None
        self.merger = PatchMerger(config, late=False)
        self.deepstack = nn.ModuleList(PatchMerger(config, late=True) for _ in config.deepstack)

    def patches(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) as rows (N, patches, 3 * patch_size²), in the order of a weight's: channel, row, column."""
        c = self.config
        rows, columns = c.grid(*pixels.shape[2:])
        split = pixels.reshape(-1, 3, rows, c.merge, c.patch_size, columns, c.merge, c.patch_size)
        return split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(pixels), rows * columns * c.merge**2, -1)

    def placed(self, grid: Grid) -> Placed:
        """What of an image of `grid` tokens depends on its size alone."""
        table, weight = self.position_embedding, self.get_parameter("layers.0.qkv_proj.weight")
        embedding = self.config.place_embedding(table, grid)
        if not self.config.rotates:
            return Placed(embedding)
        return Placed(embedding, *patch_rope(self.config, grid, table.device, weight.dtype))

    def embed(self, pixels: Tensor, placed: Placed) -> Tensor:
        """(N, 3, H, W) in [-1, 1] to (N, patches, width), with a class token one row more, in the embedding's dtype,
        before the first block."""
        weight, bias = self.get_parameter("patch_embedding.weight"), self.get_parameter("patch_embedding.bias")
        embedded = F.linear(self.patches(pixels.to(weight.dtype)), *self.config.patch_product(weight, bias))
        return F.pad(embedded, (0, 0, 0, self.config.class_token)) + placed.embedding.to(embedded.dtype)

    def forward(self, pixels: Tensor, placed: Placed | None = None) -> tuple[Tensor, Tensor | None]:
        """(N, 3, H, W) in [-1, 1] to image tokens (N, tokens, out_width), and what the blocks in `deepstack` leave
        (blocks, N, tokens, out_width), None if there are none, in the dtype of the blocks' weights."""
        config = self.config
        placed = self.placed(config.grid(*pixels.shape[2:])) if placed is None else placed
        x = self.embed(pixels, placed).to(self.get_parameter("layers.0.qkv_proj.weight").dtype)
        rope = None if placed.cos is None or placed.sin is None else (placed.cos, placed.sin)
        left = []
        for index, layer in enumerate(self.layers):
            x = layer(x, rope)
            if index in config.deepstack:
                left.append(self.deepstack[config.deepstack.index(index)](x))
        if self.post_layernorm is not None:
            x = reference.layer_norm(x, self.post_layernorm)
        x = x[:, :-1] if config.class_token else x
        return self.merger(x), torch.stack(left) if left else None

    def views(self, pixels: Tensor, placed: Placed | None = None) -> tuple[Tensor, Tensor | None]:
        """pixels (B, V, 3, H, W) in [-1, 1] to image tokens (B, V * tokens, out_width) and deepstack features (n, B,
        V * tokens, out_width), None of towers without. `placed`: what `placed` returns, to compute it once."""
        batch, width = len(pixels), self.config.out_width
        tokens, deepstack = self(pixels.flatten(0, 1), placed)
        if deepstack is not None:
            deepstack = deepstack.reshape(len(deepstack), batch, -1, width)
        return tokens.reshape(batch, -1, width), deepstack


def in_blocks(values: Tensor, merge: int) -> Tensor:
    """(rows, columns, …) of patches as (patches, …) in the tower's order."""
    rows, columns = values.shape[:2]
    split = values.reshape(rows // merge, merge, columns // merge, merge, *values.shape[2:])
    return split.transpose(1, 2).reshape(rows * columns, *values.shape[2:])


def place_embedding(table: Tensor, grid: Grid, merge: int) -> Tensor:
    """The square table (positions, W) for an image of `grid` tokens, (patches, W): bilinear between its corners."""
    side = math.isqrt(len(table))

    def axis(count: int) -> tuple[Tensor, Tensor, Tensor]:
        place = torch.linspace(0, side - 1, count)
        low = place.long()
        return low, (low + 1).clip(max=side - 1), place - low

    (top, bottom, down), (left, right, over) = (axis(n * merge) for n in grid)
    square = table.unflatten(0, (side, side))

    def corner(rows: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        return square[rows[:, None].to(table.device), columns[None].to(table.device)] * weight[..., None].to(table)

    # In the order of the source, so that nothing rounds otherwise.
    mixed = corner(top, left, (1 - down)[:, None] * (1 - over))
    mixed = mixed + corner(top, right, (1 - down)[:, None] * over)
    mixed = mixed + corner(bottom, left, down[:, None] * (1 - over))
    return in_blocks(mixed + corner(bottom, right, down[:, None] * over), merge)


def patch_rope(config: QwenVisionConfig, grid: Grid, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of a patch's row and column, each (patches, 1, head_dim / 2): half of the frequencies are of its row,
    half of its column."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    half = config.head_dim // 2
    inverse = 1.0 / config.theta ** (torch.arange(0, half, 2, dtype=wide, device=device) / half)
    rows, columns = (torch.arange(n * config.merge, device=device, dtype=wide)[:, None] * inverse for n in grid)
    across = (len(rows), len(columns), half // 2)
    angles = torch.cat((rows[:, None].expand(across), columns[None].expand(across)), -1)
    angles = in_blocks(angles, config.merge)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)
