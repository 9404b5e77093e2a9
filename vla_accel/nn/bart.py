"""BART's encoder (Lewis et al. 2020): norms follow the residuals, and every row attends to every row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.kernels import reference

FIRST_POSITION = 2
"""BART's table of positions begins with two rows that no token has."""


@dataclass(frozen=True)
class BartConfig:
    """Sizes of BART's encoder. `positions`: rows of its table."""

    width: int = 1024
    depth: int = 12
    mlp_dim: int = 4096
    heads: int = 16
    vocab_size: int = 51_289
    positions: int = 1026


class BartLayer(nn.Module):
    """A layer of BART's encoder, whose norms follow the residuals."""

    def __init__(self, config: BartConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.qkv_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, config.mlp_dim), nn.Linear(config.mlp_dim, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = reference.layer_norm(x + self.out_proj(reference.attention(q, k, v, None).flatten(2)), self.norm1)
        return reference.layer_norm(x + self.fc2(F.gelu(self.fc1(x))), self.norm2)


class Bart(nn.Module):
    """BART's encoder. Every row attends to every row, padding included."""

    def __init__(self, config: BartConfig) -> None:
        super().__init__()
        self.positions = nn.Embedding(config.positions, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.layers = nn.ModuleList(BartLayer(config) for _ in range(config.depth))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, W), embedded and without positions."""
        x = reference.layer_norm((x + self.table(x.shape[1])).to(x.dtype), self.norm)
        for layer in self.layers:
            x = layer(x)
        return x

    def table(self, tokens: int) -> Tensor:
        """The positions of so many tokens (T, W)."""
        return self.positions.weight[FIRST_POSITION : FIRST_POSITION + tokens]
