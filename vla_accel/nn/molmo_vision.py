"""Molmo's vision: SigLIP's features of several layers, pooled in squares of four patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.nn.reference import TransformerBlock
from vla_accel.nn.siglip import SiglipConfig

_POOL = 2
"""Patches along a side of a square."""


@dataclass(frozen=True)
class MolmoVisionConfig(SiglipConfig):
    """Sizes of the vision tower and of what follows it.

    `depth`: blocks that are run; `levels`: the blocks whose outputs are joined, in order; `pool_width`, `pool_heads`:
    of the attention that pools squares of four patches; `masked`: whether patches beyond the image's edge are left out
    of it; `hidden`: of the gated MLP that follows.
    """

    depth: int = 25
    image_size: int = 378
    levels: tuple[int, ...] = (24, 18)
    pool_width: int = 1152
    pool_heads: int = 16
    masked: bool = True
    hidden: int = 9728

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.levels or max(self.levels) != self.depth - 1 or min(self.levels) < 0:
            raise ConfigError(f"vision.levels: expected blocks up to the last, {self.depth - 1}, got {[*self.levels]}")

    @property
    def side(self) -> int:
        """Patches along a side of the image."""
        return self.image_size // self.patch_size

    @property
    def squares(self) -> int:
        """Squares of patches along a side, the last ones partly beyond the edge."""
        return -(-self.side // _POOL)

    @property
    def features(self) -> int:
        """Columns of the joined outputs."""
        return len(self.levels) * self.width

    def places(self) -> Tensor:
        """Where each patch is among the patches of all squares, (tokens,) int64."""
        row, column = torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij")
        square = row // _POOL * self.squares + column // _POOL
        return (square * _POOL**2 + row % _POOL * _POOL + column % _POOL).flatten()

    def inside(self) -> Tensor:
        """Which patches of each square are in the image, (squares², 4) bool."""
        real = torch.arange(_POOL * self.squares) < self.side
        both = (real[:, None] & real).unflatten(1, (-1, _POOL)).unflatten(0, (-1, _POOL))
        return both.transpose(1, 2).flatten(2).flatten(0, 1)


class MolmoVision(nn.Module):
    """pixels (N, 3, image_size, image_size) in [-1, 1] to features of each square of patches (N, squares², 4, features)
    in the dtype of the layers' weights, zero beyond the image's edge."""

    def __init__(self, config: MolmoVisionConfig) -> None:
        super().__init__()
        self.config = config
        # Pixels of a patch are row by row, their channels last.
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, config.width)
        self.position_embedding = nn.Parameter(torch.zeros(config.tokens, config.width))
        self.layers = nn.ModuleList(TransformerBlock(config.block) for _ in range(config.depth))

    def embed(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) in [-1, 1] to (N, tokens, width) in the embedding's dtype, before the first layer."""
        config, weight = self.config, self.patch_embedding.weight
        patches = pixels.to(weight.dtype).unflatten(3, (config.side, -1)).unflatten(2, (config.side, -1))
        embedded = self.patch_embedding(patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
        return embedded + self.position_embedding.to(embedded.dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        x, found = self.embed(pixels).to(self.layers[0].qkv_proj.weight.dtype), {}  # type: ignore[union-attr,arg-type]
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index in self.config.levels:
                found[index] = x
        return self.squares(found)

    def squares(self, found: Mapping[int, Tensor]) -> Tensor:
        """Join the outputs (N, tokens, width) of the blocks `levels`, by squares of patches."""
        config = self.config
        features = torch.cat([found[level] for level in config.levels], -1)
        over = _POOL * config.squares - config.side
        features = F.pad(features.unflatten(1, (config.side, config.side)), (0, 0, 0, over, 0, over))
        squares = features.unflatten(2, (-1, _POOL)).unflatten(1, (-1, _POOL)).transpose(2, 3)
        return squares.flatten(3, 4).flatten(1, 2)


class MolmoPooling(nn.Module):
    """Squares of patches (N, T, 4, features) to image features (N, T, width of the language model): attention of their
    mean to them, and a gated MLP."""

    def __init__(self, config: MolmoVisionConfig, width: int) -> None:
        super().__init__()
        self.config, pool = config, config.pool_width
        self.q_proj, self.kv_proj = nn.Linear(config.features, pool), nn.Linear(config.features, 2 * pool)
        self.out_proj = nn.Linear(pool, pool)
        self.gate_up_proj = nn.Linear(pool, 2 * config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, width, bias=False)

    def mean(self, squares: Tensor) -> Tensor:
        """What queries are made of: the mean of a square's patches, with those beyond the edge unless `masked`."""
        if not self.config.masked:
            return squares.mean(-2)
        return squares.sum(-2) / self.config.inside().sum(-1, keepdim=True).to(squares)

    def forward(self, squares: Tensor) -> Tensor:
        config, count = self.config, squares.shape[:2]
        q = self.q_proj(self.mean(squares)).flatten(0, 1)[:, None].unflatten(-1, (config.pool_heads, -1))
        k, v = self.kv_proj(squares).flatten(0, 1).unflatten(-1, (2 * config.pool_heads, -1)).chunk(2, 2)
        mask = config.inside().to(q.device).repeat(count[0], 1)[:, None] if config.masked else None
        pooled = self.out_proj(reference.attention(q, k, v, mask).flatten(1).unflatten(0, count))
        return self.down_proj(reference.activate(self.gate_up_proj(pooled), Activation.SWIGLU))
