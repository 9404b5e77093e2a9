"""SigLIP vision tower (Zhai et al. 2023), by default So400m/14 at 224 px as in openpi's PaliGemma."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.nn.block import Block, vit_block
from vla_accel.nn.reference import TransformerBlock


@dataclass(frozen=True)
class SiglipConfig:
    """Sizes of a SigLIP tower. `image_size` and `patch_size` are in pixels."""

    width: int = 1152
    depth: int = 27
    mlp_dim: int = 4304
    heads: int = 16
    image_size: int = 224
    patch_size: int = 14
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not self.heads or self.width % self.heads:
            raise ConfigError(f"siglip.width {self.width} is not a multiple of heads {self.heads}")
        if self.image_size % self.patch_size:
            raise ConfigError(f"siglip.image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")

    @property
    def tokens(self) -> int:
        """Patch tokens of one view."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def block(self) -> Block:
        """One block of the tower."""
        return vit_block(self.width, self.heads, self.mlp_dim, self.eps)


class SiglipVision(nn.Module):
    """pixels (N, 3, image_size, image_size) in [-1, 1] to (N, tokens, width) in the dtype of the layers' weights."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv2d(3, config.width, kernel_size=config.patch_size, stride=config.patch_size)
        self.position_embedding = nn.Parameter(torch.zeros(config.tokens, config.width))
        self.layers = nn.ModuleList(TransformerBlock(config.block) for _ in range(config.depth))
        self.post_layernorm = nn.LayerNorm(config.width, eps=config.eps)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the layers compute in; the embeddings may be wider."""
        first = self.layers[0].qkv_proj if len(self.layers) else self.post_layernorm
        return first.weight.dtype  # type: ignore[union-attr,return-value]

    def embed(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) in [-1, 1] to (N, tokens, width) in the embedding's dtype, before the first layer."""
        config, weight = self.config, self.patch_embedding.weight
        side, patch = config.image_size // config.patch_size, config.patch_size
        # A convolution whose stride is its kernel is a matrix product over unfolded patches.
        patches = pixels.to(weight.dtype).reshape(-1, 3, side, patch, side, patch)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(pixels.shape[0], config.tokens, -1)
        embedded = F.linear(patches, weight.flatten(1), self.patch_embedding.bias)
        return embedded + self.position_embedding.to(embedded.dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels).to(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return reference.layer_norm(x, self.post_layernorm)
