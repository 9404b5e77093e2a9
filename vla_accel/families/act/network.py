"""ACT at any size: a ResNet, a transformer encoder over the pixels of its feature maps, and a decoder of one query for
each action.

Same mathematics as lerobot's code (Hugging Face, Apache-2.0; Zhao et al. 2023). Its encoder of actions is for training
alone; at inference the latent is zero, so that the latent's token is a bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.nn.network import Network
from vla_accel.nn.resnet import Camera, ResNet, ResNetConfig

_TEMPERATURE = 10_000.0


@dataclass(frozen=True)
class ActConfig:
    """Architecture and sizes. `state_dim` or `environment_dim` is 0 without such an input."""

    cameras: tuple[Camera, ...] = (Camera(480, 640),)
    state_dim: int = 14
    environment_dim: int = 0
    action_dim: int = 14
    action_horizon: int = 100
    backbone: ResNetConfig = field(default_factory=ResNetConfig)
    width: int = 512
    heads: int = 8
    mlp_dim: int = 3200
    activation: Literal["relu", "gelu"] = "relu"
    encoder_depth: int = 4
    decoder_depth: int = 1
    latent_dim: int = 32

    def __post_init__(self) -> None:
        if not self.vectors:
            raise ConfigError("state_dim, environment_dim: expected one above 0, got 0 and 0")
        if self.width % (4 * self.heads):
            raise ConfigError(f"width: expected a multiple of 4 times the {self.heads} heads, got {self.width}")

    @property
    def num_steps(self) -> int:
        """There is one pass and no denoising."""
        return 1

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        """Name and numbers of the inputs that become one token each, after the latent."""
        sizes = {"encoder_robot_state_input_proj": self.state_dim, "encoder_env_state_input_proj": self.environment_dim}
        return tuple((name, size) for name, size in sizes.items() if size)

    @property
    def vector_dim(self) -> int:
        """Numbers of state and environment together."""
        return self.state_dim + self.environment_dim

    @property
    def feature_sizes(self) -> list[tuple[int, int]]:
        """Height and width of each camera's feature map."""
        return [camera.feature_size for camera in self.cameras]

    @property
    def image_tokens(self) -> int:
        """Tokens of all cameras."""
        return sum(map(math.prod, self.feature_sizes))

    @property
    def tokens(self) -> int:
        """Tokens of the encoder: latent, state, environment, cameras."""
        return 1 + len(self.vectors) + self.image_tokens


def act(**changes: object) -> ActConfig:
    """ACT at the usual size (52 M parameters with the encoder of actions, 34 M without), for ALOHA with one camera."""
    return ActConfig(**changes)  # type: ignore[arg-type]


def pixel_positions(height: int, width: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Return the sinusoidal positions (height * width, dim) float32 of a feature map, row by row."""
    half = dim // 2
    frequency = _TEMPERATURE ** (2 * (torch.arange(half, dtype=torch.float32, device=device) // 2) / half)

    def waves(count: int) -> Tensor:
        numbers = torch.arange(1, count + 1, dtype=torch.float32, device=device)
        at = numbers / (count + 1e-6) * (2 * math.pi)
        angles = at[:, None] / frequency
        return torch.stack((angles[:, 0::2].sin(), angles[:, 1::2].cos()), -1).flatten(1)

    rows, columns = waves(height)[:, None], waves(width)[None]
    return torch.cat((rows.expand(height, width, half), columns.expand(height, width, half)), -1).flatten(0, 1)


class Attention(nn.Module):
    """Attention with torch's names of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries (B, T, W), keys and values (B, S, W), before their projections, to (B, T, W)."""
        parts = zip((queries, keys, values), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        q, k, v = (F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)) for x, weight, bias in parts)
        return self.out_proj(reference.attention(q, k, v, None).flatten(2))


