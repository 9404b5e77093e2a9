"""π0-FAST at any size: PaliGemma alone, which writes a chunk of actions as tokens, one after the other.

Same mathematics as lerobot's `pi0_fast` (Hugging
Face, Apache-2.0; Pertsch et al. 2025) where it decodes greedily with a cache: the prefix is images, prompt and a last
<bos>, all of which see each other; every further token sees all before it. The exact savings of `models.pi0` apply, and
one more: the last prefix token is run once more as the first token that is decoded, against the keys and values that
it left. So the prefix stops after its last keys and values here, too, and one step decodes every token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.kernels import reference
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.paligemma import PaliGemma, PaliGemmaSizes
from vla_accel.nn.reference import RmsNorm, TransformerBlock
from vla_accel.nn.siglip import SiglipConfig


@dataclass(frozen=True)
class Pi0FastConfig(PaliGemmaSizes):
    """Architecture and sizes.

    `action_dim` and `action_horizon`: of the robot's chunk, nothing is padded; `max_token_len`: the longest prompt in
    tokens, with the <bos> behind it; `max_steps`: tokens that are decoded at most; `stop_token`: the one that ends the
    actions, None to decode `max_steps` always; `tied`: the embedding is the head, too.
    """

    vision: SiglipConfig = field(default_factory=SiglipConfig)
    prefix: GemmaConfig = field(default_factory=lambda: GemmaConfig(2048, 18, 16384))
    vocab_size: int = 257_152
    action_dim: int = 7
    action_horizon: int = 50
    max_token_len: int = 201
    max_steps: int = 256
    stop_token: int | None = None
    tied: bool = True

    @property
    def num_steps(self) -> int:
        """The most tokens of a call, which are its steps."""
        return self.max_steps

    def __post_init__(self) -> None:
        if self.stop_token is not None and not 0 <= self.stop_token < self.vocab_size:
            raise ConfigError(f"stop_token: expected a token below {self.vocab_size}, got {self.stop_token}")


def pi0_fast(**changes: object) -> Pi0FastConfig:
    """π0-FAST at the published size (SigLIP So400m/14, Gemma 2B)."""
    return Pi0FastConfig(**changes)  # type: ignore[arg-type]


class Pi0Fast(PaliGemma):
    """The model. Module names are the canonical checkpoint keys."""

    config: Pi0FastConfig

    def __init__(self, config: Pi0FastConfig) -> None:
        super().__init__()
        self.config = config
        self.make_prefix()
        self.norm = RmsNorm(config.prefix.width, config.prefix.eps)
        if not config.tied:
            self.head = nn.Linear(config.prefix.width, config.vocab_size, bias=False)

    @property
    def head_name(self) -> str:
        """The module whose weight (vocab_size, width) makes logits."""
        return "embed" if self.config.tied else "head"

    def logits(self, x: Tensor) -> Tensor:
        """Of the next token, (B, vocab_size), from the stack's output x (B, width)."""
        return F.linear(self.norm(x), self.get_parameter(f"{self.head_name}.weight"))

    def step(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The tokens (B,) int64 that follow `tokens` (B,) int64 at `positions` (B,) int64.

        keys, values (depth, B, C, kv_heads, head_dim) hold those of all tokens before, row b's at 0 … positions[b] - 1,
        and get this one's.
        """
        x = self.embed_tokens(tokens)[:, None]
        rope = reference.rope_tables(positions[:, None], self.config.prefix.head_dim, x.dtype)
        rows = torch.arange(len(tokens), device=tokens.device)
        seen = (torch.arange(keys.shape[2], device=tokens.device) <= positions[:, None])[:, None]
        for index, layer in enumerate(self.prefix.layers):
            assert isinstance(layer, TransformerBlock)
            q, k, v, _ = layer.qkv(x, rope)
            keys[index, rows, positions], values[index, rows, positions] = k[:, 0], v[:, 0]
            x = layer.finish(x, reference.attention(q, keys[index], values[index], seen), None)
        return self.logits(x[:, 0]).argmax(-1)

    def decode(self, first: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, steps: int) -> Tensor:
        """Greedy tokens (B, steps) int64. Ends when every row has the stop token; what is left is 0.

        Args: first (B,) int64: the last token of each row's prefix; lengths (B,): its real tokens, that one included;
        keys, values (depth, B, S, kv_heads, head_dim) of the prefix.
        """
        batch = len(first)
        longer = (0, 0, 0, 0, 0, steps)
        keys, values = F.pad(keys, longer), F.pad(values, longer)
        found = first.new_zeros(batch, steps)
        done = torch.zeros(batch, dtype=torch.bool, device=first.device)
        token, positions = first, lengths.long() - 1
        for step in range(steps):
            token = self.step(token, positions, keys, values)
            found[:, step] = token
            positions = positions + 1
            if self.config.stop_token is not None:
                done |= token == self.config.stop_token
                if bool(done.all()):
                    break
        return found


def last_tokens(tokens: Tensor, total: int, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last real token (B,) int64 of each prompt (B, L), and the prefix's lengths (B,) int64 of `total` at most."""
    batch, count = tokens.shape
    lengths = tokens.new_full((batch,), total) if lengths is None else lengths.long()
    return tokens.gather(1, (lengths - (total - count) - 1)[:, None])[:, 0], lengths
