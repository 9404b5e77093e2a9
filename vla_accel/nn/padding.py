"""Several lengths in one shape: which tokens are real, and how many views and tokens one engine may have to serve."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_accel.nn.network import Network
from vla_accel.numeric import round_up

MOST_VIEWS = 4
"""Views that one engine with dynamic shapes serves, at least."""
PROMPT_BUCKET = 32
"""Prompts are padded to multiples of this where engines take lengths, so that few graphs serve every prompt. What is
added is masked."""


def longest_prompt(model: Network, length: int = 0) -> int:
    """Prompt tokens that one engine with dynamic shapes serves: the model's longest, rounded up as padding does."""
    return max(length, padded_prompt(model.config.max_token_len))


def padded_prompt(tokens: int) -> int:
    """Prompt tokens of the bucket that a prompt of `tokens` is padded to."""
    return round_up(tokens, PROMPT_BUCKET)


def real_tokens(lengths: Tensor, total: int) -> Tensor:
    """Mask (B, total) bool of the first `lengths[b]` tokens."""
    return torch.arange(total, device=lengths.device) < lengths[:, None]
