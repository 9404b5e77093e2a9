"""X-VLA at any size: Florence-2's encoder reads one view and the instruction, and a transformer denoises actions that
attend to its output, to the other views and to soft prompts of the robot's domain.

Same mathematics as lerobot 0.6.1's, with the exact savings applied: only one domain's weights are there; what the steps
read is projected once; of the last block only the rows of actions are computed. Padded tokens and missing views change
actions, so that they are computed as there.
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
from vla_accel.nn.bart import FIRST_POSITION, Bart, BartConfig
from vla_accel.nn.block import Block, vit_block
from vla_accel.nn.davit import Davit, DavitConfig, Size
from vla_accel.nn.flow import Schedule
from vla_accel.nn.network import Network
from vla_accel.nn.reference import TransformerBlock
from vla_accel.pictures import IMAGENET_DEVIATION, IMAGENET_MEAN

EPS = 1e-5


@dataclass(frozen=True)
class XvlaConfig:
    """Architecture and sizes.

    Attributes:
        image_size: Height and width that images are fitted into, with padding above and on the left; None: images keep
            their size, which is the same for all views.
        views: Views that the transformer reads; those that are missing are zero.
        transformer: The block of the transformer, of `depth` blocks.
        soft_prompts: Rows of the domain.
        positions: Most rows without the soft prompts.
        own_projections: Whether each domain has its own projections of the encoder's output and of views.
        grippers: Numbers of state and action that the transformer does not see and that end as probabilities.
        max_token_len: Tokens of a prompt with its padding.
        pad_token: Of that padding, which is attended to.
    """

    vision: DavitConfig = field(default_factory=DavitConfig)
    encoder: BartConfig = field(default_factory=BartConfig)
    width: int = 1024
    depth: int = 24
    heads: int = 16
    mlp_dim: int = 4096
    image_size: Size | None = (224, 224)
    views: int = 3
    soft_prompts: int = 32
    positions: int = 512
    time_dim: int = 32
    own_projections: bool = False
    grippers: tuple[int, ...] = (9, 19)
    state_dim: int = 20
    action_dim: int = 20
    action_horizon: int = 30
    num_steps: int = 10
    max_token_len: int = 50
    pad_token: int = 1

    def __post_init__(self) -> None:
        if self.width % self.heads or self.encoder.width % self.encoder.heads:
            raise ConfigError(f"heads: expected divisors of {self.width} and {self.encoder.width}, got {self}")
        if (most := max(self.grippers, default=-1)) >= min(self.state_dim, self.action_dim):
            raise ConfigError(f"grippers: expected fewer than state_dim {self.state_dim} and action_dim, got {most}")
        if self.image_size is not None:
            self.check_size(self.image_size)

    @property
    def block(self) -> Block:
        """A block of the transformer."""
        return vit_block(self.width, self.heads, self.mlp_dim, EPS)

    def fitted(self, size: Size) -> Size:
        """The size of the network's images for those of a camera."""
        return self.image_size or size

    def view_tokens(self, size: Size) -> int:
        """Rows of a view of this size of the network's images: those of the last map, and their mean."""
        height, width = self.vision.sizes(size)[-1]
        return 1 + height * width

    def context_tokens(self, size: Size) -> int:
        """Rows that every step reads: the encoder's, of other views, and soft prompts."""
        return self.views * self.view_tokens(size) + self.max_token_len + self.soft_prompts

    def check_size(self, size: Size) -> None:
        """Raise ConfigError if images of this size have too few or too many rows."""
        last = self.vision.sizes(size)[-1]
        rows = self.action_horizon + self.context_tokens(size) - self.soft_prompts
        if not 1 <= min(last) <= max(last) <= self.vision.positions or rows > self.positions:
            expected = f"maps of up to {self.vision.positions} a side and up to {self.positions} rows"
            raise ConfigError(f"images: expected {expected}, got {last} and {rows} for {size}")
        if (read := self.view_tokens(size) + self.max_token_len) > self.encoder.positions - FIRST_POSITION:
            raise ConfigError(f"images: expected at most {self.encoder.positions - 2} rows of the encoder, got {read}")


def xvla(**changes: Any) -> XvlaConfig:
    """X-VLA at the published size (0.9 B)."""
    return XvlaConfig(**changes)


