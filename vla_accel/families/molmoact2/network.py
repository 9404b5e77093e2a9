"""MolmoAct2 at any size: SigLIP's features of two layers, pooled in squares; a language model, in which image tokens
see each other; and an expert that crosses, in each block, to the keys and values of the language layer of its number.

Same mathematics as lerobot 0.6.1's, with the exact savings applied: the last language layer stops after its keys and
values, which are projected once for all steps; the modulations depend on the step alone; masked action columns are not
computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import Attention, Block, Norm
from vla_accel.nn.flow import FlowNetwork
from vla_accel.nn.molmo_vision import MolmoPooling, MolmoVision, MolmoVisionConfig
from vla_accel.nn.reference import PrefixStack, Rope

EPS = 1e-6
"""Of every norm of the expert, which have no weights."""


@dataclass(frozen=True)
class MolmoTextConfig:
    """Sizes of the language model, by default Qwen3 4B's."""

    width: int = 2560
    depth: int = 36
    mlp_dim: int = 9728
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    eps: float = 1e-6
    theta: float = 5e6

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"prefix: expected heads a multiple of kv_heads and an even head_dim, got {self.heads}, "
                f"{self.kv_heads} and {self.head_dim}"
            )

    def block(self) -> Block:
        """One block: q and k are normed by head before they are rotated; the MLP is gated by SiLU."""
        return Block(
            self.width, self.mlp_dim, self.heads, self.kv_heads, self.head_dim, self.eps, Norm.RMS, Activation.SWIGLU,
            Attention.CAUSAL, qk_norm=True,
        )  # fmt: skip

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """cos and sin of positions (...), (..., 1, head_dim / 2) each."""
        return reference.rope_tables(positions, self.head_dim, dtype, self.theta)


