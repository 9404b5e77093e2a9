"""The diffusion transformer of GR00T, VLA-JEPA and starVLA: a flow of actions that reads the tokens of vision and
language.

Its only input from vision and language is their tokens, and which are which. Of weights that a checkpoint stores for
each embodiment, it holds those of one. Source of the mathematics: lerobot 0.6.1's port of Isaac-GR00T (both
Apache-2.0).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.fp8 import Products
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import VIT, Attention, Block, Norm
from vla_accel.nn.flow import Schedule
from vla_accel.nn.network import Network
from vla_accel.nn.reference import TransformerBlock

Source = Literal["text", "image", "all", "self"]
"""What a block of the diffusion transformer attends to: text tokens, image tokens, both, or its own rows."""

QUANTISED = {"denoise": {"native": Products(("qkv_proj", "q_proj", "out_proj", "fc1", "fc2"), activations=False)}}
"""By component, then engine. All other products are computed in the policy's precision."""


_WIDE = (
    "vision.patch_", "vision.position_", "head.state_", "head.action_", "head.future", "head.time_", "head.decode_",
)  # fmt: skip


@dataclass(frozen=True)
class DitConfig:
    """Sizes.

    `vl_width`: of the tokens of vision and language; `hidden`: of the state's projection, of the transformer's output
    and of what decodes it; `text_every`: of so many blocks that look outside, one looks at text and the others at
    images, 0: each looks at both; `state`: whether the first row is the state; `final`: whether a norm and a product
    come before what decodes the rows; `future`: learned rows before the actions; `longest_chunk`: the number of
    position embeddings; `buckets` of the flow's time.
    """

    vl_width: int = 2048
    width: int = 1536
    depth: int = 32
    heads: int = 32
    head_dim: int = 48
    mlp_dim: int = 6144
    hidden: int = 1024
    text_every: int = 2
    state: bool = True
    final: bool = True
    future: int = 0
    longest_chunk: int = 1024
    buckets: int = 1000
    eps: float = 1e-5
    final_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.heads * self.head_dim != self.width:
            raise ConfigError(f"head.width: expected {self.heads} heads of {self.head_dim}, got {self.width}")
        if self.width % 2 or self.text_every < 0:
            raise ConfigError(
                f"head: expected an even width and text_every from 0, got {self.width}, {self.text_every}"
            )

    @property
    def sources(self) -> tuple[Source, ...]:
        """What blocks attend to besides their own rows."""
        return ("text", "image") if self.text_every else ("all",)

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

    def blocks(self, source: Source) -> list[int]:
        """The blocks of a source."""
        return [i for i in range(self.depth) if self.source(i) == source]


Cache: TypeAlias = Mapping[Source, tuple[Tensor, Tensor]]
"""What of an observation's vision and language every step reads: for each source the keys and values of the blocks that
look at it, each (blocks, B, tokens, heads, head_dim)."""


@dataclass(frozen=True)
class StepConstants:
    """All that depends on the step alone, a row a step: `time` (n, W), the time's share of the second action product
    with its bias; `scales`, `shifts` (n, depth, W) of the blocks' norms; `final_scale`, `final_shift` (n, W)."""

    time: Tensor
    scales: Tensor
    shifts: Tensor
    final_scale: Tensor | None
    final_shift: Tensor | None


class DitLayer(TransformerBlock):
    """One block: an adaptive norm before attention, a norm without weights before the MLP.

    A block with another source than its own rows takes keys and values from `kv_proj`, once for all steps.
    """

    def __init__(self, config: DitConfig, source: Source) -> None:
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


