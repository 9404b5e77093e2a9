"""Diffusion Policy: a ResNet with a spatial softmax for each camera frame, and a 1-D U-Net over the chunk of actions.

The condition of a block is linear in mish of [time ‖ observation], so the time's part is a constant of each step and
the observation's part is computed once a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler, Step
from vla_accel.nn.network import Network
from vla_accel.nn.resnet import Camera, ResNet, ResNetConfig, feature_size

EPS = 1e-5
ALIGNED = 16
"""Columns to which the rows of fused products are filled up with zeros."""
LAST_GROUPS = 8
"""Groups of the norm before the last convolution, whatever the other norms have."""
Size = tuple[int, int]


class Framed:
    """The part of a configuration that says how large frames are."""

    cameras: tuple[Camera, ...]
    resize: Size | None
    crop: Size | None

    def check_frames(self) -> None:
        """Raise ConfigError for cameras with frames of several sizes."""
        if len({(camera.height, camera.width) for camera in self.cameras}) != 1:
            raise ConfigError(f"cameras: expected at least one, all with frames of one size, got {self.cameras}")

    @property
    def frame(self) -> Size:
        """Size of a camera's frames."""
        return self.cameras[0].height, self.cameras[0].width

    @property
    def seen(self) -> Size:
        """Size of what the image encoder sees."""
        return self.crop or self.resize or self.frame


@dataclass(frozen=True)
class DiffusionPolicyConfig(Framed):
    """Sizes. Images are (height, width).

    Attributes:
        backbone: The ResNet of the images.
        cameras: Size and scale of each camera's frames; all have one size.
        resize: Size to which they are resized; None: they are not.
        crop: The centre that the ResNet sees; None: all.
        shared_encoder: Whether one ResNet sees all cameras.
        keypoints: Maps of the spatial softmax.
        state_dim: Numbers of the state.
        action_dim: Numbers of an action.
        history: Moments that the policy sees (n_obs_steps).
        action_horizon: Actions that the U-Net computes, of which the first `history` - 1 lie in the past.
        widths: Channels of each level of the U-Net (down_dims).
        kernel: Taps of its convolutions.
        groups: Groups of its norms.
        time_dim: Width of the embedding of the time.
        scaled: Whether a condition scales and shifts, or only shifts.
        scheduler: The noise scheduler.
        num_steps: Denoising steps by default.
    """

    backbone: ResNetConfig = field(default_factory=lambda: ResNetConfig(norm="group"))
    cameras: tuple[Camera, ...] = (Camera(96, 96, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),)
    resize: Size | None = None
    crop: Size | None = (84, 84)
    shared_encoder: bool = True
    keypoints: int = 32
    state_dim: int = 2
    action_dim: int = 2
    history: int = 2
    action_horizon: int = 16
    widths: tuple[int, ...] = (512, 1024, 2048)
    kernel: int = 5
    groups: int = 8
    time_dim: int = 128
    scaled: bool = True
    scheduler: NoiseScheduler = field(default_factory=NoiseScheduler)
    num_steps: int = 100

    def __post_init__(self) -> None:
        if self.action_horizon % (1 << len(self.widths)):
            raise ConfigError(
                f"horizon: expected a multiple of {1 << len(self.widths)}, for {len(self.widths)} levels, got "
                f"{self.action_horizon}"
            )
        if not self.kernel % 2:
            raise ConfigError(f"kernel_size: expected an odd number, got {self.kernel}")
        if self.history > self.action_horizon:
            raise ConfigError(f"n_obs_steps: expected at most the horizon, {self.action_horizon}, got {self.history}")
        for name, groups, width in (
            *(("n_groups", self.groups, width) for width in self.widths),
            ("down_dims", LAST_GROUPS, self.widths[0]),
        ):
            if width % groups:
                raise ConfigError(f"{name}: expected widths that {groups} groups divide, got {list(self.widths)}")
        self.check_frames()
        if self.crop is not None and any(c > s for c, s in zip(self.crop, self.resize or self.frame, strict=True)):
            raise ConfigError(f"crop_shape: expected at most {self.resize or self.frame}, got {self.crop}")

    @property
    def condition_dim(self) -> int:
        """Numbers of the observation's condition."""
        return self.history * (self.state_dim + len(self.cameras) * 2 * self.keypoints)

    @property
    def blocks(self) -> tuple[tuple[str, int, int], ...]:
        """Name, input and output channels of each residual block of the U-Net, in the order of their computation."""
        found, channels = [], self.action_dim
        for level, width in enumerate(self.widths):
            found += [(f"down.{level}.0", channels, width), (f"down.{level}.1", width, width)]
            channels = width
        found += [(f"mid.{index}", channels, channels) for index in (0, 1)]
        for level, width in enumerate(reversed(self.widths[:-1])):
            # Each upward level takes the stored features of the same length as further channels.
            found += [(f"up.{level}.0", 2 * channels, width), (f"up.{level}.1", width, width)]
            channels = width
        return tuple(found)


