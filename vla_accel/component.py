"""A component as plain data: what an engine needs to know to be built. No behaviour, no engines."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError


@dataclass(frozen=True)
class TensorSpec:
    """One named input or output.

    `shape`: of the example. `ranges`: for each dynamic dimension its (minimum, maximum); absent means static.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for dim, (low, high) in self.ranges.items():
            if not (0 <= dim < len(self.shape) and low <= self.shape[dim] <= high):
                raise ConfigError(
                    f"tensor {self.name}: range {low}..{high} of dimension {dim} does not hold shape {self.shape}"
                )

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Component:
    """A module with named, typed inputs and outputs.

    `module(*inputs)`, in the order of `inputs`, returns one tensor or a tuple in the order of `outputs`.
    """

    name: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
