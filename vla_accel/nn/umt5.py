"""The encoder of UMT5, which reads prompts for Wan 2.2. Eager only: prompts of a robot are encoded in advance.

Source of the mathematics: UMT5 of transformers (Apache-2.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.nn.network import Network
from vla_accel.nn.reference import RmsNorm


@dataclass(frozen=True)
class Umt5Config:
    """Sizes. `buckets`, `farthest`: of the biases by the distance of two tokens."""

    vocab_size: int = 256_384
    width: int = 4096
    mlp_dim: int = 10_240
    heads: int = 64
    head_dim: int = 64
    depth: int = 24
    buckets: int = 32
    farthest: int = 128
    eps: float = 1e-6


class Umt5Block(nn.Module):
    """Attention with a bias for each distance and no scale, then a gated MLP."""

    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.config = config
        width, attended = config.width, config.heads * config.head_dim
        self.norm, self.mlp_norm = (RmsNorm(width, config.eps, offset=0.0) for _ in range(2))
        self.qkv_proj, self.out_proj = nn.Linear(width, 3 * attended, False), nn.Linear(attended, width, False)
        self.distances = nn.Parameter(torch.zeros(config.buckets, config.heads))
        self.gate_up_proj = nn.Linear(width, 2 * config.mlp_dim, False)
        self.down_proj = nn.Linear(config.mlp_dim, width, False)

    def forward(self, x: Tensor, buckets: Tensor) -> Tensor:
        """x (T, W), `buckets` (T, T) of the distances."""
        q, k, v = self.qkv_proj(self.norm(x)).unflatten(-1, (3, self.config.heads, -1)).permute(1, 2, 0, 3)
        bias = self.distances[buckets].permute(2, 0, 1).to(q.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        x = x + self.out_proj(attended.transpose(0, 1).flatten(1))
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Umt5Encoder(Network):
    """Tokens (T,) int64 of one prompt to rows (T, W)."""

    config: Umt5Config

    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Umt5Block(config) for _ in range(config.depth))
        self.final_norm = RmsNorm(config.width, config.eps, offset=0.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        x, buckets = self.embed(tokens), self.distance_buckets(len(tokens)).to(tokens.device)
        for block in self.layers:
            x = block(x, buckets)
        return self.final_norm(x)

    def distance_buckets(self, count: int) -> Tensor:
        """Which bias key j has for query i, int64 (i, j): half of the buckets are for later keys; near distances have
        their own, far ones share."""
        config, place = self.config, torch.arange(count)
        distance = place[None] - place[:, None]
        half = config.buckets // 2
        exact, far = half // 2, distance.abs()
        ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(config.farthest / exact)
        shared = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(far < exact, far, shared) + half * (distance > 0)
