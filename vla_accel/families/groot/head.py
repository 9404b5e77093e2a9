"""GR00T's action head: vision-language attention before the diffusion transformer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vla_accel.kernels import reference
from vla_accel.nn.block import Block, vit_block
from vla_accel.nn.dit import DitConfig, DitHead
from vla_accel.nn.reference import TransformerBlock


@dataclass(frozen=True)
class HeadConfig(DitConfig):
    """Sizes. `vl_*`: of the vision-language attention, whose width is the language model's."""

    vl_depth: int = 4
    vl_heads: int = 32
    vl_mlp_dim: int = 8192

    @property
    def vl_block(self) -> Block:
        """A block of the vision-language attention."""
        return vit_block(self.vl_width, self.vl_heads, self.vl_mlp_dim, self.eps)


class GrootHead(DitHead):
    """The head of one embodiment."""

    config: HeadConfig

    def __init__(self, config: HeadConfig, state_dim: int, action_dim: int) -> None:
        super().__init__(config, state_dim, action_dim)
        self.vl_norm = nn.LayerNorm(config.vl_width, eps=config.eps)
        self.vl_layers = nn.ModuleList(TransformerBlock(config.vl_block) for _ in range(config.vl_depth))

    def features(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        """The language model's output (B, S, vl_width) through norm and attention, same shape. `real` (B, S) bool:
        tokens that are no padding, None: all. Padding is not attended to: a row is what it would be alone."""
        x = reference.layer_norm(hidden, self.vl_norm)
        mask = None if real is None else real[:, None].expand(-1, x.shape[1], -1)
        for layer in self.vl_layers:
            x = layer(x, mask=mask)
        return x