@dataclass(frozen=True)
class MolmoExpertConfig:
    """Sizes of the expert. `time_dim`: of the embedding of time."""

    width: int = 768
    mlp_dim: int = 2048
    heads: int = 12
    depth: int = 36
    time_dim: int = 256

    def __post_init__(self) -> None:
        if self.width % self.heads or self.head_dim % 2 or self.time_dim % 2:
            raise ConfigError(
                f"expert: expected width a multiple of heads, even heads and an even time_dim, got {self.width}, "
                f"{self.heads} and {self.time_dim}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Markers:
    """Tokens of an image in a prompt: before it, for each square of patches, after each row of squares (None: none) and
    after it."""

    start: int = 151_936
    patch: int = 151_938
    column: int | None = None
    end: int = 151_937


@dataclass(frozen=True)
class MolmoAct2Config:
    """Architecture and sizes.

    `markers`: tokens of an image; `edge`, `between`: text tokens before the first of several images, and before each
    other one (a single image has one token before it); `hidden`: tokens of a prompt that the expert does not see, by
    their places, negative ones from its end, in ascending order; `action_dim`: columns of an action with its padding;
    `real_actions`: columns that are computed, the first ones; `max_token_len`: the longest prompt in tokens, those of
    images left out.
    """

    vision: MolmoVisionConfig = field(default_factory=MolmoVisionConfig)
    prefix: MolmoTextConfig = field(default_factory=MolmoTextConfig)
    expert: MolmoExpertConfig = field(default_factory=MolmoExpertConfig)
    markers: Markers = field(default_factory=Markers)
    vocab_size: int = 152_064
    edge: int = 4
    between: int = 3
    hidden: tuple[int, ...] = ()
    action_dim: int = 32
    real_actions: int = 32
    action_horizon: int = 30
    max_token_len: int = 180
    num_steps: int = 10

    def __post_init__(self) -> None:
        if self.expert.depth != self.prefix.depth:
            raise ConfigError(
                f"expert.depth: expected the language model's {self.prefix.depth}, got {self.expert.depth}"
            )
        if not 1 <= self.real_actions <= self.action_dim:
            raise ConfigError(f"real_actions: expected 1 to {self.action_dim}, got {self.real_actions}")

    @property
    def image_tokens(self) -> int:
        """Tokens of one view: its squares of patches and the markers around them."""
        return len(self.frame())

    def frame(self) -> list[int]:
        """The tokens of one view."""
        marks, squares = self.markers, self.vision.squares
        row = [marks.patch] * squares + ([] if marks.column is None else [marks.column])
        return [marks.start, *row * squares, marks.end]

    def squares(self) -> list[int]:
        """Where the squares of patches are among the tokens of a view."""
        return [index for index, token in enumerate(self.frame()) if token == self.markers.patch]

    def is_image(self, views: int, tokens: int) -> Tensor:
        """Which of a prompt's `tokens` are images', (tokens,) bool."""
        first, each = self.edge if views > 1 else 1, self.image_tokens
        rows = torch.arange(tokens) - first
        apart = each + self.between
        return (rows >= 0) & (rows < views * apart) & (rows % apart < each)

    def order(self, views: int, text: int) -> Tensor:
        """The prompt out of image tokens and then `text` text tokens, int64 (S,)."""
        image = views * self.image_tokens
        is_image = self.is_image(views, image + text)
        before = is_image.cumsum(0)
        return torch.where(is_image, before - 1, image + torch.arange(image + text) - before)

    def prefix_tokens(self, views: int, tokens: int) -> int:
        """Tokens of a prompt that the expert sees, of so many views and text tokens."""
        return views * self.image_tokens + tokens - len(self.hidden)

    def seen(self, lengths: Tensor, tokens: int) -> Tensor:
        """Which of a prompt's `tokens` the expert sees, int64 (B, tokens - hidden), if the first `lengths` (B,) of
        these are real."""
        rows = torch.arange(tokens - len(self.hidden), device=lengths.device).expand(len(lengths), -1)
        for index in self.hidden:
            at = lengths[:, None] + len(self.hidden) + index if index < 0 else index
            rows = rows + (rows >= at)
        return rows.clamp(max=tokens - 1)


def molmoact2(**changes: Any) -> MolmoAct2Config:
    """MolmoAct2 at the published size (5.4 B), for LIBERO."""
    return MolmoAct2Config(**{"action_horizon": 10, "real_actions": 7, **changes})


class MolmoLanguage(PrefixStack):
    """The language model, whose image tokens see each other."""

    def __init__(self, config: MolmoTextConfig) -> None:
        super().__init__(config.block(), config.depth)
        self.config = config

    def rope(self, x: Tensor, positions: Tensor) -> Rope:
        return self.config.rope(positions, x.dtype)


class MolmoContext(nn.Module):
    """Keys and values of every language layer (n, B, S, kv_heads * d) to those of the expert (n, B, S, heads, d): one
    projection each, for all layers."""

    def __init__(self, config: MolmoAct2Config) -> None:
        super().__init__()
        own, self.heads = config.prefix.kv_heads * config.prefix.head_dim, config.expert.heads
        self.key_proj = nn.Linear(own, config.expert.width, bias=False)
        self.value_proj = nn.Linear(own, config.expert.width, bias=False)

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys = _normed(self.key_proj(keys)).unflatten(-1, (self.heads, -1))
        return _normed(keys), _normed(self.value_proj(values)).unflatten(-1, (self.heads, -1))


class MolmoBlock(nn.Module):
    """A block of the expert: attention to the actions, attention to the prompt, and a gated MLP. Each has a modulated
    norm and a gate; `dense` makes their nine rows, shift, scale and gate three times, from the time."""

    def __init__(self, config: MolmoExpertConfig) -> None:
        super().__init__()
        self.heads, width = config.heads, config.width
        self.dense = nn.Linear(width, 9 * width)
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.cross_q, self.cross_out = nn.Linear(width, width), nn.Linear(width, width)
        self.gate_up_proj = nn.Linear(width, 2 * config.mlp_dim)
        self.down_proj = nn.Linear(config.mlp_dim, width)

    def forward(
        self, x: Tensor, rope: Rope, keys: Tensor, values: Tensor, mask: Tensor | None, rows: Tensor
    ) -> Tensor:  # fmt: skip
        """x (B, T, W) to the same shape. keys, values (B, S, heads, d); mask (B, T, S) bool or None; rows (9, W)."""
        q, k, v = self.qkv_proj(reference.adarms(x, rows[1], rows[0], EPS)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (reference.apply_rope(_normed(h), *rope).to(v.dtype) for h in (q, k))
        x = reference.gated_residual(x, self.o_proj(reference.attention(q, k, v, None).flatten(2)), rows[2])
        q = _normed(self.cross_q(reference.adarms(x, rows[4], rows[3], EPS)).unflatten(-1, (self.heads, -1)))
        attended = reference.attention(q, keys, values, mask).flatten(2)
        x = reference.gated_residual(x, self.cross_out(attended), rows[5])
        hidden = reference.activate(self.gate_up_proj(reference.adarms(x, rows[7], rows[6], EPS)), Activation.SWIGLU)
        return reference.gated_residual(x, self.down_proj(hidden), rows[8])


class MolmoExpert(nn.Module):
    """The expert. `dense` makes the two rows of its last norm, shift and scale."""

    def __init__(self, config: MolmoExpertConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(MolmoBlock(config) for _ in range(config.depth))
        self.dense = nn.Linear(config.width, 2 * config.width)

    @property
    def blocks(self) -> list[MolmoBlock]:
        return list(self.layers)  # type: ignore[arg-type]

    def dense_names(self) -> list[str]:
        """What makes the rows of each block, and those of the last norm."""
        return [*(f"layers.{index}.dense" for index in range(len(self.layers))), "dense"]


class MolmoAct2(FlowNetwork):
    """The model. Module names are the canonical checkpoint keys."""

    config: MolmoAct2Config

    def __init__(self, config: MolmoAct2Config) -> None:
        super().__init__()
        self.config = config
        width = config.expert.width
        self.vision = MolmoVision(config.vision)  # type: ignore[assignment]
        self.pooling = MolmoPooling(config.vision, config.prefix.width)
        self.embed = nn.Embedding(config.vocab_size, config.prefix.width)
        self.prefix = MolmoLanguage(config.prefix)
        self.context = MolmoContext(config)
        self.expert = MolmoExpert(config.expert)
        self.time_mlp_in, self.time_mlp_out = nn.Linear(config.expert.time_dim, width), nn.Linear(width, width)
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)

    @staticmethod
    def kept_wide(name: str) -> bool:
        """The embedding of patches, and projections of actions and time."""
        return name.startswith(("vision.patch_embedding", "vision.position_embedding", "action_", "time_"))

    @property
    def cache_heads(self) -> tuple[int, int]:
        return self.config.expert.heads, self.config.expert.head_dim

    # -- once an observation --------------------------------------------------------------------------------------

    def project(self, features: Tensor) -> Tensor:
        """Features of squares of patches (N, T, 4, features) as the tokens of a view (N, image_tokens, width): its
        markers, to whose embeddings the features are added."""
        frame, pooled = torch.tensor(self.config.frame(), device=features.device), self.pooling(features)
        tokens = self.embed(frame).to(features.dtype)
        # Without a scatter, which TensorRT-RTX lacks.
        is_patch = frame == self.config.markers.patch
        own = pooled[:, (is_patch.cumsum(0) - 1).clamp(min=0)]
        return torch.where(is_patch[:, None], tokens + own, tokens)

    def prefix_rows(self, image_tokens: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `PrefixNetwork.prefix_rows`; the prompt has no `state` but its words."""
        del state
        views = image_tokens.shape[1] // self.config.image_tokens
        order = self.config.order(views, tokens.shape[1]).to(image_tokens.device)
        x = torch.cat((image_tokens, self.embed(tokens).to(image_tokens.dtype)), 1)[:, order]
        is_image = self.config.is_image(views, x.shape[1]).to(x.device)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        seen = seen | (is_image[:, None] & is_image)
        return x, torch.arange(x.shape[1], device=x.device).expand(len(x), -1), seen.expand(len(x), -1, -1)

    def keys_values(self, image_tokens: Tensor, tokens: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (depth, B, S, heads, head_dim) of the expert. Padding at the end of a prompt changes nothing
        before it: `rest`, the lengths, only tells where a prompt ends."""
        keys, values = self.prefix(*self.prefix_rows(image_tokens, tokens, image_tokens))
        if self.config.hidden:
            count = keys.shape[2]
            full = torch.full((len(tokens),), count - len(self.config.hidden), device=tokens.device)
            rows = self.config.seen(rest[0] if rest else full, count)[None, :, :, None, None]
            keys, values = (x.gather(2, rows.expand(len(x), -1, -1, *x.shape[3:])) for x in (keys, values))
        return self.context(keys.flatten(3), values.flatten(3))

    def prefix_parts(self) -> list[str]:
        last = f"prefix.layers.{self.config.prefix.depth - 1}.k_norm"
        return [*super().prefix_parts(), last, last.replace("k_norm", "q_norm"), "context"]

    # -- once a step ----------------------------------------------------------------------------------------------

    @staticmethod
    def uniform_times(num_steps: int, dtype: torch.dtype) -> Tensor:
        """As lerobot divides them."""
        return (1.0 - torch.arange(num_steps, dtype=torch.float64) / num_steps).to(dtype)

    def conditioning(self, times: Tensor) -> tuple[Tensor, Tensor | None]:
        """The embedding of each time (n, W), and the rows of every block and of the last norm (n, 9 * depth + 2, W).
        Weights that were absent are removed again."""
        half = self.config.expert.time_dim // 2
        frequency = torch.exp(torch.arange(half, device=times.device) * (-math.log(10_000.0) / max(half - 1, 1)))
        angles = (1.0 - times.double()).to(times.dtype)[:, None] * frequency
        with self.present("time_mlp_in", "time_mlp_out"):
            embedded = torch.cat((angles.sin(), angles.cos()), -1).to(self.time_mlp_in.weight.dtype)
            embedding = self.time_mlp_out(F.silu(self.time_mlp_in(embedded)))
        rows = []
        for name in self.expert.dense_names():
            with self.present(f"expert.{name}"):
                dense: Any = self.expert.get_submodule(name)
                rows.append(
                    dense(F.silu(embedding).to(dense.weight.dtype)).unflatten(-1, (-1, self.config.expert.width))
                )
        return embedding, torch.cat(rows, 1)

    def velocity(
        self, noisy: Tensor, time_embedding: Tensor, modulations: Tensor | None, state: Tensor | None, keys: Tensor,
        values: Tensor, prefix_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `FlowNetwork.velocity`: the model's own velocity is towards the actions. Columns of padding stay as they
        are."""
        del time_embedding, state
        assert modulations is not None
        count, weight = self.config.real_actions, self.action_in_proj.weight
        x = F.linear(noisy[..., :count].to(weight.dtype), weight[:, :count], self.action_in_proj.bias).to(self.dtype)
        positions = torch.arange(x.shape[1], device=x.device)
        rope = reference.rope_tables(positions, self.config.expert.head_dim, x.dtype)
        mask = None if prefix_mask is None else prefix_mask[:, None].expand(-1, x.shape[1], -1)
        for index, block in enumerate(self.expert.blocks):
            x = block(x, rope, keys[index], values[index], mask, modulations[9 * index : 9 * index + 9])
        x = reference.adarms(x, modulations[-1], modulations[-2], EPS).to(self.action_out_proj.weight.dtype)
        found = F.linear(x, self.action_out_proj.weight[:count], self.action_out_proj.bias[:count])
        return F.pad(-found, (0, self.config.action_dim - count))


def _normed(x: Tensor) -> Tensor:
    """RMSNorm over the last axis, without weights."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)
