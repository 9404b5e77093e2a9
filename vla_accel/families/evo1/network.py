"""Evo-1 at any size: InternVL3, whose first language layers' outputs are all that an action head of cross-attention
reads.

Same mathematics as lerobot 0.6.1's (Apache-2.0), with the exact savings applied: the image tokens of absent views,
which nothing attends to, are left out; keys and values of the head's blocks are computed once for all steps, and so are
the products of the time embeddings. The numbers of an action that the robot does not have are zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import VIT, Attention, Block, Norm
from vla_accel.nn.flow import Schedule
from vla_accel.nn.intern_vision import InternVision, InternVisionConfig
from vla_accel.nn.network import Network
from vla_accel.nn.qwen_language import Arrangement, Layout, Places, QwenConfig, QwenLanguage
from vla_accel.nn.reference import TransformerBlock
from vla_accel.nn.rtc import Guidance

_WIDE = ("vision.patch_", "vision.position_", "vision.class_", "head.state_", "head.action_in")
MOMENTS = 1000
"""Rows of the table of time embeddings."""


QWEN25 = QwenConfig(
    width=896, depth=14, mlp_dim=4864, heads=14, kv_heads=2, head_dim=64, vocab_size=151_674, theta=1e6,
    sections=(32, 0, 0), final_norm=True, qk_norm=False, qkv_bias=True,
)  # fmt: skip
"""The first layers of Qwen2.5-0.5B, as InternVL3-1B has them."""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of the action head, which is as wide as the language model. `state_hidden`, `hidden`: of the MLPs that read
    the state and write the velocity."""

    depth: int = 8
    heads: int = 8
    state_hidden: int = 1024
    hidden: int = 1024
    eps: float = 1e-5


@dataclass(frozen=True)
class Evo1Config:
    """Architecture and sizes.

    `arrangement`: of the prompt, whose `slots` are views that take places, present or not; `state_dim`, `action_dim`
    and `action_horizon`: the model's own (padded) sizes; `robot_action_dim`: the first numbers of an action, which the
    robot has; `num_steps`: the checkpoint's denoising steps; `max_token_len`: the longest prompt in tokens,
    those of images left out.
    """

    vision: InternVisionConfig = field(default_factory=InternVisionConfig)
    language: QwenConfig = QWEN25
    head: HeadConfig = field(default_factory=HeadConfig)
    arrangement: Arrangement = field(default_factory=lambda: Arrangement(6, 8, flat=True, slots=3))
    state_dim: int = 24
    action_dim: int = 24
    robot_action_dim: int = 7
    action_horizon: int = 50
    num_steps: int = 32
    max_token_len: int = 256

    def __post_init__(self) -> None:
        if self.vision.out_width != self.language.width:
            raise ConfigError(f"vision.out_width: expected {self.language.width}, got {self.vision.out_width}")
        if self.language.width % (2 * self.head.heads):
            raise ConfigError(
                f"head.heads: expected heads of equal, even width, {self.language.width} in all, got {self.head.heads}"
            )
        if self.robot_action_dim > self.action_dim or self.action_horizon < 2:
            raise ConfigError(
                f"robot_action_dim and action_horizon: expected at most {self.action_dim}, and at least 2, got "
                f"{self.robot_action_dim} and {self.action_horizon}"
            )

    @property
    def head_dim(self) -> int:
        """Width of the action head's heads."""
        return self.language.width // self.head.heads

    @property
    def block(self) -> Block:
        """A block of the action head."""
        width, heads = self.language.width, self.head.heads
        return Block(
            width, 4 * width, heads, heads, self.head_dim, self.head.eps, Norm.LAYER, Activation.GELU_ERF,
            Attention.CROSS, bias=True, rope=False, names=VIT,
        )  # fmt: skip

    def layout(self, views: int, text: int) -> Layout:
        """The layout of a prompt of `views` images and `text` tokens."""
        side = math.isqrt(self.vision.image_tokens)
        return Layout(views, (side, side), text, self.arrangement)


