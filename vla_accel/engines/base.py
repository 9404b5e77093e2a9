"""What every engine is: named static buffers on a device, and `run()`, which only enqueues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vla_accel.component import Component, TensorSpec
from vla_accel.config import PRECISIONS, EnginePrecision, EngineSpec
from vla_accel.errors import EngineError


@dataclass(frozen=True)
class Turns:
    """Work that may end early: `begin`, `advance` at most `count` times, until `finished` (1,) bool on the device is
    true, and `end`. All of them only enqueue."""

    count: int
    finished: Tensor
    begin: Callable[[], None]
    advance: Callable[[], None]
    end: Callable[[], None]


class Engine(ABC):
    """A component made runnable. `inputs` and `outputs` stay the same tensors for the engine's life."""

    name: str = ""
    detail: str = ""
    """What exactly runs inside, for the ledger."""
    capturable: bool = False
    """Whether `run` may be recorded into a CUDA graph."""
    needs: ClassVar[Literal["all", "parts", "nothing"]] = "all"
    """The model's own weights that must stay on the device for it: all, those of `Component.weights`, or none."""
    ahead_of_time: ClassVar[bool] = False
    """Whether it is built once and kept in the cache of engines, so that `vla-accel build` can build it beforehand."""

    by_time: ClassVar[bool] = False
    """Whether its builder takes the kernels that it finds the fastest, so that two builds may differ in their bits."""

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        """Why no component can run in this engine on `device`, and what to type where that helps; None where it can.

        Builds and loads no engine. What a component or a precision needs besides is said when it is built.
        """
        return None

    @classmethod
    def lacks(cls, component: Component, precision: EnginePrecision) -> str | None:
        """Why this engine cannot compute a component in `precision`; None where it can, or where only building it shows
        that it cannot."""
        has = PRECISIONS.get(cls.name, (precision,))
        return None if precision in has else f"it has {', '.join(has)}, got precision {precision}"

    def __init__(self, component: Component, device: torch.device, spec: EngineSpec) -> None:
        self.component, self.device, self.spec = component, device, spec
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.weights: Sequence[Tensor] = () if self.needs == "nothing" else component.weights()

    def write(self, name: str, value: Tensor) -> None:
        """Copy `value` into an input: the only door for data. Raises EngineError unless shape and dtype fit."""
        buffer = self.inputs.get(name)
        if buffer is None:
            raise EngineError(f"{self.component.name}: no input {name!r}; it has {', '.join(self.inputs)}")
        _check(self.component.name, name, value, buffer)
        buffer.copy_(value, non_blocking=True)

    def bind(self, name: str, source: Tensor) -> None:
        """Make another engine's output this engine's input: nothing is copied. Device must fit, too."""
        if name not in self.inputs:
            raise EngineError(f"{self.component.name}: no input {name!r}; it has {', '.join(self.inputs)}")
        _check(self.component.name, name, source, self.inputs[name])
        if source.device != self.inputs[name].device:
            raise EngineError(
                f"{self.component.name}.{name}: expected device {self.inputs[name].device}, got {source.device}"
            )
        self.inputs[name] = source

    def follow(self, earlier: Engine) -> str:
        """Begin while `earlier`, whose outputs this one reads, still runs, if that is possible: what of it does, for
        the ledger; empty if nothing does."""
        return ""

    @abstractmethod
    def run(self) -> None:
        """Enqueue the work on the current stream. Never synchronises, but where the work itself says when it ends."""

    def turns(self) -> Turns | None:
        """What `run` does, in pieces that a graph can hold; None where it is one piece."""
        return None

    def _allocate(self) -> None:
        self.inputs = {s.name: s.empty(self.device) for s in self.component.inputs}
        self.outputs = {s.name: s.empty(self.device) for s in self.component.outputs}


def _check(component: str, name: str, value: Tensor, like: Tensor | TensorSpec) -> None:
    if tuple(value.shape) != tuple(like.shape):
        raise EngineError(f"{component}.{name}: expected shape {tuple(like.shape)}, got {tuple(value.shape)}")
    if value.dtype != like.dtype:
        raise EngineError(f"{component}.{name}: expected dtype {like.dtype}, got {value.dtype}")
