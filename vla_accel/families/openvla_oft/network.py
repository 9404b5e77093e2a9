"""OpenVLA-OFT at any size: two vision towers, a projector, Llama 2 without a causal mask, and an MLP for the actions.

Same mathematics as openvla-oft's code (MIT) and timm's vision towers (Apache-2.0), with two exact savings: the last
block of each tower, which nothing reads, is left out, and rows of the language model have any order, as only their
positions count. So shorter prompts of a batch are padded at the end.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import Block, Norm
from vla_accel.nn.mlp_head import MlpHead
from vla_accel.nn.network import Network
from vla_accel.nn.reference import RmsNorm, TransformerBlock
from vla_accel.nn.siglip import SiglipConfig, SiglipVision

Channels = tuple[float, float, float]
STOP = 2
"""The token after the rows of the actions, Llama's `</s>`."""


@dataclass(frozen=True)
class TowerConfig(SiglipConfig):
    """Sizes of a tower.

    Attributes:
        registers: Tokens in front of the patches, the class token included; they are dropped at the end.
        scaled: Whether the blocks have LayerScale.
        mean: Of the pixels in [0, 1], by channel.
        deviation: Of the pixels in [0, 1], by channel.
    """

    registers: int = 0
    scaled: bool = False
    mean: Channels = (0.5, 0.5, 0.5)
    deviation: Channels = (0.5, 0.5, 0.5)

    @property
    def block(self) -> Block:
        return replace(super().block, activation=Activation.GELU_ERF, layer_scale=self.scaled)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the language model."""

    width: int = 4096
    depth: int = 32
    mlp_dim: int = 11_008
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    vocab_size: int = 32_064
    eps: float = 1e-6

    @property
    def block(self) -> Block:
        """One block. All rows attend to all."""
        return Block(
            self.width, self.mlp_dim, self.heads, self.kv_heads, self.head_dim, self.eps, Norm.RMS, Activation.SWIGLU
        )


@dataclass(frozen=True)
class OpenVlaOftConfig:
    """Architecture and sizes.

    Attributes:
        dino: DINOv2 with registers.
        siglip: SigLIP.
        projector_dim: Width between the projector's first two products.
        hidden: Width of the head.
        state_dim: Numbers of the state; 0 for a model without one.
        max_token_len: The longest prompt in tokens, those of images left out.
    """

    dino: TowerConfig = field(
        default_factory=lambda: TowerConfig(
            1024, 23, 4096, 16, registers=5, scaled=True,
            mean=(0.484375, 0.455078125, 0.40625), deviation=(0.228515625, 0.2236328125, 0.224609375),
        )
    )  # fmt: skip
    siglip: TowerConfig = field(default_factory=lambda: TowerConfig(1152, 26, 4304, 16))
    language: LlamaConfig = field(default_factory=LlamaConfig)
    projector_dim: int = 8704
    hidden: int = 4096
    state_dim: int = 8
    action_dim: int = 7
    action_horizon: int = 8
    max_token_len: int = 128
    num_steps: int = 1

    def __post_init__(self) -> None:
        if (self.dino.image_size, self.dino.patch_size) != (self.siglip.image_size, self.siglip.patch_size):
            raise ConfigError("dino, siglip: expected the same image_size and patch_size of both towers")

    @property
    def queries(self) -> int:
        """Rows of the language model whose outputs become actions: one for each number."""
        return self.action_horizon * self.action_dim

    def layout(self, views: int, text: int) -> Layout:
        """The rows of so many views and prompt tokens."""
        return Layout(views * self.dino.tokens, int(self.state_dim > 0), self.queries, text)


def openvla_oft(**changes: object) -> OpenVlaOftConfig:
    """OpenVLA-OFT for LIBERO at the published size (7.6 B)."""
    return OpenVlaOftConfig(**changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layout:
    """The rows of the language model: the prompt's first token, image tokens, the state, rows of zeros for the actions,
    the stop token, and the other tokens of the prompt, of which the last ones may be padding.

    The zeros and the stop token have the positions after the prompt.

    Attributes:
        images: Image tokens.
        states: 1 with a state, else 0.
        queries: Rows of zeros.
        text: Tokens of the prompt, its first one included.
    """

    images: int
    states: int
    queries: int
    text: int

    @property
    def zeros(self) -> int:
        """The first row of zeros."""
        return 1 + self.images + self.states

    @property
    def fixed(self) -> int:
        """Rows before the prompt's second token."""
        return self.zeros + self.queries + 1

    @property
    def rows(self) -> int:
        """All rows."""
        return self.fixed + self.text - 1

    def positions(self, lengths: Tensor) -> Tensor:
        """Return the positions (B, rows) int64, of which the first `lengths` (B,) of each row are no padding."""
        rows = torch.arange(self.rows, device=lengths.device)
        late = (rows >= self.zeros) & (rows < self.fixed)
        still = torch.where(rows < self.zeros, rows, rows - self.queries - 1)
        return torch.where(late, rows - self.fixed + lengths[:, None].long(), still)

    def outputs(self, lengths: Tensor) -> Tensor:
        """Return the rows (B, queries) int64 whose outputs become actions: the prompt's last one, and all rows of zeros
        but the last."""
        zeros = torch.arange(self.zeros, self.zeros + self.queries - 1, device=lengths.device)
        return torch.cat((lengths[:, None].long() - 1, zeros.expand(len(lengths), -1)), 1)


