"""What `attach` needs to know of a class of policies, and of each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from vla_accel.config import PolicyConfig
from vla_accel.families.loading import Checkpoint


@dataclass(frozen=True)
class Call:
    """One call of a policy as this package's inputs.

    Attributes:
        observations: As `OptimizedPolicy.infer_batch` takes them.
        noise: (B, horizon, dimensions) that the caller passed, None if the policy draws it.
        prev_chunk: Normalized actions (k, n) or (B, k, n) of real-time chunking, None without.
        delay: The inference delay that belongs to `prev_chunk`.
    """

    observations: list[dict[str, Any]]
    noise: Tensor | None = None
    prev_chunk: Tensor | None = None
    delay: int = 0


class Reader(Protocol):
    """How to read a class of policies, and its calls.

    Attributes:
        checkpoint: The network with the policy's weights, and transforms of inputs that are normalized and tokenized.
        settings: The configuration of the engines.
        owner: The module whose method is replaced.
        method: The name of that method.
        takes_noise: Whether the method has an argument `noise`. The noise that others draw is recorded.
    """

    checkpoint: Checkpoint
    settings: PolicyConfig
    owner: nn.Module
    method: str
    takes_noise: bool

    def call(self, *args: Any, **kwargs: Any) -> Call:
        """Read the arguments of the method. Raises ConfigError for a call that only the policy can answer."""
        ...
