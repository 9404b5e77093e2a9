"""SmolVLA at any size: one definition for inference and for training.

Same mathematics as lerobot's code (Hugging Face, Apache-2.0; Shukor et al. 2025), with exact savings: q, k, v and gate,
up are single products; the last prefix layer stops after its keys and values; a crossing layer's projections of the
prefix's keys and values are computed once for all steps, and so is the time's half of the action embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.nn.block import Attention
from vla_accel.nn.flow import FlowNetwork, sinusoidal_embedding
from vla_accel.nn.gemma import SmolLmConfig
from vla_accel.nn.reference import PrefixStack, RmsNorm, TransformerBlock
from vla_accel.nn.siglip import SiglipConfig, SiglipVision


def expert_mlp_dim(width: int) -> int:
    """Hidden width of an expert's MLP: int(2/3 width) · 4, rounded up to a multiple of 256 (lerobot)."""
    return 256 * -(-4 * int(2 * width / 3) // 256)


@dataclass(frozen=True)
class SmolVlaConfig:
    """Architecture and sizes.

    `shuffle`: patches along each side of the square that becomes one image token; `self_every`: every so many layers,
    from the first on, the actions attend to themselves, too, and 0 means in none; `state_dim`, `action_dim` and
    `action_horizon` are the model's own (padded) sizes; `max_token_len` is the longest prompt in tokens. `num_steps`:
    denoising steps, unless a policy's configuration has others.
    """

    vision: SiglipConfig = field(default_factory=lambda: SiglipConfig(768, 12, 3072, 12, 512, 16))
    prefix: SmolLmConfig = field(default_factory=SmolLmConfig)
    expert: SmolLmConfig = field(default_factory=lambda: SmolLmConfig(width=720, mlp_dim=2048))
    vocab_size: int = 49_280
    shuffle: int = 4
    self_every: int = 2
    state_dim: int = 32
    action_dim: int = 32
    action_horizon: int = 50
    max_token_len: int = 48
    num_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("depth", "heads", "kv_heads", "head_dim"):
            a, b = getattr(self.prefix, name), getattr(self.expert, name)
            if a != b:
                raise ConfigError(f"prefix.{name} {a} and expert.{name} {b} must be equal: they share attention")
        if (self.vision.image_size // self.vision.patch_size) % self.shuffle:
            raise ConfigError(f"shuffle {self.shuffle} must divide the patches along a side of {self.vision}")

    @property
    def image_tokens(self) -> int:
        """Prefix tokens of one view."""
        return self.vision.tokens // self.shuffle**2

    @property
    def image_scale(self) -> float:
        """What image tokens are multiplied by on their way into the prefix."""
        return math.sqrt(self.prefix.width)

    def prefix_tokens(self, views: int, tokens: int) -> int:
        """Tokens of a prefix of so many views and prompt tokens, and the state."""
        return views * self.image_tokens + tokens + 1

    def crosses(self, layer: int) -> bool:
        """Whether the actions attend in this layer to the prefix only."""
        return self.self_every < 1 or layer % self.self_every > 0


def smolvla(**changes: object) -> SmolVlaConfig:
    """SmolVLA at the published size (450 M: SigLIP B/16 at 512 px, half of SmolLM2 360M, an expert 3/4 as wide)."""
    return SmolVlaConfig(**changes)  # type: ignore[arg-type]


def smolvla_demo(**changes: object) -> SmolVlaConfig:
    """SmolVLA small enough to ship (about 10 M parameters): the π0.5 demo's tower, a token for four of its patches."""
    sizes = {"depth": 6, "heads": 4, "kv_heads": 2}
    small: dict[str, object] = {
        "vision": SiglipConfig(width=256, depth=5, mlp_dim=1024, heads=4, patch_size=16),
        "prefix": SmolLmConfig(width=256, mlp_dim=512, **sizes),
        "expert": SmolLmConfig(width=128, mlp_dim=expert_mlp_dim(128), **sizes),
        "vocab_size": 512,
        "shuffle": 2,
        "state_dim": 8,
        "action_dim": 8,
        "action_horizon": 10,
    }
    return SmolVlaConfig(**{**small, **changes})  # type: ignore[arg-type]


class CrossLayer(TransformerBlock):
    """A block of the expert that attends to projections of the prefix's own keys and values: `key_proj` of the rotated
    keys, all heads of a token in one row, and `value_proj` of the values."""

    def __init__(self, config: SmolLmConfig) -> None:
        super().__init__(config.block(attention=Attention.CROSS))
        own = config.kv_heads * config.head_dim
        self.key_proj = nn.Linear(own, own, bias=False)
        self.value_proj = nn.Linear(own, own, bias=False)

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, T, width) to rotated q (B, T, heads, d)."""
        q = self.q_proj(self.input_layernorm(x)).unflatten(-1, (-1, self.block.head_dim))
        return reference.apply_rope(q, *rope).to(q.dtype)

    def projected(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix's keys and values (B, S, kv_heads, d) as this layer attends to them, in their dtype."""

        def project(x: Tensor, layer: nn.Linear) -> Tensor:
            return layer(x.flatten(2).to(layer.weight.dtype)).to(x.dtype).view_as(x)

        return project(keys, self.key_proj), project(values, self.value_proj)


class SmolVlaExpert(nn.Module):
    """The action expert: layers that attend to the prefix and causally to the actions, and layers that only cross."""

    def __init__(self, config: SmolVlaConfig) -> None:
        super().__init__()
        expert = config.expert
        self.head_dim = expert.head_dim
        self.layers = nn.ModuleList(
            CrossLayer(expert) if config.crosses(i) else TransformerBlock(expert.block()) for i in range(expert.depth)
        )
        self.norm = RmsNorm(expert.width, expert.eps, offset=0.0)

    def projected(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The prefix's keys and values of every layer as the expert reads them, (depth, B, S, kv_heads, d) each."""
        pairs = [
            layer.projected(k, v) if isinstance(layer, CrossLayer) else (k, v)
            for layer, k, v in zip(self.layers, keys, values, strict=True)
        ]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def forward(self, x: Tensor, start: Tensor, keys: Tensor, values: Tensor, prefix_mask: Tensor | None) -> Tensor:
        """Suffix tokens through the stack and the final norm.

        Args: x (B, T, width); start (B,): position of the first action where actions attend to themselves (where they
        cross it is 0); keys, values as `projected` gives them; prefix_mask (B, S) bool or None. Returns (B, T, width).
        """
        batch, tokens = x.shape[:2]
        offset, kind = torch.arange(tokens, device=x.device), torch.promote_types(x.dtype, torch.float32)
        own = reference.rope_tables(start[:, None] + offset, self.head_dim, kind)
        cross = reference.rope_tables(offset.expand(batch, tokens), self.head_dim, kind)
        outer = None if prefix_mask is None else prefix_mask[:, None].expand(batch, tokens, -1)
        everything = outer if outer is not None else x.new_ones(batch, tokens, keys.shape[2], dtype=torch.bool)
        causal = offset[:, None] >= offset
        whole = torch.cat((everything, causal.expand(batch, tokens, tokens)), dim=2)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, TransformerBlock)
            if isinstance(layer, CrossLayer):
                attended = reference.attention(layer.queries(x, cross), keys[index], values[index], outer)
            else:
                q, k, v, _ = layer.qkv(x, own)
                k, v = torch.cat((keys[index], k), dim=1), torch.cat((values[index], v), dim=1)
                attended = reference.attention(q, k, v, whole)
            x = layer.finish(x, attended)
        return self.norm(x)


class SmolVla(FlowNetwork):
    """The model. Module names are the canonical checkpoint keys."""

    config: SmolVlaConfig
    state_in_prefix = True

    def __init__(self, config: SmolVlaConfig) -> None:
        super().__init__()
        self.config = config
        prefix, width = config.prefix, config.expert.width
        self.vision = SiglipVision(config.vision)
        self.projector = nn.Linear(config.vision.width * config.shuffle**2, prefix.width, bias=False)
        self.embed = nn.Embedding(config.vocab_size, prefix.width)
        self.prefix = PrefixStack(prefix.block(), prefix.depth)
        self.expert = SmolVlaExpert(config)
        self.state_proj = nn.Linear(config.state_dim, prefix.width)
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    @staticmethod
    def kept_wide(name: str) -> bool:
        """What lerobot keeps in float32: the small projections, and those of the prefix's keys and values."""
        return name.startswith(("action_", "state_")) or ".key_proj." in name or ".value_proj." in name

    # -- prefix ---------------------------------------------------------------------------------------------------

    def project(self, features: Tensor) -> Tensor:
        """Squares of `shuffle` by `shuffle` patches, row by row, become a token each, times √width."""
        config = self.config
        side = config.vision.image_size // config.vision.patch_size // config.shuffle
        squares = features.unflatten(1, (side, config.shuffle, side, config.shuffle)).transpose(2, 3)
        tokens = self.projector(squares.reshape(features.shape[0], side * side, -1))
        return tokens * config.image_scale

    def prefix_cache(
        self, image_tokens: Tensor, tokens: Tensor, state: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix as the expert reads them, each (depth, B, S, kv_heads, head_dim), S = image
        tokens + L + 1.

        Args: image_tokens (B, I, width); tokens (B, L) int64; state (B, state_dim); lengths (B,): real tokens of each
        row, the state included, None = all. The state comes after the last real token of the prompt; rows
        behind it are masked. Images and prompt attend to each other, the state attends to all.
        """
        keys, values, _ = self.prefix.run(*self.prefix_rows(image_tokens, tokens, state, lengths))
        return self.expert.projected(keys, values)

    def keys_values(self, image_tokens: Tensor, tokens: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return self.prefix_cache(image_tokens, tokens, *rest)

    def prefix_parts(self) -> list[str]:
        crossing = [name for name in self.names("expert") if ".key_proj." in name or ".value_proj." in name]
        return [*super().prefix_parts(), "state_proj", *crossing]

    def prefix_rows(
        self, image_tokens: Tensor, tokens: Tensor, state: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `prefix_cache`, what its stack takes: (B, S, width), positions (B, S), and who sees whom (B, S, S)."""
        state_token = self.state_proj(state.to(self.state_proj.weight.dtype))[:, None].to(image_tokens.dtype)
        x = torch.cat((image_tokens, self.embed_tokens(tokens).to(image_tokens.dtype), state_token), dim=1)
        batch, total = x.shape[:2]
        place = torch.arange(total, device=x.device)
        if lengths is None:
            last = torch.full((batch, 1), total - 1, device=x.device)
        else:
            last = lengths[:, None] - 1
            x = torch.where((place == last)[..., None], state_token, x)
        allowed = place < (last + (place >= last))[..., None]
        return x, place.expand(batch, total), allowed

    # -- suffix ---------------------------------------------------------------------------------------------------

    @staticmethod
    def uniform_times(num_steps: int, dtype: torch.dtype) -> Tensor:
        """1 - k / n, each rounded once, as lerobot does."""
        return torch.tensor([1.0 + step * (-1.0 / num_steps) for step in range(num_steps)], dtype=dtype)

    def conditioning(self, times: Tensor) -> tuple[Tensor, None]:
        """The time's half of the first layer of the time MLP, and its bias: times (n,) to (n, width)."""
        width = self.config.expert.width
        with self.present("action_time_mlp_in"):
            layer = self.action_time_mlp_in
            embedding = sinusoidal_embedding(times, width).to(layer.weight.dtype)
            return F.linear(embedding, layer.weight[:, width:], layer.bias), None

    def velocity(
        self, noisy: Tensor, time_embedding: Tensor, modulations: Tensor | None, state: Tensor | None, keys: Tensor,
        values: Tensor, prefix_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The flow's velocity; norms are plain and the state is in the prefix, so both are None."""
        actions = self.action_in_proj(noisy.to(self.action_in_proj.weight.dtype))
        from_actions = self.action_time_mlp_in.weight[:, : self.config.expert.width]
        hidden = F.silu(F.linear(actions, from_actions) + time_embedding)
        x = self.action_time_mlp_out(hidden).to(self.dtype)
        start = (
            x.new_full((x.shape[0],), keys.shape[2], dtype=torch.int64) if prefix_mask is None else prefix_mask.sum(1)
        )
        x = self.expert(x, start, keys, values, prefix_mask)
        return self.action_out_proj(x.to(self.action_out_proj.weight.dtype))
