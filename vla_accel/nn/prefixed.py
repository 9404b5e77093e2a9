"""Networks with a prefix: images and prompt become keys and values once a call, which every step attends to."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from vla_accel.nn.network import Network
from vla_accel.nn.reference import PrefixStack
from vla_accel.nn.siglip import SiglipVision


class PrefixNetwork(Network):
    """A network of a vision tower and a prefix that leaves keys and values.

    Its config has `vision`, `prefix`, `image_tokens` (of a view), `shuffle`, `image_scale`, `prefix_tokens`,
    `action_horizon`, `action_dim` and `max_token_len`.
    """

    state_in_prefix: bool = False
    vision: SiglipVision
    prefix: PrefixStack
    projector: nn.Linear
    embed: nn.Embedding

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the prefix's products, and of what reads it; small projections and norms may be wider."""
        layer = self.prefix.layers[0]
        return layer.qkv_proj.weight.dtype  # type: ignore[union-attr,return-value]

    @property
    def cache_heads(self) -> tuple[int, int]:
        """Heads and numbers of a head of the keys and values that leave the prefix."""
        return self.config.prefix.kv_heads, self.config.prefix.head_dim

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """The tower's features (N, patches, width) as image tokens (N, image_tokens, prefix width)."""

    def embed_images(self, pixels: Tensor) -> Tensor:
        """pixels (B, V, 3, H, W) in [-1, 1] to image tokens (B, V * image_tokens, prefix width)."""
        batch, views = pixels.shape[:2]
        features = self.vision(pixels.flatten(0, 1))
        return self.project(features).view(batch, views * self.config.image_tokens, -1)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Token ids (B, L) to embeddings (B, L, prefix width), scaled by √width."""
        return self.embed(tokens) * math.sqrt(self.config.prefix.width)

    @abstractmethod
    def prefix_rows(self, image_tokens: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the rows of the prefix stack (B, S, width), all of them real, their positions (B, S), and the
        attention mask (B, S, S), None if all rows attend to all. `state` (B, state_dim) if it is in the prefix."""

    @abstractmethod
    def keys_values(self, image_tokens: Tensor, tokens: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (depth, B, S, kv_heads, head_dim) as their reader takes them; `rest`: as in `KvCache`."""

    def prefix_parts(self) -> list[str]:
        """The parts that `keys_values` computes with. The last layer stops after its keys and values."""
        *whole, last = (f"prefix.layers.{index}" for index in range(self.config.prefix.depth))
        return ["embed", *whole, f"{last}.input_layernorm", f"{last}.qkv_proj"]
