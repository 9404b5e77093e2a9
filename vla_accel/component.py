"""A component as plain data: what an engine needs to know to be built. No behaviour, no engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from vla_accel.config import EngineSpec
from vla_accel.errors import ConfigError
from vla_accel.fp8 import Products

BESIDE = "the first step beside the prefix"
"""What a loop says in the ledger whose first step runs while the prefix does. In the times of the parts that step is
the prefix's."""


class Program(Protocol):
    """A component written in fused ops: reads and writes static buffers, allocates nothing that outlives a call."""

    detail: str
    """What exactly runs, for the ledger."""

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None: ...


class FollowingProgram(ABC):
    """A `Program` that may begin while the one in front of it runs."""

    @abstractmethod
    def follow(self, earlier: Program, outputs: Mapping[str, Tensor]) -> str:
        """From now on begin beside `earlier`, which writes `outputs`, if that is possible: what does, for the ledger;
        empty if nothing does."""


class TurnedProgram(ABC):
    """A `Program` that runs in turns, all alike, and may be done before the last: `begin`, `advance` at most `turns`
    times, `end`. Nothing but `begin` and `end` reads inputs or writes outputs."""

    detail: str
    turns: int
    finished: Tensor
    """(1,) bool: whether what is left would change nothing."""

    @abstractmethod
    def begin(self, inputs: Mapping[str, Tensor]) -> None: ...

    @abstractmethod
    def advance(self) -> None: ...

    @abstractmethod
    def end(self, outputs: Mapping[str, Tensor]) -> None: ...

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """All of it; a GPU is waited for after every turn."""
        self.begin(inputs)
        for _ in range(self.turns):
            self.advance()
            if bool(self.finished):
                break
        self.end(outputs)


@dataclass(frozen=True)
class TensorSpec:
    """One named input or output.

    `shape`: of the example. `ranges`: for each dynamic dimension its (minimum, maximum); absent means static.
    `example`: values along the last axis to try the component with, for an input of which random values are no example.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    example: tuple[float, ...] | None = None

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

    `module(*inputs)`, in the order of `inputs`, returns one tensor or a tuple in the order of `outputs`. `native`
    makes the component's fused program for the native engine, where there is one.
    """

    name: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    native: Callable[[EngineSpec], Program] | None = None
    # Other versions of the module by precision ("fp16", "fp8"), made when asked for. Same inputs and outputs.
    variants: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    # The component as one body run several times, for engines that unrolling would make large and slow to build.
    loop: Callable[[], Loop] | None = None
    # What each engine computes in FP8 at that precision, by the engine's name.
    quantised: Mapping[str, Products] = field(default_factory=dict)
    # Brings the weights that `module` computes with to the device, and returns them; None where they are there.
    fetch: Callable[[], Sequence[Tensor]] | None = None
    # The dtype of the module's large products, where the first output has another one.
    products: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's large products: the precision that "auto" stands for."""
        return self.outputs[0].dtype if self.products is None else self.products

    def weights(self) -> Sequence[Tensor]:
        """The weights that `module` computes with, on the device from now on."""
        return list(self.module.parameters()) if self.fetch is None else self.fetch()


@dataclass(frozen=True)
class Loop:
    """A component as `count` runs of `body`, each on the last one's result.

    `carry`: the body's input and output that go round; the first is fed from the component's input `start`, the last
    becomes the component's output `end`. `rows`: body inputs that change every run, (count, *shape) tensors. Every
    other body input is a component input of the same name.
    """

    body: Component
    count: int
    carry: tuple[str, str]
    start: str
    end: str
    rows: Mapping[str, Tensor]


class Island(nn.Module):
    """A part of a module that engines which cut modules up build on its own. In eager it is just the part.

    `name` (in messages and cache entries); `inner`: the part, of tensors only.
    """

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name, self.inner = name, inner

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(*inputs)
