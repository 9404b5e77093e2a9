"""SigLIP vision tower: images in, one row of patch tokens per view out.

Knows nothing about language, robots or engines. Source of the mathematics: Zhai et al. 2023 (SigLIP) as used by
openpi's PaliGemma (So400m/14 at 224 px: 27 layers, width 1152, MLP 4304, 16 heads).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference


class PreNormLayer(nn.Module):
    """Attention of all to all and a tanh-GELU MLP, each behind a LayerNorm. q, k and v are one matrix (same function,
    one product). What SigLIP, Qwen3-VL's vision and GR00T's vision-language attention share."""

    def __init__(self, width: int, heads: int, mlp_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.layer_norm1 = nn.LayerNorm(width, eps=eps)
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.layer_norm2 = nn.LayerNorm(width, eps=eps)
        self.fc1 = nn.Linear(width, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None) -> Tensor:
        """x (B, T, width) to the same shape. `rope`: tables of the rotation of q and k (`apply_rope`), or None;
        mask (B, T, T) bool, True = may attend, or None."""
        batch, tokens, width = x.shape
        qkv = self.qkv_proj(reference.layer_norm(x, self.layer_norm1))
        q, k, v = qkv.view(batch, tokens, 3, self.heads, self.head_dim).unbind(2)
        if rope is not None:
            q, k = reference.apply_rope(q, *rope), reference.apply_rope(k, *rope)
        x = x + self.out_proj(reference.attention(q, k, v, mask).reshape(batch, tokens, width))
        return x + self.fc2(F.gelu(self.fc1(reference.layer_norm(x, self.layer_norm2)), approximate="tanh"))


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


class SiglipLayer(PreNormLayer):
    """One block of the tower."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__(config.width, config.heads, config.mlp_dim, config.eps)


class SiglipVision(nn.Module):
    """The tower.

    Args of `forward`: `pixels` (N, 3, image_size, image_size) in [-1, 1], dtype of the layers' weights or wider.
    Returns (N, tokens, width) in the dtype of the layers' weights.
    """

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv2d(3, config.width, kernel_size=config.patch_size, stride=config.patch_size)
        self.position_embedding = nn.Parameter(torch.zeros(config.tokens, config.width))
        self.layers = nn.ModuleList(SiglipLayer(config) for _ in range(config.depth))
        self.post_layernorm = nn.LayerNorm(config.width, eps=config.eps)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the layers compute in; the embeddings may be wider."""
        return self.post_layernorm.weight.dtype if not len(self.layers) else self._layer_dtype()

    def _layer_dtype(self) -> torch.dtype:
        layer = self.layers[0]
        assert isinstance(layer, SiglipLayer)
        return layer.qkv_proj.weight.dtype

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
