"""FastWAM at any size: a video transformer reads one encoded image, once, and an expert denoises actions that attend to
its keys and values. No video is imagined.

Same mathematics as lerobot 0.6.1's, with the exact savings applied: the video's time is always 0, so that its
modulation is a constant; of its last block only keys and values are computed; text and state are projected for all
steps at once. A prompt's padding is attended to: all its rows are the same, so that they are one key, which counts as
often as there are rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.images.autoencoder import WanEncoderConfig, wan_encoder
from vla_accel.kernels import reference
from vla_accel.nn.flow import Schedule
from vla_accel.nn.network import Network
from vla_accel.nn.padding import PROMPT_BUCKET
from vla_accel.nn.reference import Rope
from vla_accel.nn.wan import Text, WanConfig, WanStack, grid_positions, rope_tables
from vla_accel.numeric import round_up

_WIDE = ("patch.", "latent_", "state.", "action_in.", "action_out.", "video.time_", "action.time_")


@dataclass(frozen=True)
class FastWamConfig:
    """Architecture and sizes.

    `image_size`: height and width of the cameras' images in a row, left to right; `text_rows`: rows of a prompt, with
    its padding, which is attended to; `shift` of the checkpoint's schedule; `noise_seed`: every call starts from the
    noise of this seed, None: from new noise.
    """

    vae: WanEncoderConfig = field(default_factory=WanEncoderConfig)
    video: WanConfig = field(default_factory=WanConfig)
    action: WanConfig = field(default_factory=lambda: WanConfig(width=1024, mlp_dim=4096))
    image_size: tuple[int, int] = (224, 448)
    text_rows: int = 128
    state_dim: int = 8
    action_dim: int = 7
    action_horizon: int = 32
    num_steps: int = 10
    shift: float = 5.0
    noise_seed: int | None = 42

    def __post_init__(self) -> None:
        shared = ("heads", "head_dim", "depth", "text_dim")
        video, action = ([getattr(stack, name) for name in shared] for stack in (self.video, self.action))
        if video != action:
            raise ConfigError(f"{', '.join(shared)} of video and action: expected the same, got {video} and {action}")
        if any(side % (2 * self.vae.scale) for side in self.image_size):
            raise ConfigError(f"image_size: expected multiples of {2 * self.vae.scale}, got {self.image_size}")

    @property
    def max_token_len(self) -> int:
        """The longest prompt in tokens."""
        return self.text_rows

    def context_rows(self, tokens: int) -> int:
        """Rows that a prompt of `tokens` is padded to, with those of the state and of the padding."""
        return min(round_up(tokens + 2, PROMPT_BUCKET), self.text_rows + 2)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the image's tokens."""
        height, width = (side // (2 * self.vae.scale) for side in self.image_size)
        return height, width

    def schedule(self, num_steps: int) -> Schedule:
        """The steps that the checkpoint was trained to take: equal ones, shifted towards the noise."""
        equal = (1.0 - step / num_steps for step in range(num_steps + 1))
        return Schedule(tuple(self.shift * u / (1.0 + (self.shift - 1.0) * u) for u in equal))


def fastwam(**changes: Any) -> FastWamConfig:
    """FastWAM at the published size (6.0 B, and 0.15 B of the autoencoder), for LIBERO."""
    return FastWamConfig(**changes)


@dataclass(frozen=True)
class VideoConstants:
    """What the video transformer computes once: `modulations` (depth, 6, W), and its rotary tables (I, 1, d / 2)."""

    modulations: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class StepConstants:
    """What depends on the steps alone: `modulations` (n, depth, 6, W), and the rotary tables of the actions."""

    modulations: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Cache:
    """What every step reads, (depth, B, S, heads, d): keys and values of the video, and those of text and state, with
    the `text_bias` (B, S) of their scores."""

    keys: Tensor
    values: Tensor
    text_keys: Tensor
    text_values: Tensor
    text_bias: Tensor

    def text(self, index: int) -> Text:
        """What a block's rows attend to besides the video and each other."""
        return self.text_keys[index], self.text_values[index], self.text_bias


class FastWam(Network):
    """The model. Module names are the canonical checkpoint keys."""

    config: FastWamConfig

    def __init__(self, config: FastWamConfig) -> None:
        super().__init__()
        self.config = config
        latent, width = config.vae.latent, config.action.width
        self.vae = wan_encoder(config.vae)
        self.latent_mean, self.latent_std = nn.Parameter(torch.zeros(latent)), nn.Parameter(torch.ones(latent))
        self.patch = nn.Conv2d(latent, config.video.width, 2, 2)
        self.video, self.action = WanStack(config.video), WanStack(config.action)
        self.state = nn.Linear(config.state_dim, config.video.text_dim)
        self.action_in, self.action_out = nn.Linear(config.action_dim, width), nn.Linear(width, config.action_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the large products; small projections may be wider."""
        return self.action.blocks[0].fc1.weight.dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Projections of latents, state, actions and time, and modulations."""
        return name.startswith(_WIDE) or name.endswith("modulation")

    # -- once an observation --------------------------------------------------------------------------------------

    def image_tokens(self, image: Tensor) -> Tensor:
        """An image (B, 3, H, W) float32 in 0..1 to (B, I, W)."""
        return self.patches(self.vae((2.0 * image - 1.0).to(self.vae.dtype)))

    def patches(self, moments: Tensor) -> Tensor:
        """The encoder's result to (B, I, W), from its mean alone."""
        mean, std = (x[:, None, None] for x in (self.latent_mean, self.latent_std))
        latent = (moments[:, : self.config.vae.latent].to(mean.dtype) - mean) / std
        return self.patch(latent.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2).to(self.dtype)

    def video_constants(self) -> VideoConstants:
        """Compute what the video transformer computes once. Weights not in memory before are dropped."""
        with self.present(*_timed("video", self.config.video.depth)):
            (modulations,) = self.video.modulations(torch.zeros(1, device=self.device))
        tables = rope_tables(grid_positions(*self.config.grid).to(self.device), self.config.video.head_dim)
        return VideoConstants(modulations, *tables)

    def context(self, text: Tensor, state: Tensor) -> Tensor:
        """State (B, state_dim), a prompt's padding and rows of its text (B, L, text_dim) to (B, L + 2, text_dim)."""
        row = self.state(state.to(self.state.weight.dtype))[:, None]
        return torch.cat((row, torch.zeros_like(row), text.to(row.dtype)), 1).to(self.dtype)

    def read(
        self, image_tokens: Tensor, text: Tensor, text_bias: Tensor, state: Tensor, constants: VideoConstants
    ) -> Cache:
        """Run the video transformer (`context` has the shapes of `text` and `state`)."""
        context = self.context(text, state)
        of_video, of_action = self.video.embedded(context), self.action.embedded(context)
        texts = [block.text(of_action) for block in self.action.blocks]
        x, rope = image_tokens, (constants.cos, constants.sin)
        keys, values, last = [], [], self.config.video.depth - 1
        for index, block in enumerate(self.video.blocks):
            modulation = constants.modulations[index]
            q, k, v = block.qkv(x, rope, modulation)
            keys.append(k)
            values.append(v)
            if index < last:
                own = *block.text(of_video), text_bias
                x = block.finish(x, reference.attention(q, k, v, None), own, modulation)
        text_keys, text_values = zip(*texts, strict=True)
        keys, values, text_keys, text_values = map(torch.stack, (keys, values, text_keys, text_values))
        return Cache(keys, values, text_keys, text_values, text_bias)

    # -- once a step ----------------------------------------------------------------------------------------------

    def step_constants(self, schedule: Schedule) -> StepConstants:
        """Compute what depends on the times of the steps alone. Weights not in memory before are dropped."""
        # In float32, as lerobot multiplies.
        times = schedule.evaluations.to(self.device) * 1000.0
        with self.present(*_timed("action", self.config.action.depth)):
            modulations = self.action.modulations(times)
        positions = torch.arange(self.config.action_horizon, device=self.device)[:, None]
        return StepConstants(modulations, *rope_tables(positions, self.config.action.head_dim))

    def velocity(self, noisy: Tensor, modulations: Tensor, rope: Rope, cache: Cache) -> Tensor:
        """The flow's velocity at `noisy` (B, H, action_dim); `modulations` (depth, 6, W) of the step."""
        x = self.action_in(noisy.to(self.action_in.weight.dtype)).to(self.dtype)
        for index, block in enumerate(self.action.blocks):
            q, k, v = block.qkv(x, rope, modulations[index])
            k, v = torch.cat((cache.keys[index], k), 1), torch.cat((cache.values[index], v), 1)
            x = block.finish(x, reference.attention(q, k, v, None), cache.text(index), modulations[index])
        return self.action_out(x.to(self.action_out.weight.dtype))

    def integrate(self, noise: Tensor, constants: StepConstants, cache: Cache, *, schedule: Schedule) -> Tensor:
        """Euler over the steps of a schedule. noise (B, H, action_dim) float32; returns the actions."""
        x, rope = noise, (constants.cos, constants.sin)
        for step, dt in enumerate(schedule.dts):
            x = x + dt * self.velocity(x, constants.modulations[step], rope, cache).to(x.dtype)
        return x


def _timed(stack: str, depth: int) -> list[str]:
    """Names of what makes a stack's modulations."""
    blocks = [f"{stack}.layers.{index}.modulation" for index in range(depth)]
    return [f"{stack}.time_in", f"{stack}.time_mix", f"{stack}.time_out", *blocks]