class Encoder(nn.Module):
    """Normalised frames (N, 3, H, W) to features (N, 2 · keypoints) float32."""

    def __init__(self, config: DiffusionPolicyConfig) -> None:
        super().__init__()
        self.backbone = ResNet(config.backbone)
        self.keypoints = nn.Conv2d(config.backbone.channels, config.keypoints, 1)
        self.out = nn.Linear(2 * config.keypoints, 2 * config.keypoints)

    def forward(self, frames: Tensor, places: Tensor) -> Tensor:
        """`places` (pixels of the last map, 2): each one's x and y."""
        maps = self.keypoints(self.backbone(frames).to(self.keypoints.weight.dtype))
        return F.relu(self.out((maps.flatten(2).softmax(-1) @ places).flatten(1)))


def filled(rows: Tensor) -> Tensor:
    """Fill up the last axis with zeros to a multiple of `ALIGNED`."""
    return F.pad(rows, (0, -rows.shape[-1] % ALIGNED))


def doubling(weight: Tensor) -> Tensor:
    """Return a transposed convolution's weight (C, N, 4), of stride 2 and padding 1, as a product (2 N, 3 C) of rows
    m - 1, m and m + 1, which makes rows 2 m and 2 m + 1."""
    first, second, third, fourth = filled(weight.permute(2, 1, 0))
    nothing = torch.zeros_like(first)
    even, odd = (fourth, second, nothing), (nothing, third, first)
    return torch.cat([torch.cat(taps, 1) for taps in (even, odd)])


def mish(x: Tensor) -> Tensor:
    """mish in float32 at least."""
    return F.mish(x.to(torch.promote_types(x.dtype, torch.float32)))


class _Norm(nn.GroupNorm):
    """A group norm and mish, whose parameters may be wider than x."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__(groups, channels, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.mish(super().forward(x.to(self.weight.dtype))).to(x.dtype)


class FilmBlock(nn.Module):
    """Two convolutions with norms; between them the condition scales and shifts channels. `film` makes a condition
    from mish of [time ‖ observation]."""

    def __init__(self, config: DiffusionPolicyConfig, channels: int, width: int) -> None:
        super().__init__()
        kernel, self.width = config.kernel, width
        self.conv1 = nn.Conv1d(channels, width, kernel, padding=kernel // 2)
        self.norm1 = _Norm(config.groups, width)
        self.film = nn.Linear(config.time_dim + config.condition_dim, (1 + config.scaled) * width)
        self.conv2 = nn.Conv1d(width, width, kernel, padding=kernel // 2)
        self.norm2 = _Norm(config.groups, width)
        self.residual = nn.Conv1d(channels, width, 1) if channels != width else None

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x (B, channels, T), condition (B, width), or (B, 2 · width) with a scale first, to (B, width, T)."""
        y, parts = self.norm1(self.conv1(x)), condition[..., None].to(x.dtype)
        y = parts[:, : self.width] * y + parts[:, self.width :] if parts.shape[1] > self.width else y + parts
        y = self.norm2(self.conv2(y))
        return y + (x if self.residual is None else self.residual(x))


