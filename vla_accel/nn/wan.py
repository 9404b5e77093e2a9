"""The transformer blocks of FastWAM's Wan 2.2: rows of video are a prefix, to whose keys the action expert attends.

Heads rotate pairs of halves (`kernels.reference.apply_rope`): checkpoints store interleaved pairs, and the rows of
their query and key products are put in order when they are read (`checkpoints.weights.Piece.pairs`). No sum changes.
Source of the mathematics: lerobot 0.6.1 (Apache-2.0), from Wan 2.2 (Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.nn.reference import RmsNorm, Rope

Pair = tuple[Tensor, Tensor]
"""Keys and values (B, S, heads, d)."""
Text = tuple[Tensor, Tensor, Tensor]
"""Keys and values of text, and float32 (B, S) that is added to the scores of its keys: the logarithm of how many rows
a key has. -inf: none."""


@dataclass(frozen=True)
class WanConfig:
    """Sizes of a stack. `text_dim`: of the rows that blocks cross to; `freq_dim`: of the embedding of time."""

    width: int = 3072
    mlp_dim: int = 14336
    heads: int = 24
    head_dim: int = 128
    depth: int = 30
    text_dim: int = 4096
    freq_dim: int = 256
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.freq_dim % 2 or self.head_dim < 6:
            raise ConfigError(f"expected even head_dim, from 6, and freq_dim, got {self.head_dim}, {self.freq_dim}")

    @property
    def attended(self) -> int:
        """Width of queries, keys and values."""
        return self.heads * self.head_dim


class WanBlock(nn.Module):
    """Attention with modulated norm and gate, plain attention to text, and an MLP with modulated norm and gate. Queries
    and keys are normed over all heads together."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        width, attended, eps = config.width, config.attended, config.eps
        self.modulation = nn.Parameter(torch.zeros(6, width))
        self.qkv_proj, self.out_proj = nn.Linear(width, 3 * attended), nn.Linear(attended, width)
        self.q_norm, self.k_norm = RmsNorm(attended, eps, offset=0.0), RmsNorm(attended, eps, offset=0.0)
        self.text_norm = nn.LayerNorm(width, eps=eps)
        self.text_q, self.text_out = nn.Linear(width, attended), nn.Linear(attended, width)
        self.text_kv = nn.Linear(width, 2 * attended)
        self.text_q_norm, self.text_k_norm = RmsNorm(attended, eps, offset=0.0), RmsNorm(attended, eps, offset=0.0)
        self.fc1, self.fc2 = nn.Linear(width, config.mlp_dim), nn.Linear(config.mlp_dim, width)

    def text(self, rows: Tensor) -> Pair:
        """Embedded text rows (B, S, W) to their keys and values."""
        keys, values = self.text_kv(rows).chunk(2, -1)
        return self._heads(self.text_k_norm(keys)), self._heads(values)

    def qkv(self, x: Tensor, rope: Rope, modulation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (B, T, W) to rotated queries and keys, and values; `modulation` (6, W) of the step."""
        shift, scale = modulation[0], modulation[1]
        q, k, v = self.qkv_proj(reference.adaptive_layer_norm(x, scale, shift, self.config.eps)).chunk(3, -1)
        q, k = (reference.apply_rope(self._heads(h), *rope).to(v.dtype) for h in (self.q_norm(q), self.k_norm(k)))
        return q, k, self._heads(v)

    def finish(self, x: Tensor, attended: Tensor, text: Text, modulation: Tensor) -> Tensor:
        """The block after its attention (B, T, heads, d)."""
        x = reference.gated_residual(x, self.out_proj(attended.flatten(2)), modulation[2])
        q = self._heads(self.text_q_norm(self.text_q(reference.layer_norm(x, self.text_norm))))
        keys, values, bias = text
        x = x + self.text_out(reference.attention(q, keys, values, bias[:, None]).flatten(2))
        normed = reference.adaptive_layer_norm(x, modulation[4], modulation[3], self.config.eps)
        return reference.gated_residual(x, self.fc2(F.gelu(self.fc1(normed), approximate="tanh")), modulation[5])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.heads, -1))


class WanStack(nn.Module):
    """Blocks, with the embeddings of their text and of time."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.text_in, self.text_mix = nn.Linear(config.text_dim, width), nn.Linear(width, width)
        self.time_in, self.time_mix = nn.Linear(config.freq_dim, width), nn.Linear(width, width)
        self.time_out = nn.Linear(width, 6 * width)
        self.layers = nn.ModuleList(WanBlock(config) for _ in range(config.depth))

    @property
    def blocks(self) -> list[WanBlock]:
        return list(self.layers)  # type: ignore[arg-type]

    def modulations(self, times: Tensor) -> Tensor:
        """Times (n,) float32, 0 to 1000, to what modulates every block, (n, depth, 6, W): shift, scale and gate of
        attention, then of the MLP."""
        half = self.config.freq_dim // 2
        exponent = torch.arange(half, dtype=torch.float64, device=times.device) / half
        angles = times.double()[:, None] * 10_000.0**-exponent
        embedded = torch.cat((angles.cos(), angles.sin()), -1).to(self.time_in.weight.dtype)
        embedded = self.time_mix(F.silu(self.time_in(embedded)))
        shared = self.time_out(F.silu(embedded)).unflatten(-1, (6, -1))
        return shared[:, None] + torch.stack([block.modulation for block in self.blocks])

    def embedded(self, text: Tensor) -> Tensor:
        """Rows of text (B, S, text_dim) to (B, S, W)."""
        return self.text_mix(F.gelu(self.text_in(text), approximate="tanh"))


def rope_tables(positions: Tensor, head_dim: int) -> Rope:
    """cos and sin (T, 1, d / 2) float32 of rows at `positions` (T, axes): the head is divided among the axes, all but
    the first of which get a third of it, rounded down to even. Angles are formed in float64."""
    axes = positions.shape[1]
    part = head_dim // 6 * 2
    sizes = (head_dim - (axes - 1) * part, *(part,) * (axes - 1))
    angles = torch.cat([
        column.double()[:, None] / 10_000.0 ** (torch.arange(0, size, 2, device=column.device).double() / size)
        for column, size in zip(positions.unbind(1), sizes, strict=True)
    ], 1)  # fmt: skip
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


def grid_positions(height: int, width: int) -> Tensor:
    """Frame, row and column (height * width, 3) of the cells of one frame, row by row."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), -1).flatten(0, 1)