class Layer(nn.Module):
    """A transformer layer whose norms follow the residuals; `cross`: it also attends to the encoder's rows."""

    def __init__(self, config: ActConfig, *, cross: bool) -> None:
        super().__init__()
        width = config.width
        self.activation = F.relu if config.activation == "relu" else F.gelu
        self.self_attn = Attention(width, config.heads)
        self.multihead_attn = Attention(width, config.heads) if cross else None
        self.linear1, self.linear2 = nn.Linear(width, config.mlp_dim), nn.Linear(config.mlp_dim, width)
        self.norms = 3 if cross else 2
        for number in range(1, self.norms + 1):
            self.add_module(f"norm{number}", nn.LayerNorm(width))

    def norm(self, number: int, x: Tensor) -> Tensor:
        return reference.layer_norm(x, self._modules[f"norm{number}"])  # type: ignore[arg-type]

    def forward(
        self, x: Tensor, positions: Tensor, memory: Tensor | None = None, memory_positions: Tensor | None = None
    ) -> Tensor:
        """x (B, T, W); positions (T, W), added to queries and keys, never to values; memory (B, S, W)."""
        placed = x + positions
        x = self.norm(1, x + self.self_attn(placed, placed, x))
        if self.multihead_attn is not None and memory is not None and memory_positions is not None:
            x = self.norm(2, x + self.multihead_attn(x + positions, memory + memory_positions, memory))
        return self.norm(self.norms, x + self.linear2(self.activation(self.linear1(x))))


class Stack(nn.Module):
    """The layers of encoder or decoder; the decoder has a last norm."""

    def __init__(self, config: ActConfig, depth: int, *, decoder: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, cross=decoder) for _ in range(depth))
        if decoder:
            self.norm = nn.LayerNorm(config.width)


class Act(Network):
    """The model. Module names are lerobot's."""

    config: ActConfig

    def __init__(self, config: ActConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.backbone = ResNet(config.backbone)
        self.encoder_img_feat_input_proj = nn.Conv2d(config.backbone.channels, width, 1)
        self.encoder = Stack(config, config.encoder_depth, decoder=False)
        self.decoder = Stack(config, config.decoder_depth, decoder=True)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, width)
        for name, size in config.vectors:
            self.add_module(name, nn.Linear(size, width))
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + len(config.vectors), width)
        self.decoder_pos_embed = nn.Embedding(config.action_horizon, width)
        self.action_head = nn.Linear(width, config.action_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.get_parameter("encoder.layers.0.linear1.weight").dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Norms, positions, and the small products of states and actions."""
        if name.startswith("backbone."):
            return ResNet.kept_wide(name)
        small = ("encoder_robot", "encoder_env", "encoder_latent", "action_head")
        return "norm" in name or "pos_embed" in name or name.startswith(small)

    def positions(self) -> Tensor:
        """Return the positions of the encoder's tokens (tokens, W), in the dtype of the learned ones."""
        learned = self.weight("encoder_1d_feature_pos_embed.weight")
        config = self.config
        maps = (pixel_positions(*size, config.width, learned.device).to(learned.dtype) for size in config.feature_sizes)
        return torch.cat([learned, *maps])

    def embed_images(self, *images: Tensor) -> Tensor:
        """Return the tokens (B, image_tokens, W) of each camera's images, uint8 (B, height, width, 3)."""
        made = []
        for camera, image in zip(self.config.cameras, images, strict=True):
            # By numbers and not by tensors of them: a CUDA graph can copy none from ordinary host memory.
            scales = zip(image.unbind(3), camera.mean, camera.deviation, strict=True)
            wide = self.get_parameter("backbone.bn1.weight").dtype
            channels = [(channel.to(wide) / 255.0 - mean) / deviation for channel, mean, deviation in scales]
            pixels = torch.stack(channels, 1).to(self.dtype)
            made.append(self.encoder_img_feat_input_proj(self.backbone(pixels)).flatten(2).transpose(1, 2))
        return torch.cat(made, 1)

    def embed_vectors(self, vectors: Tensor) -> Tensor:
        """Return the tokens (B, n, W) of the latent, and of state and environment (B, vector_dim)."""
        names, sizes = zip(*self.config.vectors, strict=True)
        latent = self.encoder_latent_input_proj.bias.expand(len(vectors), -1)
        parts = zip(names, vectors.to(latent.dtype).split(sizes, 1), strict=True)
        return torch.stack([latent, *(self.get_submodule(name)(x) for name, x in parts)], 1).to(self.dtype)

    def predict(self, vectors: Tensor, image_tokens: Tensor) -> Tensor:
        """Return normalized actions (B, H, A) float32 of state and environment and of the images' tokens."""
        x = torch.cat((self.embed_vectors(vectors), image_tokens), 1)
        positions, queries = self.positions().to(x.dtype), self.decoder_pos_embed.weight.to(x.dtype)
        for layer in self.encoder.layers:
            x = layer(x, positions)
        y = x.new_zeros(len(x), *queries.shape)
        for layer in self.decoder.layers:
            y = layer(y, queries, x, positions)
        y = reference.layer_norm(y, self.decoder.norm).to(self.action_head.weight.dtype)
        return self.action_head(y).float()
