"""A component as data: what an engine needs to know to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from vla_accel.config import EngineSpec
from vla_accel.errors import ConfigError
from vla_accel.fp8 import Products

OVERLAP = "the first step overlaps the prefix"
"""Ledger text of a loop whose first step overlaps the prefix. The time of that step counts as the prefix's."""


class Program(Protocol):
    """A component written in fused ops. It reads and writes static buffers, and keeps nothing that a call allocates.

    A program may also have `follow(earlier, outputs)`: from then on it overlaps the program before it, which writes
    `outputs`, if that is possible. It returns what overlaps, for the ledger; empty if nothing does.

    A program that may end early runs `begin(inputs)`, `advance()` at most `turns` times until the tensor `finished`
    (1,) bool is true, and `end(outputs)`. Only `begin` reads inputs, and only `end` writes outputs.
    """

    detail: str
    """What exactly runs, for the ledger."""

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class TensorSpec:
    """One named input or output.

    `shape`: of the example; `ranges`: (minimum, maximum) of each dynamic dimension; `example`: values along the last
    axis to try the component with, if random values are not valid.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    example: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for dim, (low, high) in self.ranges.items():
            if not (0 <= dim < len(self.shape) and low <= self.shape[dim] <= high):
                problem = f"range {low}..{high} of dimension {dim} does not hold shape {self.shape}"
                raise ConfigError(f"tensor {self.name}: {problem}")

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Component:
    """A module with named, typed inputs and outputs.

    Attributes:
        module: called with tensors in the order of `inputs`; returns one tensor or a tuple in the order of `outputs`.
        native: makes the fused program for the native engine.
        variants: makes the module at another precision ("fp16", "fp8"), with the same inputs and outputs.
        loop: makes the component as one body that runs several times, for engines whose graph would be too large.
        quantised: which products each engine computes in FP8, by the name of the engine.
        fetch: reads the weights of `module` and returns them; None if they are in memory.
        products: the dtype of the module's large products, if it is not that of the first output.
        seldom: whether the inputs, which come from the host, seldom change, such as an instruction's tokens. If the
            second component sets this, a call with unchanged inputs skips it and reuses its outputs. It must not be the
            last component; `Pipeline` refuses it in any other place.
    """

    name: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    native: Callable[[EngineSpec], Program] | None = None
    variants: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    loop: Callable[[], Loop] | None = None
    quantised: Mapping[str, Products] = field(default_factory=dict)
    fetch: Callable[[], Sequence[Tensor]] | None = None
    products: torch.dtype | None = None
    seldom: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's large products, which precision "auto" keeps."""
        return self.outputs[0].dtype if self.products is None else self.products

    def weights(self) -> Sequence[Tensor]:
        """Read the weights that `module` computes with, if they are not in memory, and return them."""
        return list(self.module.parameters()) if self.fetch is None else self.fetch()


@dataclass(frozen=True)
class Loop:
    """A component as `count` runs of `body`, each on the result of the run before.

    Attributes:
        carry: the body's input and output that are carried from run to run.
        start: the component's input that feeds the first run.
        end: the component's output that takes the last result.
        rows: (count, *shape) tensors for body inputs that change every run. All other body inputs are component inputs
            of the same name.
    """

    body: Component
    count: int
    carry: tuple[str, str]
    start: str
    end: str
    rows: Mapping[str, Tensor]


class Island(nn.Module):
    """A part of a module that some engines build on its own. `name`: for messages and cache entries."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name, self.inner = name, inner

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(*inputs)