class Unet(nn.Module):
    """The network of a denoising step."""

    def __init__(self, config: DiffusionPolicyConfig) -> None:
        super().__init__()
        self.names = [name for name, _, _ in config.blocks]
        self.time_in = nn.Linear(config.time_dim, 4 * config.time_dim)
        self.time_out = nn.Linear(4 * config.time_dim, config.time_dim)
        widths = config.widths
        made = {name: FilmBlock(config, channels, width) for name, channels, width in config.blocks}

        def pair(start: str) -> list[nn.Module]:
            return [made[f"{start}.0"], made[f"{start}.1"]]

        # The last level is followed by none; every level of the way up doubles the length.
        self.down = nn.ModuleList(
            nn.ModuleList(pair(f"down.{i}") + [nn.Conv1d(w, w, 3, 2, 1)] * (i + 1 < len(widths)))
            for i, w in enumerate(widths)
        )
        self.mid = nn.ModuleList(pair("mid"))
        self.up = nn.ModuleList(
            nn.ModuleList([*pair(f"up.{i}"), nn.ConvTranspose1d(w, w, 4, 2, 1)])
            for i, w in enumerate(reversed(widths[:-1]))
        )
        self.last = nn.Conv1d(widths[0], widths[0], config.kernel, padding=config.kernel // 2)
        self.last_norm = _Norm(LAST_GROUPS, widths[0])
        self.out = nn.Conv1d(widths[0], config.action_dim, 1)

    @property
    def films(self) -> list[nn.Linear]:
        """What makes the condition of each block, in the order of their computation."""
        blocks: list[Any] = [self.get_submodule(name) for name in self.names]
        return [block.film for block in blocks]

    def forward(self, x: Tensor, conditions: Sequence[Tensor]) -> Tensor:
        """x (B, T, action_dim) float32 and the condition of each block to the output of a step, same shape and
        dtype."""
        rows, kept = iter(conditions), list[Tensor]()
        down: Any = self.down
        up: Any = self.up
        y = x.transpose(1, 2).to(self.last.weight.dtype)
        for level in down:
            y = level[1](level[0](y, next(rows)), next(rows))
            kept.append(y)
            y = level[2](y) if len(level) > 2 else y
        for block in self.mid:
            y = block(y, next(rows))
        for level in up:
            y = torch.cat((y, kept.pop()), 1)
            y = level[2](level[1](level[0](y, next(rows)), next(rows)))
        y = self.last_norm(self.last(y))
        return self.out(y.to(self.out.weight.dtype)).transpose(1, 2).to(x.dtype)


class DiffusionPolicy(Network):
    """The whole policy."""

    def __init__(self, config: DiffusionPolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.encoders = nn.ModuleList(
            Encoder(config) for _ in range(1 if config.shared_encoder else len(config.cameras))
        )
        self.unet = Unet(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.unet.last.weight.dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Norms, and the small products at the ends."""
        if ".backbone." in name:
            return ResNet.kept_wide(name)
        ends = (".keypoints.", ".out.", ".time_in.", ".time_out.")
        return "norm" in name or any(end in name for end in ends) or name.endswith(".film.bias")

    def pixel_constants(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the constants of `see`: mean and deviation of each frame (V, 3, 1, 1), and the x and y from -1 to 1 of
        each pixel of the last map (h · w, 2)."""
        config, like = self.config, self.get_parameter("encoders.0.out.weight")
        mean, deviation = (
            torch.tensor([getattr(c, name) for c in config.cameras] * config.history, dtype=torch.float64)
            for name in ("mean", "deviation")
        )
        height, width = feature_size(*config.seen)
        y, x = (torch.linspace(-1, 1, n, dtype=torch.float64) for n in (height, width))
        places = torch.stack((x.repeat(height), y.repeat_interleave(width)), 1)
        return mean[..., None, None].to(like), deviation[..., None, None].to(like), places.to(like)

    def see(self, images: Tensor, mean: Tensor, deviation: Tensor, places: Tensor) -> Tensor:
        """Return the features (B, V, 2 · keypoints) of uint8 frames (B, V, H, W, 3), all cameras of a moment before the
        next."""
        config, (batch, views) = self.config, images.shape[:2]
        frames = ((images.permute(0, 1, 4, 2, 3).to(mean.dtype) / 255 - mean) / deviation).flatten(0, 1)
        if config.resize is not None:
            frames = F.interpolate(frames, config.resize, mode="bilinear", antialias=True, align_corners=False)
        frames = centre(frames, config.seen).to(self.dtype).unflatten(0, (batch, views))
        if config.shared_encoder:
            return self.encoders[0](frames.flatten(0, 1), places).unflatten(0, (batch, views))
        each = [
            encoder(frames[:, camera :: len(config.cameras)].flatten(0, 1), places).unflatten(
                0, (batch, config.history)
            )
            for camera, encoder in enumerate(self.encoders)
        ]
        return torch.stack(each, 2).flatten(1, 2)

    def condition(self, features: Tensor, state: Tensor) -> Tensor:
        """Return the condition (B, condition_dim) of features (B, V, n) and states (B, history, state_dim)."""
        features = features.unflatten(1, (self.config.history, -1)).flatten(2)
        return torch.cat((state.to(features.dtype), features), -1).flatten(1)

    def films(self, condition: Tensor) -> list[Tensor]:
        """Return the observation's part of each block's condition, (B, n) float32."""
        active, first = mish(condition), self.config.time_dim
        weights = (film.weight for film in self.unet.films)
        return [F.linear(active.to(weight.dtype), weight[:, first:]).to(active.dtype) for weight in weights]

    def time_tables(self, times: Sequence[float]) -> list[Tensor]:
        """Return the time's part of each block's condition with its bias, (steps, n), for training steps."""
        unet, half = self.unet, self.config.time_dim // 2
        wide, device = unet.time_in.weight.dtype, unet.time_in.weight.device
        frequency = torch.exp(torch.arange(half, device=device) * -(math.log(10_000.0) / (half - 1)))
        angle = torch.tensor(times, device=device)[:, None] * frequency
        embedding = torch.cat((angle.sin(), angle.cos()), -1).to(wide)
        active = mish(unet.time_out(mish(unet.time_in(embedding))))
        return [F.linear(active, f.weight[:, : active.shape[1]].to(wide), f.bias.to(wide)) for f in unet.films]

    def sample(self, noise: Tensor, condition: Tensor, tables: Sequence[Tensor], steps: Sequence[Step]) -> Tensor:
        """Return normalised actions (B, T, action_dim) float32.

        Args:
            noise: (B, T, action_dim) float32; for DDPM (B, steps, T, action_dim), the first chunk and then the
                noise of each step but the last.
            condition: (B, condition_dim).
            tables: `time_tables` of the steps.
            steps: The scheduler's.
        """
        scheduler, own = self.config.scheduler, self.films(condition)
        draws = noise[:, None] if noise.dim() == 3 else noise
        x = draws[:, 0]
        for index, step in enumerate(steps):
            e = self.unet(x, [table[index] + film for table, film in zip(tables, own, strict=True)])
            x = step(x, e, scheduler.clip, draws[:, index + 1] if index + 1 < draws.shape[1] else None)
        return x


def centre(images: Tensor, size: Size) -> Tensor:
    """Return the centre (…, h, w) of images, halves rounded to even."""
    (top, left), (height, width) = crop_origin(images.shape[-2:], size), size
    return images[..., top : top + height, left : left + width]


def crop_origin(whole: Sequence[int], size: Size) -> Size:
    """Return the first row and column of the centre of an image."""
    top, left = (round((a - b) / 2) for a, b in zip(whole, size, strict=True))
    return top, left