class DitHead(nn.Module):
    """The transformer, with the projections around it. Its rows are the state, `future` learned ones, and the
    actions."""

    def __init__(self, config: DitConfig, state_dim: int, action_dim: int) -> None:
        super().__init__()
        self.config = config
        width, hidden = config.width, config.hidden
        if config.state:
            self.state_in, self.state_out = nn.Linear(state_dim, hidden), nn.Linear(hidden, width)
        self.action_in = nn.Linear(action_dim, width)
        self.action_mix, self.action_out = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.action_positions = nn.Parameter(torch.zeros(config.longest_chunk, width))
        self.future = nn.Parameter(torch.zeros(config.future, width)) if config.future else None
        self.time_in, self.time_out = nn.Linear(256, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(DitLayer(config, config.source(i)) for i in range(config.depth))
        if config.final:
            self.final_modulation, self.out_proj = nn.Linear(width, 2 * width), nn.Linear(width, hidden)
        self.decode_in = nn.Linear(hidden if config.final else width, hidden)
        self.decode_out = nn.Linear(hidden, action_dim)

    # -- once an observation --------------------------------------------------------------------------------------

    def cache(self, **features: Tensor | Sequence[Tensor]) -> Cache:
        """Keys and values of the features (B, tokens, vl_width) of each source, or of those of each of its blocks."""
        found: dict[Source, tuple[Tensor, Tensor]] = {}
        for source in self.config.sources:
            blocks = self.config.blocks(source)
            its = features[source]
            each = [its] * len(blocks) if isinstance(its, Tensor) else its
            keys, values = torch.stack([self._layer(i).keys_values(x) for i, x in zip(blocks, each, strict=True)], 1)
            found[source] = keys, values
        return found

    def state_token(self, state: Tensor | None) -> Tensor | None:
        """(B, state_dim) to (B, width); None without a state."""
        if state is None:
            return None
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
        temporal = time_angles(times, 128, 127)
        embedded = self.time_out(F.silu(self.time_in(torch.cat((temporal.cos(), temporal.sin()), -1).to(wide))))
        active = F.silu(embedded)
        rows = [m(active.to(m.weight.dtype)) for m in (layer.modulation for layer in self._layers())]
        scales, shifts = torch.stack(rows, 1).chunk(2, -1)
        final_shift = final_scale = None
        if config.final:
            modulation = self.final_modulation
            final_shift, final_scale = modulation(active.to(modulation.weight.dtype)).chunk(2, -1)
        half = config.width // 2
        angles = time_angles(times, half, half)
        tau = torch.cat((angles.sin(), angles.cos()), -1).to(self.action_mix.weight.dtype)
        time = F.linear(tau, self.action_mix.weight[:, config.width :], self.action_mix.bias)
        return StepConstants(time, scales, shifts, final_scale, final_shift)

    def velocity(
        self, noisy: Tensor, constants: StepConstants, step: int, state: Tensor | None, cache: Cache,
        lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The flow's velocity at `noisy` (B, H, action_dim), same shape, in the projections' dtype. state (B, width);
        `lengths` (B,): the tokens of the first source that are no padding, None: all."""
        mixed = self.action_in(noisy.to(self.action_in.weight.dtype))
        mixed = F.linear(mixed, self.action_mix.weight[:, : self.config.width]) + constants.time[step]
        tokens = self.action_out(F.silu(mixed)) + self.action_positions[: noisy.shape[1]]
        rows = [] if state is None else [state[:, None]]
        rows += [] if self.future is None else [self.future.expand(len(noisy), -1, -1)]
        x = torch.cat((*rows, tokens), 1).to(self._layer(0).fc1.weight.dtype)
        first, padded = self.config.sources[0], None
        if lengths is not None:
            real = torch.arange(cache[first][0].shape[2], device=noisy.device) < lengths[:, None]
            padded = real[:, None].expand(-1, x.shape[1], -1)
        seen: Counter[Source] = Counter()
        for index, layer in enumerate(self._layers()):
            source = layer.source
            outside = None
            if source != "self":
                keys, values = cache[source]
                outside = keys[seen[source]], values[seen[source]]
                seen[source] += 1
            mask = padded if source == first else None
            x = layer(x, constants.scales[step, index], constants.shifts[step, index], outside, mask)
        x = x[:, -noisy.shape[1] :]
        if constants.final_scale is not None and constants.final_shift is not None:
            scale, shift = constants.final_scale[step], constants.final_shift[step]
            x = self.out_proj(reference.adaptive_layer_norm(x, scale, shift, self.config.final_eps))
        return self.decode_out(F.relu(self.decode_in(x.to(self.decode_in.weight.dtype))))

    def _layers(self) -> list[DitLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _layer(self, index: int) -> DitLayer:
        layer = self.layers[index]
        assert isinstance(layer, DitLayer)
        return layer


class DitNetwork(Network):
    """A network whose module `head` is a `DitHead`. Its config has `head`, `action_dim`, `state_dim` and
    `action_horizon`."""

    head: DitHead

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the large products; small projections may be wider."""
        return self.get_parameter("head.layers.0.fc1.weight").dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Patch and position embeddings, and the small projections of state, actions and time."""
        return name.startswith(_WIDE)

    def constants(self, schedule: Schedule) -> StepConstants:
        """Compute what depends on the times of the steps alone. Weights not in memory before are dropped."""
        norms = [f"head.layers.{i}.modulation" for i in range(self.config.head.depth)]
        small = ["head.time_in", "head.time_out", "head.action_mix"]
        small += ["head.final_modulation"] if self.config.head.final else []
        with self.present(*small, *norms):
            return self.head.constants(schedule)

    def integrate(
        self, noise: Tensor, constants: StepConstants, state: Tensor | None, cache: Cache,
        lengths: Tensor | None = None, target: Tensor | None = None, weights: Tensor | None = None, *,
        schedule: Schedule,
    ) -> Tensor:  # fmt: skip
        """Euler over the steps of a schedule, whose times fall while the model's own rise. noise (B, H, action_dim)
        float32; state (B, state_dim); `lengths` as of `DitHead.velocity`; returns the actions, same shape and dtype as
        the noise.

        `target` (B, H, action_dim) and `weights` (B, H): rows with a weight begin at the target instead of the noise,
        and move by 1 - weight of the velocity (GR00T's own real-time chunking); weights of zero: a plain call.
        """
        token = self.head.state_token(state)
        x, pace = noise, None
        if target is not None and weights is not None:
            x = torch.where(weights[..., None] > 0, target.to(noise.dtype), noise)
            pace = (1.0 - weights)[..., None]
        for step, dt in enumerate(schedule.dts):
            v = self.head.velocity(x, constants, step, token, cache, lengths).to(x.dtype)
            x = x + -dt * (v if pace is None else v * pace)
        return x


def time_angles(times: Tensor, count: int, over: int) -> Tensor:
    """times (n,) at frequencies 10000^(-i / over), i < count: (n, count) float32."""
    exponent = torch.arange(count, dtype=torch.float32, device=times.device) * (-math.log(10_000.0) / over)
    return times[:, None] * exponent.exp()