class Tower(SiglipVision):
    """pixels (N, 3, S, S), normalized, to the output of the last block (N, tokens, width)."""

    config: TowerConfig

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        del self.post_layernorm
        if config.registers:
            self.class_token = nn.Parameter(torch.zeros(1, config.width))
            self.register_tokens = nn.Parameter(torch.zeros(config.registers - 1, config.width))

    def normalized(self, images: Tensor) -> Tensor:
        """Convert uint8 images (N, S, S, 3) to pixels (N, 3, S, S)."""
        dtype = self.patch_embedding.weight.dtype
        mean, deviation = (
            torch.tensor(x, dtype=dtype, device=images.device) for x in (self.config.mean, self.config.deviation)
        )
        return ((images.to(dtype) / 255.0 - mean) / deviation).permute(0, 3, 1, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        x, first = self.embed(pixels).to(self.dtype), self.config.registers
        if first:
            tokens = torch.cat((self.class_token, self.register_tokens)).to(x.dtype)
            x = torch.cat((tokens.expand(len(x), -1, -1), x), 1)
        for layer in self.layers:
            x = layer(x)
        return x[:, first:]


class Mlp(nn.Module):
    """Products with exact GELU between them: `fc1`, `fc2`, …"""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        for index, (before, after) in enumerate(itertools.pairwise(widths), 1):
            self.add_module(f"fc{index}", nn.Linear(before, after))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.children()
        x = first(x)
        for product in others:
            x = product(F.gelu(x))
        return x


class Llama(nn.Module):
    """The language model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(TransformerBlock(config.block) for _ in range(config.depth))
        self.norm = RmsNorm(config.width, config.eps, offset=0.0)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, T, width) at positions (B, T) to the same shape, normed; mask (B, T, T) bool or None."""
        rope = reference.rope_tables(positions, self.config.head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, mask)
        return self.norm(x)


class OpenVlaOft(Network):
    """The model. Module names are the canonical checkpoint keys."""

    config: OpenVlaOftConfig

    def __init__(self, config: OpenVlaOftConfig) -> None:
        super().__init__()
        self.config, width = config, config.language.width
        self.dino, self.siglip = Tower(config.dino), Tower(config.siglip)
        self.projector = Mlp(config.dino.width + config.siglip.width, config.projector_dim, width, width)
        self.embed = nn.Embedding(config.language.vocab_size, width)
        if config.state_dim:
            self.state = Mlp(config.state_dim, width, width)
        self.language = Llama(config.language)
        self.head = MlpHead(width * config.action_dim, config.hidden, config.action_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the large products."""
        return self.get_parameter("language.layers.0.qkv_proj.weight").dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Patch and position embeddings, and the embedding of the state."""
        return name.startswith("state.") or ".patch_embedding." in name or name.endswith("position_embedding")

    def embed_images(self, images: Tensor) -> Tensor:
        """Convert uint8 images (B, V, S, S, 3) to image tokens (B, V * tokens, width)."""
        views = images.flatten(0, 1)
        features = torch.cat([tower(tower.normalized(views)) for tower in (self.dino, self.siglip)], 2)
        return self.projector(features).unflatten(0, images.shape[:2]).flatten(1, 2)

    def read(self, image_tokens: Tensor, tokens: Tensor, state: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Return normalized actions (B, H, A).

        Args:
            image_tokens: (B, I, width).
            tokens: (B, L) int64.
            state: (B, state_dim) float32, of models with one.
            lengths: (B,) int32, the rows of `Layout` that are no padding; None for all.
        """
        layout = Layout(image_tokens.shape[1], int(state is not None), self.config.queries, tokens.shape[1])
        full = torch.full((len(tokens),), layout.rows, dtype=torch.int32, device=tokens.device)
        x = self.rows(layout, image_tokens, tokens, state)
        real = None if lengths is None else torch.arange(layout.rows, device=x.device) < lengths[:, None]
        mask = None if real is None else real[:, None].expand(-1, layout.rows, -1)
        lengths = full if lengths is None else lengths
        hidden = self.language(x, layout.positions(lengths), mask)
        chosen = hidden.gather(1, layout.outputs(lengths)[..., None].expand(-1, -1, hidden.shape[2]))
        return self.head(chosen.unflatten(1, (self.config.action_horizon, -1)).flatten(2))

    def rows(self, layout: Layout, image_tokens: Tensor, tokens: Tensor, state: Tensor | None) -> Tensor:
        """Return the rows (B, rows, width) of the language model."""
        batch, dtype = len(tokens), image_tokens.dtype
        stop = torch.full((batch, 1), STOP, device=tokens.device)
        first, end, text = (
            self.embed(torch.cat((tokens[:, :1], stop, tokens[:, 1:]), 1)).to(dtype).split((1, 1, layout.text - 1), 1)
        )
        zeros = image_tokens.new_zeros(batch, layout.queries, image_tokens.shape[2])
        wide = self.get_parameter("state.fc1.weight").dtype if self.config.state_dim else dtype
        states = [] if state is None else [self.state(state.to(wide))[:, None].to(dtype)]
        return torch.cat((first, image_tokens, *states, zeros, end, text), 1)
