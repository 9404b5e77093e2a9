"""GR00T's action head: vision-language attention, and a diffusion transformer that reads its result.

Knows nothing about images or language but which tokens are which. Of the weights that a checkpoint has for every
embodiment it has one embodiment's. Source of the mathematics: lerobot 0.6.1's port of Isaac-GR00T (both Apache-2.0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.fp8 import Products
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import VIT, Attention, Block, Norm, vit_block
from vla_accel.nn.flow import Schedule
from vla_accel.nn.reference import TransformerBlock

Source = Literal["text", "image", "all", "self"]
"""What a block of the diffusion transformer attends to: text tokens, image tokens, both, or state and actions."""
Cache = Mapping[Source, tuple[Tensor, Tensor]]
"""Keys and values by source, each (blocks, B, tokens, heads, head_dim): what every step reads of an observation's vision
and language. Of "all", the image tokens come first."""

QUANTISED = {"denoise": {"native": Products(("qkv_proj", "q_proj", "out_proj", "fc1", "fc2"), activations=False)}}
"""By component, then engine. All other products are computed in the policy's precision."""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes. `vl_*`: of the vision-language attention, whose width is the language model's; `hidden`: of the state's
    projection, of the transformer's output and of what decodes it; `text_every`: of so many blocks that look outside,
    one looks at text and the others at images (0: all look at both); `future`: learned rows between state and actions;
    `longest_chunk`: position embeddings there are; `buckets` of the flow's time."""

    vl_width: int = 2048
    vl_depth: int = 4
    vl_heads: int = 32
    vl_mlp_dim: int = 8192
    width: int = 1536
    depth: int = 32
    heads: int = 32
    head_dim: int = 48
    mlp_dim: int = 6144
    hidden: int = 1024
    text_every: int = 2
    future: int = 0
    longest_chunk: int = 1024
    buckets: int = 1000
    eps: float = 1e-5
    final_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.heads * self.head_dim != self.width:
            raise ConfigError(f"head.width: expected {self.heads} heads of {self.head_dim}, got {self.width}")
        if self.width % 2 or min(self.text_every, self.future) < 0:
            raise ConfigError(
                f"head: expected an even width, text_every and future from 0, got {self.width}, {self.text_every}, "
                f"{self.future}"
            )

    def source(self, index: int) -> Source:
        """What block `index` attends to."""
        if index % 2:
            return "self"
        if not self.text_every:
            return "all"
        return "text" if index % (2 * self.text_every) == 0 else "image"

    def block(self, source: Source) -> Block:
        """A block of the diffusion transformer."""
        attention = Attention.SELF if source == "self" else Attention.CROSS
        return Block(
            self.width, self.mlp_dim, self.heads, self.heads, self.head_dim, self.eps, Norm.ADAPTIVE_LAYER,
            Activation.GELU, attention, bias=True, rope=False, names=VIT,
        )  # fmt: skip

    @property
    def vl_block(self) -> Block:
        """A block of the vision-language attention."""
        return vit_block(self.vl_width, self.vl_heads, self.vl_mlp_dim, self.eps)

    @property
    def sources(self) -> tuple[Source, ...]:
        """What the blocks that look outside attend to."""
        return ("text", "image") if self.text_every else ("all",)

    @property
    def cached(self) -> dict[str, Source]:
        """The names of the cache's tensors, in order, with their sources."""
        return {f"{source}_{what}": source for source in self.sources for what in ("keys", "values")}

    def blocks(self, source: Source) -> list[int]:
        """The blocks of a source."""
        return [i for i in range(self.depth) if self.source(i) == source]


@dataclass(frozen=True)
class StepConstants:
    """All that depends on the step alone, a row a step: `time` (n, W), the time's share of the second action product
    with its bias; `scales`, `shifts` (n, depth, W) of the blocks' norms; `final_scale`, `final_shift` (n, W)."""

    time: Tensor
    scales: Tensor
    shifts: Tensor
    final_scale: Tensor
    final_shift: Tensor


