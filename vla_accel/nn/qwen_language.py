"""Qwen3-VL's language model, or its first layers, up to the output of the last of them before the final norm.

Knows nothing about images but where their tokens stand: rotary positions have three axes, and what vision's deepstack
left is added at image tokens after the first layers. Source of the mathematics: Qwen3-VL in transformers 5.5.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import Attention, Block, Norm
from vla_accel.nn.qwen_vision import Grid
from vla_accel.nn.reference import TransformerBlock

LEAD = 3
"""Prompt tokens before the first view: `<|im_start|>user` and a newline. Around every view stand one and one."""


@dataclass(frozen=True)
class QwenConfig:
    """Sizes of the language model. `sections`: how many rotary frequencies follow time, row and column."""

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
        """One block: q and k are normed by head before they are rotated; the MLP is gated by SiLU."""
        return Block(
            self.width, self.mlp_dim, self.heads, self.kv_heads, self.head_dim, self.eps, Norm.RMS, Activation.SWIGLU,
            Attention.CAUSAL, qk_norm=True,
        )  # fmt: skip


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
    """Where tokens stand in a prompt: `views` images of `grid` tokens each, and `text` tokens around and behind them;
    shorter prompts leave the last of these empty."""

    views: int
    grid: Grid
    text: int

    @property
    def view_tokens(self) -> int:
        """Tokens of one view."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.views * self.view_tokens + self.text

    def image_rows(self) -> Tensor:
        """Places of the image tokens, int64 (views * view_tokens,)."""
        start = LEAD + 1 + torch.arange(self.views)[:, None] * (self.view_tokens + 2)
        return (start + torch.arange(self.view_tokens)).flatten()

    def text_rows(self) -> Tensor:
        """Places of all others, int64 (text,)."""
        is_text = torch.ones(self.tokens, dtype=torch.bool)
        is_text[self.image_rows()] = False
        return is_text.nonzero().flatten()

    def places(self, device: torch.device) -> Places:
        """The same on a device."""
        image, text = self.image_rows(), self.text_rows()
        order = torch.cat((image, text)).argsort()
        return Places(*(t.to(device) for t in (image, text, order, self.positions())))

    def positions(self) -> Tensor:
        """Time, row and column of each token, int64 (3, tokens). Text counts on in all three; an image that begins at s
        lies at time s, s + row, s + column, and what follows it at s + its longer side."""
        rows, columns = self.grid
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        image = torch.stack((torch.zeros_like(row), row, column)).flatten(1)
        parts, start = [], 0

        def text(count: int) -> None:
            nonlocal start
            parts.append((start + torch.arange(count)).expand(3, -1))
            start += count

        text(LEAD)
        for _ in range(self.views):
            text(1)
            parts.append(start + image)
            start += max(self.grid)
            text(1)
        text(self.text - LEAD - 2 * self.views)
        return torch.cat(parts, 1)


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
    """The stack. There is no final norm: the action head reads the last layer's raw output."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(TransformerBlock(config.block) for _ in range(config.depth))

    def forward(self, x: Tensor, positions: Tensor, order: Tensor, deepstack: Tensor) -> Tensor:
        """x (B, S, width) to the same shape. positions (3, S); deepstack (n, B, I, width): added to the image tokens of
        the outputs of the first n layers; order (S,): the prompt out of image tokens and then text tokens.

        A token sees itself and those before it, so that padding behind a prompt changes nothing before it.
        """
        rope = language_rope(self.config, positions, x.dtype)
        tokens = x.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, causal)
            if index < len(deepstack):
                # Gathered, not scattered: TensorRT-RTX scatters nothing.
                x = x + F.pad(deepstack[index], (0, 0, 0, tokens - deepstack.shape[2]))[:, order]
        return x
