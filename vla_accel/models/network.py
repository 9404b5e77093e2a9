"""What every family's network has, whatever it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import nn

N = TypeVar("N", bound="Network")


class Network(nn.Module, ABC):
    """A model of some family. `config`: its architecture and sizes, a dataclass of the family's.

    Module names are the canonical checkpoint keys.
    """

    config: Any

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the large products; small projections and norms may be wider."""

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Whether a parameter stays in float32 in a network of products in BF16 or FP16."""
        del name
        return False

    def to_compute_dtype(self: N, dtype: torch.dtype) -> N:
        """Cast the large products to `dtype`, and what is `kept_wide` to float32 (float64 for float64), in place."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # One cast each: rounding everything first and widening some again would round what is to stay exact.
        for name, parameter in self.named_parameters():
            parameter.data = parameter.data.to(wide if self.kept_wide(name) else dtype)
        return self