class DitLayer(TransformerBlock):
    """One block: an adaptive norm before attention, a norm without weights before the MLP.

    A block with another source than its own rows takes keys and values from `kv_proj`, once for all steps.
    """

    def __init__(self, config: HeadConfig, source: Source) -> None:
        super().__init__(config.block(source))
        self.source: Source = source
        if source != "self":
            self.kv_proj = nn.Linear(config.vl_width, 2 * config.width)

    def keys_values(self, features: Tensor) -> Tensor:
        """(B, S, vl_width) to keys and values (2, B, S, heads, head_dim)."""
        both = self.kv_proj(features).unflatten(-1, (2, self.block.heads, -1))
        return both.permute(2, 0, 1, 3, 4)

    def forward(  # type: ignore[override]
        self, x: Tensor, scale: Tensor, shift: Tensor, outside: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> Tensor:
        """x (B, T, width) to the same shape.

        Args:
            scale, shift: (width,), of the adaptive norm.
            outside: keys and values (B, S, heads, head_dim) of another source.
            mask: (B, T, S) bool of them, or None.
        """
        b = self.block
        normed = reference.adaptive_layer_norm(x, scale, shift, b.eps)
        if outside is None:
            q, k, v = self.qkv_proj(normed).unflatten(-1, (3, b.heads, b.head_dim)).unbind(2)
        else:
            q = self.q_proj(normed).unflatten(-1, (b.heads, b.head_dim))
            k, v = outside
        return self.finish(x, reference.attention(q, k, v, mask))


class GrootHead(nn.Module):
    """The head of one embodiment."""

    def __init__(self, config: HeadConfig, state_dim: int, action_dim: int) -> None:
        super().__init__()
        self.config = config
        width, hidden = config.width, config.hidden
        self.vl_norm = nn.LayerNorm(config.vl_width, eps=config.eps)
        self.vl_layers = nn.ModuleList(TransformerBlock(config.vl_block) for _ in range(config.vl_depth))
        self.state_in, self.state_out = nn.Linear(state_dim, hidden), nn.Linear(hidden, width)
        self.action_in = nn.Linear(action_dim, width)
        self.action_mix, self.action_out = nn.Linear(2 * width, width), nn.Linear(width, width)
        if config.future:
            self.future_tokens = nn.Parameter(torch.zeros(config.future, width))
        self.action_positions = nn.Parameter(torch.zeros(config.longest_chunk, width))
        self.time_in, self.time_out = nn.Linear(256, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(DitLayer(config, config.source(i)) for i in range(config.depth))
        self.final_modulation = nn.Linear(width, 2 * width)
        self.out_proj = nn.Linear(width, hidden)
        self.decode_in, self.decode_out = nn.Linear(hidden, hidden), nn.Linear(hidden, action_dim)

    # -- once an observation --------------------------------------------------------------------------------------

    def features(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        """The language model's output (B, S, vl_width) through norm and attention, same shape. `real` (B, S) bool:
        tokens that are no padding, None: all. Padding is not attended to: a row is what it would be alone."""
        x = reference.layer_norm(hidden, self.vl_norm)
        mask = None if real is None else real[:, None].expand(-1, x.shape[1], -1)
        for layer in self.vl_layers:
            x = layer(x, mask=mask)
        return x

    def cache(self, text: Tensor, image: Tensor) -> Cache:
        """Keys and values of features of text (B, L, vl_width) and image tokens (B, I, vl_width)."""

        def of(source: Source, features: Tensor) -> tuple[Tensor, Tensor]:
            both = torch.stack([self._layer(i).keys_values(features) for i in self.config.blocks(source)], 1)
            return both[0], both[1]

        features: dict[Source, Tensor] = {"text": text, "image": image}
        if self.config.sources == ("all",):
            features = {"all": torch.cat((image, text), 1)}
        return {source: of(source, value) for source, value in features.items()}

    def state_token(self, state: Tensor) -> Tensor:
        """(B, state_dim) to (B, width)."""
        return self.state_out(F.relu(self.state_in(state.to(self.state_in.weight.dtype))))

    # -- once a step ----------------------------------------------------------------------------------------------

    def times(self, schedule: Schedule) -> list[int]:
        """The times of the evaluations, from 0 (noise), in buckets."""
        if schedule.is_uniform:
            return [int(step / schedule.steps * self.config.buckets) for step in range(schedule.steps)]
        # Rounded before the fraction is dropped: 1 - 0.9 is just below 0.1.
        return [int(round((1.0 - time) * self.config.buckets, 3)) for time in schedule.times[:-1]]

    def constants(self, schedule: Schedule) -> StepConstants:
        """Compute what depends on the times of the steps alone."""
        config, device = self.config, self.time_in.weight.device
        times = torch.tensor(self.times(schedule), device=device).float()
        # Two embeddings of one time: cosine first for the norms, sine first for the actions.
        wide = self.time_in.weight.dtype
        temporal = _angles(times, 128, 127)
        embedded = self.time_out(F.silu(self.time_in(torch.cat((temporal.cos(), temporal.sin()), -1).to(wide))))
        active = F.silu(embedded)
        rows = [m(active.to(m.weight.dtype)) for m in (layer.modulation for layer in self._layers())]
        scales, shifts = torch.stack(rows, 1).chunk(2, -1)
        final_shift, final_scale = self.final_modulation(active.to(self.final_modulation.weight.dtype)).chunk(2, -1)
        half = config.width // 2
        angles = _angles(times, half, half)
        tau = torch.cat((angles.sin(), angles.cos()), -1).to(self.action_mix.weight.dtype)
        time = F.linear(tau, self.action_mix.weight[:, config.width :], self.action_mix.bias)
        return StepConstants(time, scales, shifts, final_scale, final_shift)

    def velocity(
        self, noisy: Tensor, constants: StepConstants, step: int, state: Tensor, cache: Cache,
        real: Mapping[str, Tensor],
    ) -> Tensor:  # fmt: skip
        """The flow's velocity at `noisy` (B, H, action_dim), same shape, in the projections' dtype. state (B, width);
        `real` (B, tokens) bool: the tokens of a source that are no padding; of sources without an entry, all."""
        mixed = self.action_in(noisy.to(self.action_in.weight.dtype))
        mixed = F.linear(mixed, self.action_mix.weight[:, : self.config.width]) + constants.time[step]
        tokens = self.action_out(F.silu(mixed)) + self.action_positions[: noisy.shape[1]]
        future = [self.future_tokens.expand(len(noisy), -1, -1)] if self.config.future else []
        x = torch.cat((state[:, None], *future, tokens), 1).to(self._layer(0).fc1.weight.dtype)
        masks = {source: mask[:, None].expand(-1, x.shape[1], -1) for source, mask in real.items()}
        seen: dict[Source, int] = dict.fromkeys(cache, 0)
        for index, layer in enumerate(self._layers()):
            outside, mask = None, masks.get(layer.source)
            if layer.source != "self":
                keys, values = cache[layer.source]
                outside = keys[seen[layer.source]], values[seen[layer.source]]
                seen[layer.source] += 1
            x = layer(x, constants.scales[step, index], constants.shifts[step, index], outside, mask)
        x = x[:, -noisy.shape[1] :]
        x = reference.adaptive_layer_norm(
            x, constants.final_scale[step], constants.final_shift[step], self.config.final_eps
        )  # fmt: skip
        x = self.out_proj(x).to(self.decode_in.weight.dtype)
        return self.decode_out(F.relu(self.decode_in(x)))

    def _layers(self) -> list[DitLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _layer(self, index: int) -> DitLayer:
        layer = self.layers[index]
        assert isinstance(layer, DitLayer)
        return layer


def _angles(times: Tensor, count: int, over: int) -> Tensor:
    """times (n,) at frequencies 10000^(-i / over), i < count: (n, count) float32."""
    exponent = torch.arange(count, dtype=torch.float32, device=times.device) * (-math.log(10_000.0) / over)
    return times[:, None] * exponent.exp()
