"""PaliGemma as π0, π0.5 and π0-FAST share it: SigLIP, a linear projector, and Gemma over image tokens and prompt.

Same mathematics as openpi's PyTorch model (Physical Intelligence, openpi, Apache-2.0)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.nn.padding import real_tokens
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.reference import PrefixStack
from vla_accel.nn.siglip import SiglipConfig, SiglipVision


class PaliGemmaSizes:
    """What follows from the sizes of a config with a `vision`."""

    vision: SiglipConfig

    @property
    def image_tokens(self) -> int:
        """Prefix tokens of one view."""
        return self.vision.tokens

    @property
    def shuffle(self) -> int:
        """Patches along each side of the square that becomes one image token."""
        return 1

    @property
    def image_scale(self) -> float:
        """What image tokens are multiplied by on their way into the prefix."""
        return 1.0

    def prefix_tokens(self, views: int, tokens: int) -> int:
        """Tokens of a prefix of so many views and prompt tokens."""
        return views * self.image_tokens + tokens


class PaliGemma(PrefixNetwork):
    """The part that sees and reads. Module names are the canonical checkpoint keys."""

    def make_prefix(self) -> None:
        """Its modules, of the sizes in `config`."""
        config = self.config
        self.vision = SiglipVision(config.vision)
        self.projector = nn.Linear(config.vision.width, config.prefix.width)
        self.embed = nn.Embedding(config.vocab_size, config.prefix.width)
        self.prefix = PrefixStack(config.prefix.block(), config.prefix.depth)

    @staticmethod
    def kept_wide(name: str) -> bool:
        """What openpi keeps in float32: patch and position embeddings, and Gemma's norms."""
        small = name.startswith(("vision.patch_embedding", "vision.position_embedding"))
        return small or (not name.startswith("vision.") and "norm" in name)

    def project(self, features: Tensor) -> Tensor:
        """Not scaled."""
        return F.linear(features, self.projector.weight, self.projector.bias)

    def prefix_cache(self, image_tokens: Tensor, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix, each (depth, B, S, kv_heads, head_dim), S = image tokens + L.

        Args: image_tokens (B, I, width); tokens (B, L) int64; mask (B, S) bool, True = real, None = all real.
        """
        x, _, _ = self.prefix_rows(image_tokens, tokens)
        return self.prefix(x, *prefix_positions(x, mask))

    def keys_values(self, image_tokens: Tensor, tokens: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        total = image_tokens.shape[1] + tokens.shape[1]
        return self.prefix_cache(image_tokens, tokens, real_tokens(rest[0], total) if rest else None)

    def prefix_rows(
        self, image_tokens: Tensor, tokens: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x = torch.cat((image_tokens, self.embed_tokens(tokens).to(image_tokens.dtype)), dim=1)
        return x, *prefix_positions(x, None)


def prefix_positions(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Positions (B, S) and attention mask (B, S, S) or None for a prefix x (B, S, width) of which `mask` is real."""
    batch, length = x.shape[:2]
    if mask is None:
        return torch.arange(length, device=x.device).expand(batch, length), None
    positions = mask.cumsum(1) - 1
    # A padded row may attend to itself only: it is never read, and a row with nothing to attend to would be NaN.
    allowed = mask[:, None, :] & mask[:, :, None]
    return positions, allowed | torch.eye(length, dtype=torch.bool, device=x.device)
