"""Qwen's language model, or its first layers: Qwen3-VL's, the plain one of Eagle, or Qwen2.5's.

Of images, it needs only the positions of their tokens. Qwen3-VL's rotary positions have three axes, and its deepstack
features of vision are added at image tokens after the first layers. Source of the mathematics: transformers 5.5.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import Attention, Block, Norm
from vla_accel.nn.qwen_vision import Grid
from vla_accel.nn.reference import RmsNorm, TransformerBlock

LEAD = 3
"""Prompt tokens before the first view: `<|im_start|>user` and a newline. Around every view stand one and one."""


@dataclass(frozen=True)
class QwenConfig:
    """Sizes of the language model. `sections`: how many rotary frequencies follow time, row and column; `final_norm`:
    whether the output is normed; `qk_norm`: whether the heads of q and k are normed (Qwen3); `qkv_bias`: whether q, k
    and v have biases (Qwen2.5)."""

    width: int = 2048
    depth: int = 16
    mlp_dim: int = 6144
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936
    eps: float = 1e-6
    theta: float = 5e6
    sections: tuple[int, ...] = (24, 20, 20)
    final_norm: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"language.heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if len(self.sections) != 3 or sum(self.sections) != self.head_dim // 2:
            raise ConfigError(
                f"language.sections: expected three that add up to {self.head_dim // 2}, got {list(self.sections)}"
            )

    @property
    def qkv_dim(self) -> int:
        """Rows of the fused q, k, v projection."""
        return self.block.qkv_dim

    @property
    def block(self) -> Block:
        """One block, whose MLP is gated by SiLU."""
        return Block(
            self.width, self.mlp_dim, self.heads, self.kv_heads, self.head_dim, self.eps, Norm.RMS, Activation.SWIGLU,
            Attention.CAUSAL, qkv_bias=self.qkv_bias, qk_norm=self.qk_norm,
        )  # fmt: skip


@dataclass(frozen=True)
class Arrangement:
    """Where the images are in a prompt.

    Attributes:
        edge: Text tokens in front of the first image or, if the text comes first, behind the last one.
        between: Text tokens between two images.
        text_first: Whether the instruction comes before the images. Shorter prompts are then padded in front.
        flat: Whether tokens are numbered in order; otherwise image tokens have rows and columns.
        slots: Images that a prompt's numbers and text are of; those beyond the views have no rows. 0: the views alone.
    """

    edge: int = LEAD + 1
    between: int = 2
    text_first: bool = False
    flat: bool = False
    slots: int = 0


@dataclass(frozen=True)
class Places:
    """A layout's tensors: rows of image tokens and of text tokens in a prompt, the prompt's `order` out of image tokens
    and then text tokens, and rotary `positions` (3, tokens)."""

    image: Tensor
    text: Tensor
    order: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Layout:
    """Where tokens are in a prompt: `views` images of `grid` tokens each, and `text` tokens around them. Text tokens
    are stored from the edge that the images have a fixed distance to, so that padding is always stored last."""

    views: int
    grid: Grid
    text: int
    arrangement: Arrangement = Arrangement()

    @property
    def view_tokens(self) -> int:
        """Tokens of one view."""
        return self.grid[0] * self.grid[1]

    @property
    def images(self) -> int:
        """Tokens of all views."""
        return self.views * self.view_tokens

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.images + self.text

    def image_rows(self) -> Tensor:
        """Rows of the image tokens, int64 (images,)."""
        at, step = self.arrangement, self.view_tokens + self.arrangement.between
        first = self.tokens - at.edge - self.views * step + at.between if at.text_first else at.edge
        start = first + torch.arange(self.views)[:, None] * step
        return (start + torch.arange(self.view_tokens)).flatten()

    def text_rows(self) -> Tensor:
        """Rows of all others as they are stored, int64 (text,)."""
        is_text = torch.ones(self.tokens, dtype=torch.bool)
        is_text[self.image_rows()] = False
        rows = is_text.nonzero().flatten()
        return rows.flip(0) if self.arrangement.text_first else rows

    def places(self, device: torch.device) -> Places:
        """The same on a device."""
        image, text = self.image_rows(), self.text_rows()
        order = torch.cat((image, text)).argsort()
        return Places(*(t.to(device) for t in (image, text, order, self.positions())))

    def positions(self) -> Tensor:
        """Time, row and column of each token, int64 (3, tokens). Text counts on in all three; an image that begins at s
        lies at time s, s + row, s + column, and what follows it at s + its longer side."""
        if self.arrangement.flat:
            whole = replace(self, views=max(self.views, self.arrangement.slots))
            present = torch.ones(whole.tokens, dtype=torch.bool)
            present[whole.image_rows()[self.images :]] = False
            return present.nonzero().flatten().expand(3, -1)
        rows, columns = self.grid
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        image = torch.stack((torch.zeros_like(row), row, column)).flatten(1)
        is_image = torch.zeros(self.tokens, dtype=torch.bool)
        is_image[self.image_rows()] = True
        parts, start, at = [], 0, 0
        while at < self.tokens:
            if is_image[at]:
                parts.append(start + image)
                start, at = start + max(self.grid), at + self.view_tokens
            else:
                parts.append(torch.full((3, 1), start))
                start, at = start + 1, at + 1
        return torch.cat(parts, 1)

    def real(self, lengths: Tensor) -> Tensor:
        """Which tokens are no padding, (B, tokens) bool, if `lengths` (B,) text tokens of each prompt are real."""
        at = torch.arange(self.tokens, device=lengths.device)
        padding = (self.text - lengths)[:, None]
        return at >= padding if self.arrangement.text_first else at < self.tokens - padding


def axes_of_frequencies(sections: tuple[int, ...]) -> Tensor:
    """Which of time, row and column each rotary frequency follows, int64 (head_dim / 2,): by turns, as long as an axis
    has some left, then time."""
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def language_rope(config: QwenConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for positions (3, S), each (S, 1, head_dim / 2)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device).to(wide) / config.head_dim
    inverse = 1.0 / config.theta**exponent
    axes = axes_of_frequencies(config.sections).to(positions.device)
    angles = positions.to(wide)[axes].T * inverse
    return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


class QwenLanguage(nn.Module):
    """The stack. Without `final_norm`, the output is that of the last layer as it is."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(TransformerBlock(config.block) for _ in range(config.depth))
        self.norm = RmsNorm(config.width, config.eps, offset=0.0) if config.final_norm else None

    def forward(
        self, x: Tensor, positions: Tensor, order: Tensor, deepstack: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        """x (B, S, width) to the same shape. A token sees itself and those before it.

        Args:
            positions: (3, S).
            order: (S,), the prompt out of image tokens and then text tokens.
            deepstack: (n, B, I, width), added to the image tokens of the outputs of the first n layers.
            real: (B, S) bool, the tokens that are no padding, if padding comes first. Padding at the end changes
                nothing before it and needs no mask.
        """
        *_, x = self.outputs(x, positions, order, deepstack, real)
        return x if self.norm is None else self.norm(x)

    def outputs(
        self, x: Tensor, positions: Tensor, order: Tensor, deepstack: Tensor | None = None, real: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield the output of each layer, before image features are added to it, and last the rows after all."""
        rope = language_rope(self.config, positions, x.dtype)
        tokens = x.shape[1]
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        if real is not None:
            # Padding sees itself, so that no row of the softmax is empty.
            seen = seen & (real[:, None] | torch.eye(tokens, dtype=torch.bool, device=x.device))
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, seen)
            yield x
            if deepstack is not None and index < len(deepstack):
                # Gathered, not scattered: TensorRT-RTX scatters nothing.
                x = x + F.pad(deepstack[index], (0, 0, 0, tokens - deepstack.shape[2]))[:, order]
        yield x
