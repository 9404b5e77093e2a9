"""Gemma as π0 uses it: a prefix stack that leaves keys and values, and an action expert that reads them.

Knows nothing about images, actions or time; the conditioning of adaptive norms arrives ready. Differences from the
stock language model, as in openpi: no √width normaliser inside, no output head, adaptive RMSNorm in the expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference


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


class RmsNorm(nn.Module):
    """Gemma's RMSNorm; the stored weight is an offset from one, or, in a subclass, from another `offset`."""

    offset: ClassVar[float] = 1.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.offset))
        self.eps = eps

    def forward(self, x: Tensor, modulation: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the normed x and the gate of the coming residual: None, this norm has no gate."""
        return reference.rms_norm(x, self.weight, self.eps, self.offset), None

    @property
    def factor(self) -> Tensor:
        """What normed rows are multiplied by, (width,) float64."""
        return self.offset + self.weight.double()


class AdaRmsNorm(nn.Module):
    """Adaptive RMSNorm: a dense layer of the conditioning gives scale, shift and gate, in this order."""

    def __init__(self, width: int, cond_dim: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(cond_dim, 3 * width)
        self.eps = eps

    def forward(self, x: Tensor, modulation: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`modulation` (..., 3 * width) is `dense(cond)`, computed by the caller: it depends on the step only."""
        if modulation is None:
            raise ValueError("AdaRmsNorm needs its modulation, got None")
        scale, shift, gate = modulation.chunk(3, dim=-1)
        return reference.adarms(x, scale, shift, self.eps), gate


class GemmaLayer(nn.Module):
    """One block, in three pieces, so that the last prefix layer can stop after its keys and values."""

    norm_type: ClassVar[type[RmsNorm]] = RmsNorm

    def __init__(self, config: GemmaConfig, adaptive: bool) -> None:
        super().__init__()
        width, self.config = config.width, config

        def norm() -> RmsNorm | AdaRmsNorm:
            return AdaRmsNorm(width, width, config.eps) if adaptive else self.norm_type(width, config.eps)

        self.input_layernorm = norm()
        self.qkv_proj = nn.Linear(width, config.qkv_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, width, bias=False)
        self.post_attention_layernorm = norm()
        self.gate_up_proj = nn.Linear(width, 2 * config.mlp_dim, bias=False)
        self.down_proj = nn.Linear(config.mlp_dim, width, bias=False)

    def qkv(
        self, x: Tensor, rope: tuple[Tensor, Tensor], modulation: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x (B, T, width) to rotated q (B, T, heads, d), rotated k and v (B, T, kv_heads, d), and the gate."""
        config = self.config
        normed, gate = self.input_layernorm(x, modulation)
        projected = self.qkv_proj(normed).unflatten(-1, (-1, config.head_dim))
        q, k, v = projected.split((config.heads, config.kv_heads, config.kv_heads), dim=2)
        return reference.apply_rope(q, *rope).to(v.dtype), reference.apply_rope(k, *rope).to(v.dtype), v, gate

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None, modulation: Tensor | None = None) -> Tensor:
        """Output projection, residual, MLP, residual. `attended` (B, T, heads, d)."""
        x = reference.gated_residual(x, self.o_proj(attended.flatten(2)), gate)
        normed, gate = self.post_attention_layernorm(x, modulation)
        return reference.gated_residual(x, self.down_proj(self.activate(self.gate_up_proj(normed))), gate)

    @staticmethod
    def activate(gate_up: Tensor) -> Tensor:
        """The MLP's activation: (..., 2 * mlp_dim), gate first, to (..., mlp_dim)."""
        return reference.geglu(gate_up)


class GemmaPrefix(nn.Module):
    """The prefix stack. `forward` fills the cache; there is no final norm, because nothing reads the last output."""

    layer_type: ClassVar[type[GemmaLayer]] = GemmaLayer

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(self.layer_type(config, adaptive=False) for _ in range(config.depth))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of every layer.

        Args: x (B, S, width); positions (B, S) int; mask (B, S, S) bool or None when every token is real.
        Returns: rotated keys and values, each (depth, B, S, kv_heads, head_dim). The last layer stops after its
        keys and values: its attention and MLP are dead work.
        """
        keys, values, _ = self.run(x, positions, mask)
        return torch.stack(keys), torch.stack(values)

    def run(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """As `forward`, but lists per layer and, besides, the input of the last layer (B, S, width)."""
        rope = reference.rope_tables(positions, self.config.head_dim, self.rope_dtype(x))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, module in enumerate(self.layers):
            assert isinstance(module, GemmaLayer)
            q, k, v, gate = module.qkv(x, rope)
            keys.append(k)
            values.append(v)
            if index + 1 < len(self.layers):
                x = module.finish(x, reference.attention(q, k, v, mask), gate)
        return keys, values, x

    @staticmethod
    def rope_dtype(x: Tensor) -> torch.dtype:
        """The dtype in which queries and keys are rotated."""
        return x.dtype


class GemmaExpert(nn.Module):
    """The action expert: every layer attends to the cached prefix of the same layer and to the suffix itself."""

    def __init__(self, config: GemmaConfig, adaptive: bool) -> None:
        super().__init__()
        self.config, self.adaptive = config, adaptive
        self.layers = nn.ModuleList(GemmaLayer(config, adaptive) for _ in range(config.depth))
        self.norm: RmsNorm | AdaRmsNorm = (
            AdaRmsNorm(config.width, config.width, config.eps) if adaptive else RmsNorm(config.width, config.eps)
        )

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
        """Suffix tokens through the stack and the final norm.

        Args: x (B, T, width); positions (B, T); keys, values: per layer (B, S, kv_heads, d); mask (B, T, S + T) bool
        or None; modulations (..., 2 * depth + 1, 3 * width), whose leading axes broadcast to (B, T), or None.
        Returns (B, T, width).
        """
        rope = reference.rope_tables(positions, self.config.head_dim, x.dtype)
        rows = [None] * (2 * len(self.layers) + 1) if modulations is None else modulations.unbind(-2)
        for index, module in enumerate(self.layers):
            assert isinstance(module, GemmaLayer)
            q, k, v, gate = module.qkv(x, rope, rows[2 * index])
            k = torch.cat((keys[index], k), dim=1)
            v = torch.cat((values[index], v), dim=1)
            x = module.finish(x, reference.attention(q, k, v, mask), gate, rows[2 * index + 1])
        return self.norm(x, rows[-1])[0]