@dataclass(frozen=True)
class StepConstants:
    """What depends on the steps alone: `times` (n, time_dim), and `seen` (A,) and `known` (S,), 0 for the numbers of
    actions and state that the transformer does not see, else 1."""

    times: Tensor
    seen: Tensor
    known: Tensor


class DomainLinear(nn.Module):
    """A domain's product, stored as one row: x W + b with W (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.fc, self.bias = nn.Parameter(torch.zeros(inputs * outputs)), nn.Parameter(torch.zeros(outputs))

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs), as of `nn.Linear`."""
        return self.fc.view(self.inputs, -1).T

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Xvla(Network):
    """The model with the weights of one domain. Module names are the canonical checkpoint keys."""

    config: XvlaConfig

    def __init__(self, config: XvlaConfig) -> None:
        super().__init__()
        self.config, width, read = config, config.width, config.encoder.width
        self.vision = Davit(config.vision)
        channels = config.vision.width
        self.rows = nn.Embedding(config.vision.positions, channels // 2)
        self.columns = nn.Embedding(config.vision.positions, channels - channels // 2)
        self.frame = nn.Parameter(torch.zeros(channels))
        self.projector = nn.Linear(channels, read, bias=False)
        self.projector_norm = nn.LayerNorm(read)
        self.embed = nn.Embedding(config.encoder.vocab_size, read)
        self.encoder = Bart(config.encoder)
        projection = DomainLinear if config.own_projections else nn.Linear
        self.text_proj, self.view_proj = projection(read, width), projection(read, width)
        self.position_embedding = nn.Parameter(torch.zeros(config.positions, width))
        self.soft_prompts = nn.Parameter(torch.zeros(config.soft_prompts * width))
        self.action_in = DomainLinear(config.action_dim + config.state_dim + config.time_dim, width)
        self.layers = nn.ModuleList(TransformerBlock(config.block) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.action_out = DomainLinear(width, config.action_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the large products; small projections may be wider."""
        return self.projector.weight.dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Norms, positions, and the small products of actions."""
        wide = ("rows.", "columns.", "frame", "position_embedding", "action_", "encoder.positions")
        return "norm" in name or name.startswith(wide)

    # -- once an observation --------------------------------------------------------------------------------------

    def pixels(self, *images: Tensor) -> Tensor:
        """Images uint8 (B, height, width, 3) of each view to normalised pixels (B, V, 3, h, w), fitted into the
        network's size."""
        return torch.stack([pixels_of(image, self.config.image_size) for image in images], 1)

    def view_positions(self, size: Size) -> Tensor:
        """What is added to the rows of the last map of this size, (pixels, W)."""
        height, width = size
        columns = self.columns.weight[:width].expand(height, -1, -1)
        rows = self.rows.weight[:height, None].expand(-1, width, -1)
        return torch.cat((columns, rows), -1).flatten(0, 1) + self.frame

    def image_tokens(self, pixels: Tensor) -> Tensor:
        """Normalised pixels (B, V, 3, h, w) to (B, V, rows, W)."""
        size = self.config.vision.sizes((pixels.shape[3], pixels.shape[4]))[-1]
        x = self.vision(pixels.flatten(0, 1).to(self.dtype))
        x = x + self.view_positions(size).to(x.dtype)
        x = torch.cat((x.mean(1, keepdim=True), x), 1)
        tokens = reference.layer_norm(self.projector(x), self.projector_norm)
        return tokens.unflatten(0, pixels.shape[:2])

    def context(self, image_tokens: Tensor, tokens: Tensor) -> Tensor:
        """Rows that every step reads (B, C, W), from views (B, V, rows, W) and a padded prompt (B, T) int64."""
        config, batch = self.config, len(tokens)
        first, others = image_tokens[:, 0], image_tokens[:, 1:].flatten(1, 2)
        missing = others.new_zeros(batch, (config.views - image_tokens.shape[1]) * first.shape[1], first.shape[2])
        read = self.encoder(torch.cat((first, self.embed(tokens).to(first.dtype)), 1))
        x = torch.cat((self.text_proj(read), self.view_proj(torch.cat((others, missing), 1))), 1)
        start = config.action_horizon
        x = x + self.position_embedding[start : start + x.shape[1]].to(x.dtype)
        return torch.cat((x, self.soft_prompts.view(-1, config.width).to(x.dtype).expand(batch, -1, -1)), 1)

    # -- once a step ----------------------------------------------------------------------------------------------

    @staticmethod
    def times(schedule: Schedule) -> Tensor:
        """The times (n,) at which a schedule evaluates the network: of equal steps lerobot's, which are not sums."""
        count = schedule.steps
        return torch.arange(count, 0, -1) / count if schedule.is_uniform else schedule.evaluations

    def time_embedding(self, times: Tensor) -> Tensor:
        """Cosines and sines of times (n,), (n, time_dim)."""
        half = self.config.time_dim // 2
        frequencies = torch.exp(-math.log(100.0) * torch.arange(half, dtype=times.dtype, device=times.device) / half)
        angles = times[:, None] * frequencies
        return F.pad(torch.cat((angles.cos(), angles.sin()), -1), (0, self.config.time_dim % 2))

    def step_constants(self, schedule: Schedule) -> StepConstants:
        """Compute what depends on the steps alone."""
        times, device = self.times(schedule), self.device
        masks = [torch.ones(count) for count in (self.config.action_dim, self.config.state_dim)]
        for mask in masks:
            mask[list(self.config.grippers)] = 0.0
        return StepConstants(self.time_embedding(times).to(device), *(mask.to(device) for mask in masks))

    def predict(self, noisy: Tensor, state: Tensor, time: Tensor, context: Tensor) -> Tensor:
        """The actions (B, H, A) for noisy ones and the state (B, S), both without grippers, and a row of
        `time_embedding`."""
        batch, horizon = noisy.shape[:2]
        rows = (noisy, state[:, None].expand(-1, horizon, -1), time.expand(batch, horizon, -1))
        x = self.action_in(torch.cat(rows, -1).to(self.action_in.fc.dtype))
        x = torch.cat(((x + self.position_embedding[:horizon]).to(self.dtype), context), 1)
        for index, block in enumerate(self.layers):
            assert isinstance(block, TransformerBlock)
            q, k, v, _ = block.qkv(x, None)
            if index + 1 == len(self.layers):
                q, x = q[:, :horizon], x[:, :horizon]
            x = block.finish(x, reference.attention(q, k, v, None))
        return self.action_out(reference.layer_norm(x, self.norm).to(self.action_out.fc.dtype))

    def denoise(
        self, noise: Tensor, state: Tensor, context: Tensor, constants: StepConstants, *, schedule: Schedule
    ) -> Tensor:
        """The actions (B, H, A) float32: each step mixes the noise with the actions of the step before it."""
        actions, state = torch.zeros_like(noise), state * constants.known
        for time, embedding in zip(self.times(schedule).tolist(), constants.times, strict=True):
            noisy = (noise * time + actions * (1.0 - time)) * constants.seen
            actions = self.predict(noisy, state, embedding, context).to(noise.dtype)
        return torch.where(constants.seen > 0, actions, actions.sigmoid())


def pixels_of(image: Tensor, size: Size | None) -> Tensor:
    """An image uint8 (B, H, W, 3) as normalised pixels (B, 3, h, w) float32, fitted into `size`: as large as it fits
    without distortion, with zeros above and on the left."""
    pixels = image.permute(0, 3, 1, 2).float() / 255.0
    held = tuple(image.shape[1:3])
    if size is not None and held != size:
        held = fitted_size((held[0], held[1]), size)
        pixels = F.interpolate(pixels, held, mode="bilinear", align_corners=False)
    # By numbers and not by tensors of them: a CUDA graph can copy none from ordinary host memory.
    channels = zip(pixels.unbind(1), IMAGENET_MEAN, IMAGENET_DEVIATION, strict=True)
    pixels = torch.stack([(channel - mean) / deviation for channel, mean, deviation in channels], 1)
    if size is None or held == size:
        return pixels
    return F.pad(pixels, (size[1] - held[1], 0, size[0] - held[0], 0))


def fitted_size(image: Size, size: Size) -> Size:
    """The size of an image in a frame of `size`, without distortion."""
    ratio = max(image[1] / size[1], image[0] / size[0])
    return int(image[0] / ratio), int(image[1] / ratio)
