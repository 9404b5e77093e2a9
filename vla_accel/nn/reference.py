"""The blocks of `nn.block` in plain torch: for the eager engine, for training, and as the reference of tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.nn.block import Block, Norm

Rope = tuple[Tensor, Tensor]
"""cos and sin, each (..., tokens, 1, head_dim / 2)."""


class RmsNorm(nn.Module):
    """RMSNorm whose factor is `offset` + weight: the offset is 1 in Gemma and 0 in Llama."""

    def __init__(self, width: int, eps: float, offset: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset == 0.0 and x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # the same rounding, in one kernel
        return reference.rms_norm(x, self.weight, self.eps, self.offset)

    @property
    def factor(self) -> Tensor:
        """What normed rows are multiplied by, (width,) float64."""
        return self.offset + self.weight.double()


class AdaRmsNorm(nn.Module):
    """Adaptive RMSNorm: a dense layer of the condition gives scale, shift and gate, in this order."""

    def __init__(self, width: int, cond_dim: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(cond_dim, 3 * width)
        self.eps = eps


def make_norm(block: Block) -> nn.Module:
    """The norm of a block, with its weights."""
    width, eps = block.width, block.eps
    if block.norm is Norm.LAYER:
        return nn.LayerNorm(width, eps=eps)
    if block.norm is Norm.ADAPTIVE_RMS:
        return AdaRmsNorm(width, width, eps)
    return RmsNorm(width, eps, offset=1.0 if block.norm is Norm.GEMMA else 0.0)


def apply_norm(norm: nn.Module, x: Tensor, modulation: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Norm x (..., width) and return the gate of the coming residual, None if the norm has no gate.

    `modulation` (..., 3 * width): `dense` of an adaptive norm's condition. The caller computes it, because it depends
    on the step alone.
    """
    if isinstance(norm, AdaRmsNorm):
        if modulation is None:
            raise ValueError("AdaRmsNorm needs its modulation, got None")
        scale, shift, gate = modulation.chunk(3, dim=-1)
        return reference.adarms(x, scale, shift, norm.eps), gate
    return reference.layer_norm(x, norm) if isinstance(norm, nn.LayerNorm) else norm(x), None


class TransformerBlock(nn.Module):
    """A `Block` in torch. Module names are `block.names`."""

    layer_norm1: nn.LayerNorm
    layer_norm2: nn.LayerNorm
    input_layernorm: RmsNorm
    post_attention_layernorm: RmsNorm
    qkv_proj: nn.Linear
    q_proj: nn.Linear
    o_proj: nn.Linear
    out_proj: nn.Linear
    gate_up_proj: nn.Linear
    down_proj: nn.Linear
    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        names, attended = block.names, block.heads * block.head_dim
        if block.norm is Norm.ADAPTIVE_LAYER:
            self.modulation = nn.Linear(block.width, 2 * block.width)
        else:
            self.add_module(names.norm, make_norm(block))
        self.add_module(block.first, nn.Linear(block.width, block.qkv_dim, bias=block.has_bias(block.first)))
        if block.qk_norm:
            self.q_norm = RmsNorm(block.head_dim, block.eps, offset=0.0)
            self.k_norm = RmsNorm(block.head_dim, block.eps, offset=0.0)
        self.add_module(names.out, nn.Linear(attended, block.width, bias=block.bias))
        if block.norm is not Norm.ADAPTIVE_LAYER:
            self.add_module(names.mlp_norm, make_norm(block))
        hidden = block.mlp_dim * (2 if block.activation.gated else 1)
        self.add_module(names.up, nn.Linear(block.width, hidden, bias=block.bias))
        self.add_module(names.down, nn.Linear(block.mlp_dim, block.width, bias=block.bias))
        self.layer_scale1 = nn.Parameter(torch.ones(block.width)) if block.layer_scale else None
        self.layer_scale2 = nn.Parameter(torch.ones(block.width)) if block.layer_scale else None

    def part(self, name: str) -> nn.Module:
        """The module of one of `block.names`."""
        return self._modules[name]  # type: ignore[return-value]

    def qkv(
        self, x: Tensor, rope: Rope | None, modulation: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x (B, T, width) to q (B, T, heads, d), k and v (B, T, kv_heads, d), and the gate of the residual."""
        b = self.block
        normed, gate = apply_norm(self.part(b.names.norm), x, modulation)
        projected = self.part(b.names.qkv)(normed).unflatten(-1, (-1, b.head_dim))
        q, k, v = projected.split((b.heads, b.kv_heads, b.kv_heads), dim=2)
        if b.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (reference.apply_rope(x, *rope).to(v.dtype) for x in (q, k))
        return q, k, v, gate

    def finish(
        self, x: Tensor, attended: Tensor, gate: Tensor | None = None, modulation: Tensor | None = None
    ) -> Tensor:
        """Output projection, residual, MLP, residual. `attended` (B, T, heads, d)."""
        b = self.block
        gate = self.layer_scale1 if b.layer_scale else gate
        x = reference.gated_residual(x, self.part(b.names.out)(attended.flatten(2)), gate)
        if b.norm is Norm.ADAPTIVE_LAYER:
            normed, gate = F.layer_norm(x, (b.width,), eps=b.eps), None
        else:
            normed, gate = apply_norm(self.part(b.names.mlp_norm), x, modulation)
        gate = self.layer_scale2 if b.layer_scale else gate
        return reference.gated_residual(x, self.mlp(normed), gate)

    def mlp(self, normed: Tensor) -> Tensor:
        """The MLP of normed rows (B, T, width), same shape."""
        b = self.block
        return self.part(b.names.down)(reference.activate(self.part(b.names.up)(normed), b.activation))

    def forward(self, x: Tensor, rope: Rope | None = None, mask: Tensor | None = None) -> Tensor:
        """Attention of the rows to themselves: x (B, T, width) to the same shape. mask (B, T, T) bool: True = may
        attend; None = all."""
        q, k, v, gate = self.qkv(x, rope)
        return self.finish(x, reference.attention(q, k, v, mask), gate)


class PrefixStack(nn.Module):
    """Blocks that leave keys and values. There is no final norm, because nothing reads the last output."""

    def __init__(self, block: Block, depth: int) -> None:
        super().__init__()
        self.block = block
        self.layers = nn.ModuleList(TransformerBlock(block) for _ in range(depth))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and values, each (depth, B, S, kv_heads, head_dim).

        The last block stops after its keys and values.

        Args:
            x: (B, S, width).
            positions: (B, S) int.
            mask: (B, S, S) bool, or None when every token is real.
        """
        keys, values, _ = self.run(x, positions, mask)
        return torch.stack(keys), torch.stack(values)

    def rope(self, x: Tensor, positions: Tensor) -> Rope:
        """The tables that rotate the rows x at these positions (B, S)."""
        dtype = torch.promote_types(x.dtype, torch.float32) if self.block.wide_rope else x.dtype
        return reference.rope_tables(positions, self.block.head_dim, dtype)

    def run(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """As `forward`, but lists per block, and the input of the last block (B, S, width)."""
        rope = self.rope(x, positions)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, block in enumerate(self.layers):
            assert isinstance(block, TransformerBlock)
            q, k, v, gate = block.qkv(x, rope)
            keys.append(k)
            values.append(v)
            if index + 1 < len(self.layers):
                x = self.finish(index, x, reference.attention(q, k, v, mask), gate)
        return keys, values, x

    def finish(self, index: int, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        """A block after its attention; as `TransformerBlock.finish`."""
        block = self.layers[index]
        assert isinstance(block, TransformerBlock)
        return block.finish(x, attended, gate)
