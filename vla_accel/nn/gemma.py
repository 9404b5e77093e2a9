"""Sizes of the language models of π0 (Gemma) and SmolVLA (SmolLM2), and π0's action expert.

Differences from the stock Gemma, as in openpi: no √width normaliser inside, no output head, adaptive RMSNorm in the
expert. SmolLM2 differs from Gemma in its norm, in SwiGLU, and in its rotation in float32, whose base is 10,000 as in
lerobot, not SmolLM2's 100,000.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.nn.block import Attention, Block, Norm
from vla_accel.nn.reference import TransformerBlock, apply_norm, make_norm


@dataclass(frozen=True)
class GemmaConfig:
    """Sizes of one Gemma stack."""

    width: int
    depth: int
    mlp_dim: int
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"gemma.heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"gemma.head_dim {self.head_dim} must be even for rotary embeddings")

    @property
    def qkv_dim(self) -> int:
        """Rows of the fused q, k, v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def block(self, norm: Norm = Norm.GEMMA, attention: Attention = Attention.CACHED) -> Block:
        """One block of the stack."""
        return Block(
            self.width, self.mlp_dim, self.heads, self.kv_heads, self.head_dim, self.eps, norm, Activation.GEGLU,
            attention,
        )  # fmt: skip


@dataclass(frozen=True)
class SmolLmConfig(GemmaConfig):
    """Sizes of one SmolLM2 stack; by default the first 16 layers of SmolLM2 360M."""

    width: int = 960
    depth: int = 16
    mlp_dim: int = 2560
    heads: int = 15
    kv_heads: int = 5
    head_dim: int = 64
    eps: float = 1e-5

    def block(self, norm: Norm = Norm.RMS, attention: Attention = Attention.CACHED) -> Block:
        return replace(super().block(norm, attention), activation=Activation.SWIGLU, wide_rope=True)


class GemmaExpert(nn.Module):
    """The action expert: every layer attends to the cached prefix of the same layer and to the suffix itself."""

    def __init__(self, config: GemmaConfig, adaptive: bool) -> None:
        super().__init__()
        self.config, self.adaptive = config, adaptive
        block = config.block(Norm.ADAPTIVE_RMS if adaptive else Norm.GEMMA)
        self.layers = nn.ModuleList(TransformerBlock(block) for _ in range(config.depth))
        self.norm = make_norm(block)

    def norm_names(self) -> list[str]:
        """Layer 0 input, layer 0 post-attention, layer 1 input, …, final: the order of `forward`'s modulations."""
        parts = ("input_layernorm", "post_attention_layernorm")
        return [*(f"layers.{i}.{part}" for i in range(len(self.layers)) for part in parts), "norm"]

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        keys: Tensor | list[Tensor],
        values: Tensor | list[Tensor],
        mask: Tensor | None,
        modulations: Tensor | None,
    ) -> Tensor:
        """Run the suffix tokens through the stack and the final norm.

        Args:
            x: (B, T, width).
            positions: (B, T).
            keys, values: per layer (B, S, kv_heads, d).
            mask: (B, T, S + T) bool, or None.
            modulations: (..., 2 * depth + 1, 3 * width), whose leading axes broadcast to (B, T), or None.

        Returns:
            (B, T, width).
        """
        rope = reference.rope_tables(positions, self.config.head_dim, x.dtype)
        rows = [None] * (2 * len(self.layers) + 1) if modulations is None else modulations.unbind(-2)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, TransformerBlock)
            q, k, v, gate = layer.qkv(x, rope, rows[2 * index])
            k = torch.cat((keys[index], k), dim=1)
            v = torch.cat((values[index], v), dim=1)
            x = layer.finish(x, reference.attention(q, k, v, mask), gate, rows[2 * index + 1])
        return apply_norm(self.norm, x, rows[-1])[0]
