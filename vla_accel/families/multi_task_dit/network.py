"""Multi-task DiT: CLIP encodes frames and the instruction, and a diffusion transformer denoises the chunk of actions.

The modulations of a block are linear in SiLU of [time ‖ observation], so the time's part is a constant of each step and
the observation's part is computed once a call. Source of the mathematics: lerobot 0.6.1 (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.families.diffusion_policy.network import Framed, Size, centre
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler, Step
from vla_accel.kernels import reference
from vla_accel.nn.clip import ClipText, ClipTextConfig, ClipVision, ClipVisionConfig
from vla_accel.nn.dit import time_angles
from vla_accel.nn.flow import Schedule
from vla_accel.nn.network import Network
from vla_accel.nn.resnet import Camera

EPS = 1e-6
"""Of the transformer's norms."""
MODULATIONS = 6
"""Shift, scale and gate of a block's attention, then of its MLP."""


@dataclass(frozen=True)
class MultiTaskDitConfig(Framed):
    """Sizes. Images are (height, width).

    Attributes:
        vision: Of CLIP's image encoder.
        text: Of CLIP's text encoder.
        cameras: Size and scale of each camera's frames; all have one size.
        resize: Size to which they are resized; None: they are not.
        crop: The centre that CLIP sees; None: all.
        shared_encoder: Whether one encoder sees all cameras.
        state_dim: Numbers of the state.
        action_dim: Numbers of an action.
        history: Moments that the policy sees (n_obs_steps).
        action_horizon: Actions that the transformer computes, of which the first `history` - 1 lie in the past.
        width: Of the transformer and of the prompt's features.
        depth: Its blocks.
        heads: Of its attention.
        time_dim: Width of the embedding of the time.
        rope_base: Base of the rotations' frequencies; None: queries and keys are not rotated.
        positions: Whether actions have learned positions.
        scheduler: The noise scheduler; None: the steps integrate a flow.
        num_steps: Denoising steps by default.
        max_token_len: The longest prompt in tokens.
    """

    vision: ClipVisionConfig = field(default_factory=ClipVisionConfig)
    text: ClipTextConfig = field(default_factory=ClipTextConfig)
    cameras: tuple[Camera, ...] = (Camera(256, 256), Camera(256, 256))
    resize: Size | None = None
    crop: Size | None = (224, 224)
    shared_encoder: bool = True
    state_dim: int = 8
    action_dim: int = 7
    history: int = 2
    action_horizon: int = 32
    width: int = 512
    depth: int = 6
    heads: int = 8
    time_dim: int = 256
    rope_base: float | None = 10_000.0
    positions: bool = False
    scheduler: NoiseScheduler | None = field(default_factory=NoiseScheduler)
    num_steps: int = 100
    max_token_len: int = 77

    def __post_init__(self) -> None:
        if not self.heads or self.width % self.heads or (self.rope_base is not None and self.head_dim % 2):
            raise ConfigError(f"num_heads: expected heads of an even part of {self.width}, got {self.heads} heads")
        if self.time_dim < 4 or self.time_dim % 2:
            raise ConfigError(f"timestep_embed_dim: expected an even number of at least 4, got {self.time_dim}")
        if self.history > self.action_horizon:
            raise ConfigError(f"n_obs_steps: expected at most the horizon, {self.action_horizon}, got {self.history}")
        if self.max_token_len > self.text.positions:
            raise ConfigError(f"tokenizer_max_length: expected at most {self.text.positions}, got {self.max_token_len}")
        self.check_frames()
        side = self.vision.image_size
        if self.seen != (side, side):
            raise ConfigError(
                f"image_resize_shape, image_crop_shape: expected images of {side} x {side} for CLIP, got {self.seen}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def views(self) -> int:
        """Frames of an observation with its history."""
        return self.history * len(self.cameras)

    @property
    def condition_dim(self) -> int:
        """Numbers of the observation's condition."""
        return self.history * (self.state_dim + len(self.cameras) * self.vision.width + self.width)

    def condition(self, features: Tensor, text: Tensor, state: Tensor) -> Tensor:
        """Return the condition (B, condition_dim) of features (B, V, n), text (B, width) and states (B, history,
        state_dim): each moment's state, frames and text."""
        features = features.unflatten(1, (self.history, -1)).flatten(2)
        parts = state, features, text[:, None].expand(-1, self.history, -1)
        wide = torch.promote_types(state.dtype, features.dtype)
        return torch.cat([part.to(wide) for part in parts], -1).flatten(1)

    def steps(self, schedule: Schedule) -> tuple[Step, ...]:
        """Return the steps from noise to actions. The model's time of a flow rises from 0, which is noise. Raises
        ConfigError for more steps than a noise scheduler's training has."""
        if self.scheduler is not None:
            return self.scheduler.steps(schedule.steps)
        times = [1.0 - time for time in schedule.times[:-1]]
        if schedule.is_uniform:
            times = [step / schedule.steps for step in range(schedule.steps)]
        return tuple(Step(time, 0.0, 0.0, 0.0, 1.0, -dt, 0.0) for time, dt in zip(times, schedule.dts, strict=True))

    @property
    def clip(self) -> float | None:
        """Bound of the clean chunk in the steps; None for no bound."""
        return None if self.scheduler is None else self.scheduler.clip


class ActionBlock(nn.Module):
    """Attention and an MLP, each with an adaptive norm before it and a gate after it. `modulation` makes shifts, scales
    and gates of SiLU of [time ‖ observation]."""

    def __init__(self, config: MultiTaskDitConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.modulation = nn.Linear(config.time_dim + config.condition_dim, MODULATIONS * width)
        self.qkv_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, modulation: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """x (B, T, width) to the same shape. modulation (B, 6 · width)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation[:, None].chunk(MODULATIONS, -1)
        normed = reference.adaptive_layer_norm(x, scale, shift, EPS)
        q, k, v = self.qkv_proj(normed).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if rope is not None:
            q, k = (reference.apply_rope(part, *rope) for part in (q, k))
        x = reference.gated_residual(x, self.out_proj(reference.attention(q, k, v, None).flatten(2)), gate)
        hidden = F.gelu(self.fc1(reference.adaptive_layer_norm(x, mlp_scale, mlp_shift, EPS)), approximate="tanh")
        return reference.gated_residual(x, self.fc2(hidden), mlp_gate)


class ActionHead(nn.Module):
    """The network of a denoising step."""

    def __init__(self, config: MultiTaskDitConfig) -> None:
        super().__init__()
        self.config = config
        self.time_in = nn.Linear(config.time_dim, 2 * config.time_dim)
        self.time_out = nn.Linear(2 * config.time_dim, config.time_dim)
        self.action_in = nn.Linear(config.action_dim, config.width)
        self.positions = nn.Parameter(torch.zeros(config.action_horizon, config.width)) if config.positions else None
        self.layers = nn.ModuleList(ActionBlock(config) for _ in range(config.depth))
        self.action_out = nn.Linear(config.width, config.action_dim)

    @property
    def modulations(self) -> list[nn.Linear]:
        """What makes the modulations of each block."""
        return [layer.modulation for layer in self.layers]  # type: ignore[misc]

    def forward(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """x (B, T, action_dim) float32 and the modulations of each block, (B, 6 · width), to the output of a step, same
        shape and dtype."""
        config, dtype = self.config, self.get_parameter("layers.0.fc1.weight").dtype
        y = self.action_in(x.to(self.action_in.weight.dtype))
        y = (y if self.positions is None else y + self.positions).to(dtype)
        rope = None
        if config.rope_base is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            rope = reference.rope_tables(positions, config.head_dim, dtype, config.rope_base)
        for layer, modulation in zip(self.layers, modulations, strict=True):
            y = layer(y, modulation, rope)
        return self.action_out(y.to(self.action_out.weight.dtype)).to(x.dtype)


_WIDE = (".class_", ".patch_embedding.", ".position_embedding", ".pre_layernorm.", ".positions", ".time_", ".action_")


class MultiTaskDit(Network):
    """The whole policy."""

    config: MultiTaskDitConfig

    def __init__(self, config: MultiTaskDitConfig) -> None:
        super().__init__()
        self.config = config
        self.encoders = nn.ModuleList(
            ClipVision(config.vision) for _ in range(1 if config.shared_encoder else len(config.cameras))
        )
        self.text = ClipText(config.text, config.width)
        self.head = ActionHead(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.get_parameter("head.layers.0.fc1.weight").dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Embeddings, and the small products at the ends."""
        return name.endswith(".modulation.bias") or any(part in name for part in _WIDE)

    def pixel_scales(self) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each frame, (V, 3, 1, 1) each."""
        config, dtype = self.config, self.get_parameter("encoders.0.patch_embedding.weight").dtype
        mean, deviation = (
            torch.tensor([getattr(c, name) for c in config.cameras] * config.history, dtype=torch.float64)
            for name in ("mean", "deviation")
        )
        return mean[..., None, None].to(self.device, dtype), deviation[..., None, None].to(self.device, dtype)

    def see(self, images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        """Return the features (B, V, vision width) of uint8 frames (B, V, H, W, 3), all cameras of a moment before the
        next."""
        config, (batch, views) = self.config, images.shape[:2]
        frames = ((images.permute(0, 1, 4, 2, 3).to(mean.dtype) / 255 - mean) / deviation).flatten(0, 1)
        if config.resize is not None:
            frames = F.interpolate(frames, config.resize, mode="bilinear", antialias=True, align_corners=False)
        frames = centre(frames, config.seen).unflatten(0, (batch, views))
        if config.shared_encoder:
            return self.encoders[0](frames.flatten(0, 1)).unflatten(0, (batch, views))
        cameras = len(config.cameras)
        each = [
            encoder(frames[:, camera::cameras].flatten(0, 1)).unflatten(0, (batch, config.history))
            for camera, encoder in enumerate(self.encoders)
        ]
        return torch.stack(each, 2).flatten(1, 2)

    def own_modulations(self, condition: Tensor) -> list[Tensor]:
        """Return the observation's part of each block's modulations, (B, 6 · width)."""
        first = self.config.time_dim
        weights = (modulation.weight[:, first:] for modulation in self.head.modulations)
        return [F.linear(F.silu(condition).to(weight.dtype), weight) for weight in weights]

    def times(self, steps: Sequence[Step]) -> Tensor:
        """Return the time's part of the blocks' modulations with their biases, (steps, depth, 6 · width). Weights not
        in memory before are dropped."""
        head, count = self.head, self.config.time_dim
        modulations = [f"head.layers.{index}.modulation" for index in range(self.config.depth)]
        with self.present("head.time_in", "head.time_out", *modulations):
            wide, half = head.time_in.weight.dtype, count // 2
            times = torch.tensor([step.time for step in steps], dtype=wide, device=self.device)
            angle = time_angles(times, half, half - 1)
            embedded = F.gelu(head.time_in(torch.cat((angle.sin(), angle.cos()), -1)))
            active = F.silu(F.gelu(head.time_out(embedded)))
            each = [F.linear(active, m.weight[:, :count].to(wide), m.bias.to(wide)) for m in head.modulations]
            return torch.stack(each, 1)

    def sample(self, noise: Tensor, condition: Tensor, tables: Tensor, steps: Sequence[Step]) -> Tensor:
        """Return normalised actions (B, T, action_dim) float32.

        Args:
            noise: (B, T, action_dim) float32; for DDPM (B, steps, T, action_dim), the first chunk and then the
                noise of each step but the last.
            condition: (B, condition_dim).
            tables: `times` of the steps.
            steps: As of `MultiTaskDitConfig.steps`.
        """
        own, clip = self.own_modulations(condition), self.config.clip
        draws = noise[:, None] if noise.dim() == 3 else noise
        x = draws[:, 0]
        for index, step in enumerate(steps):
            e = self.head(x, [row + part.to(row.dtype) for row, part in zip(tables[index], own, strict=True)])
            x = step(x, e, clip, draws[:, index + 1] if index + 1 < draws.shape[1] else None)
        return x