def evo1(**changes: object) -> Evo1Config:
    """Evo-1 at the published size (InternVL3-1B's first 14 layers, 0.8 B)."""
    return Evo1Config(**changes)  # type: ignore[arg-type]


class CrossBlock(TransformerBlock):
    """A block of the head: attention to the context alone, and an MLP that also reads the time."""

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.kv_proj = nn.Linear(block.width, 2 * block.width)

    def keys_values(self, context: Tensor) -> Tensor:
        """(B, S, width) to keys and values (2, B, S, heads, d)."""
        return self.kv_proj(context).unflatten(-1, (2, self.block.heads, -1)).permute(2, 0, 1, 3, 4)

    def forward(  # type: ignore[override]
        self, x: Tensor, keys: Tensor, values: Tensor, time: Tensor, mask: Tensor | None
    ) -> Tensor:
        """x (B, H, width) to the same shape. `time` (mlp_dim,): what is added to the MLP's first product in this step;
        mask (B, H, S) bool: True = may attend; None = all."""
        q = self.q_proj(reference.layer_norm(x, self.layer_norm1)).unflatten(-1, (self.block.heads, -1))
        x = x + self.out_proj(reference.attention(q, keys, values, mask).flatten(2))
        hidden = F.linear(reference.layer_norm(x, self.layer_norm2), self.fc1.weight) + time.to(x.dtype)
        return x + self.fc2(reference.activate(hidden, self.block.activation))


