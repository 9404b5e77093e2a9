"""CLIP's image and text encoders: the class token of images, the last token of prompts.

Source of the mathematics: CLIP of transformers 5.5.4 (Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import Attention, Block, vit_block
from vla_accel.nn.reference import TransformerBlock
from vla_accel.nn.siglip import SiglipConfig, SiglipVision


@dataclass(frozen=True)
class ClipVisionConfig(SiglipConfig):
    """Sizes of the image encoder, of ViT-B/16 by default."""

    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    heads: int = 12
    patch_size: int = 16
    eps: float = 1e-5

    @property
    def block(self) -> Block:
        return replace(super().block, activation=Activation.QUICK_GELU)


@dataclass(frozen=True)
class ClipTextConfig:
    """Sizes of the text encoder. `positions`: the longest prompt in tokens."""

    width: int = 512
    depth: int = 12
    mlp_dim: int = 2048
    heads: int = 8
    vocab_size: int = 49_408
    positions: int = 77
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not self.heads or self.width % self.heads:
            raise ConfigError(f"text.width: expected a multiple of {self.heads} heads, got {self.width}")

    @property
    def block(self) -> Block:
        """One block of the encoder."""
        block = vit_block(self.width, self.heads, self.mlp_dim, self.eps)
        return replace(block, activation=Activation.QUICK_GELU, attention=Attention.CAUSAL)


class ClipVision(SiglipVision):
    """Pixels (N, 3, S, S), normalised, to the class token's row after the last block, (N, width)."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__(config)
        del self.post_layernorm
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch_size, config.patch_size, bias=False)
        self.class_token = nn.Parameter(torch.zeros(config.width))
        self.class_position = nn.Parameter(torch.zeros(1, config.width))
        self.pre_layernorm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.embed(pixels)
        first = (self.class_token + self.class_position).to(patches.dtype).expand(len(patches), 1, -1)
        x = reference.layer_norm(torch.cat((first, patches), 1), self.pre_layernorm).to(self.dtype)
        *layers, last = self.layers
        assert isinstance(last, TransformerBlock)
        for layer in layers:
            x = layer(x)
        q, k, v, _ = last.qkv(x, None)  # nothing reads the other rows of the last block
        return last.finish(x[:, :1], reference.attention(q[:, :1], k, v, None))[:, 0]


class ClipText(nn.Module):
    """Prompts (B, positions) int64 to (B, out_width).

    A prompt ends in the token of the highest number. What follows changes nothing, as attention is causal.
    """

    def __init__(self, config: ClipTextConfig, out_width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Parameter(torch.zeros(config.positions, config.width))
        self.layers = nn.ModuleList(TransformerBlock(config.block) for _ in range(config.depth))
        self.final_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.projection = nn.Linear(config.width, out_width)

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        x = (self.embed(tokens) + self.positions[:count]).to(self.projection.weight.dtype)
        seen = torch.ones(1, count, count, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            x = layer(x, None, seen)
        return self.projection(reference.layer_norm(last_rows(x, tokens), self.final_norm))


def last_rows(x: Tensor, tokens: Tensor) -> Tensor:
    """Return the row of each prompt's last token, (B, width), of x (B, L, width) and tokens (B, L)."""
    return x[torch.arange(len(x), device=x.device), tokens.argmax(-1)]