class Evo1Head(nn.Module):
    """The action head: a chunk of noisy actions to the velocity of all of it at once."""

    def __init__(self, config: Evo1Config) -> None:
        super().__init__()
        self.config = config
        width, hidden, chunk = config.language.width, config.head.hidden, config.action_horizon
        self.state_in = nn.Linear(config.state_dim, config.head.state_hidden)
        self.state_out = nn.Linear(config.head.state_hidden, width)
        self.action_in = nn.Linear(config.action_dim, width)
        self.action_mix, self.action_out = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(CrossBlock(config.block) for _ in range(config.head.depth))
        self.norm = nn.LayerNorm(width, eps=config.head.eps)
        self.pool = nn.Linear(chunk * width, width)
        self.decode_in, self.decode_out = nn.Linear(width, hidden), nn.Linear(hidden, chunk * config.action_dim)

    def state_token(self, state: Tensor) -> Tensor:
        """(B, state_dim) to (B, 1, width)."""
        return self.state_out(F.relu(self.state_in(state.to(self.state_in.weight.dtype))))[:, None]

    def cache(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (depth, B, S, heads, d) of every block from (B, S, width)."""
        keys, values = torch.stack([layer.keys_values(context) for layer in self._blocks()], 1)
        return keys, values

    def velocity(
        self, noisy: Tensor, time: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The flow's velocity, from noise to actions, at `noisy` (B, H, action_dim), same shape.

        `time` (depth, mlp_dim) and `positions` (H, width): as `Evo1.constants` has them, of one step; mask (B, S) bool.
        """
        wide, products = self.action_in.weight.dtype, self._blocks()[0].fc1.weight.dtype
        x = F.relu(self.action_in(noisy.to(wide))) + positions.to(wide)
        x = self.action_out(F.relu(self.action_mix(x.to(products))))
        seen = None if mask is None else mask[:, None].expand(-1, x.shape[1], -1)
        for index, layer in enumerate(self._blocks()):
            x = layer(x, keys[index], values[index], time[index], seen)
        pooled = self.pool(reference.layer_norm(x, self.norm).flatten(1))
        velocity = self.decode_out(F.relu(self.decode_in(pooled))).view_as(noisy)
        return self.of_robot(velocity)

    def of_robot(self, actions: Tensor) -> Tensor:
        """(..., action_dim), zero where the robot has no number."""
        used = self.config.robot_action_dim
        return F.pad(actions[..., :used], (0, self.config.action_dim - used))

    def _blocks(self) -> list[CrossBlock]:
        return list(self.layers)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StepConstants:
    """What depends on a schedule alone: `time` (n, depth, mlp_dim), the MLPs' first products of the time embeddings and
    their biases; `positions` (H, width) of the actions."""

    time: Tensor
    positions: Tensor


class Evo1(Network):
    """The model. Module names are the canonical checkpoint keys."""

    config: Evo1Config

    def __init__(self, config: Evo1Config) -> None:
        super().__init__()
        self.config = config
        self.vision = InternVision(config.vision)
        self.embed = nn.Embedding(config.language.vocab_size, config.language.width)
        self.language = QwenLanguage(config.language)
        self.head = Evo1Head(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.get_parameter("head.layers.0.fc1.weight").dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """The embeddings of patches, and the small projections of state and actions."""
        return name.startswith(_WIDE)

    def read(self, image_tokens: Tensor, tokens: Tensor, state: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Keys and values (depth, B, 1 + S, heads, d) of the state and of the prompt's S tokens, in this order.

        Args: image_tokens (B, I, width); tokens (B, L) int64, the text in the layout's order; state (B, state_dim).
        """
        text = self.embed(tokens).to(image_tokens.dtype)
        x = torch.cat((image_tokens, text), 1)[:, places.order]
        hidden = self.language(x, places.positions, places.order)
        return self.head.cache(torch.cat((self.head.state_token(state).to(hidden.dtype), hidden), 1))

    @staticmethod
    def moments(schedule: Schedule) -> list[int]:
        """The rows of the time table of the steps; 0 is noise."""
        last = MOMENTS - 1
        if schedule.is_uniform:
            return [int(step / schedule.steps * last) for step in range(schedule.steps)]
        # Rounded before the fraction is dropped: 1 - 0.9 is just below 0.1.
        return [int(round((1.0 - time) * last, 3)) for time in schedule.times[:-1]]

    @staticmethod
    def times(schedule: Schedule) -> list[float]:
        """The flow times of the steps, 1 for noise, with lerobot's rounding of equal steps."""
        if schedule.is_uniform:
            return [1.0 - step / schedule.steps for step in range(schedule.steps)]
        return list(schedule.times[:-1])

    def constants(self, schedule: Schedule) -> StepConstants:
        """Compute what depends on a schedule alone. Weights not in memory before are dropped."""
        names = [f"head.layers.{i}.fc1" for i in range(self.config.head.depth)]
        with self.present(*names):
            weights, biases = (
                torch.stack([self.get_parameter(f"{name}.{part}") for name in names]).float()
                for part in ("weight", "bias")
            )
            width, device = self.config.language.width, weights.device
            table = sinusoidal_table(torch.tensor(self.moments(schedule), device=device), width)
            positions = sinusoidal_table(torch.arange(self.config.action_horizon, device=device), width)
            return StepConstants(torch.einsum("nw,dmw->ndm", table, weights) + biases, positions)

    def integrate(
        self, noise: Tensor, constants: StepConstants, keys: Tensor, values: Tensor, mask: Tensor | None,
        guidance: Guidance, schedule: Schedule,
    ) -> Tensor:  # fmt: skip
        """Euler over the steps of a schedule, whose times fall while the model's own rise.

        noise (B, H, action_dim) float32; mask (B, S) bool, the keys that are no padding; returns the actions, same
        shape and dtype as the noise.
        """
        x = self.head.of_robot(noise)
        for step, dt in enumerate(schedule.dts):
            v = self.head.velocity(x, constants.time[step], constants.positions, keys, values, mask).to(x.dtype)
            x = x + dt * guidance.corrected(-v, x, step)
        return x


def sinusoidal_table(rows: Tensor, width: int) -> Tensor:
    """Sine and cosine of numbers (n,) by turns, at falling frequencies: (n, width) float32."""
    exponent = torch.arange(0, width, 2, device=rows.device) * (-math.log(10_000.0) / width)
    angles = rows[:, None] * exponent.exp()
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
