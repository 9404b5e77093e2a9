"""The engine contract: named static buffers on a device, and `run()`, which only enqueues work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vla_accel.component import Component
from vla_accel.config import PRECISIONS, EnginePrecision, EngineSpec
from vla_accel.errors import EngineError


@dataclass(frozen=True)
class Turns:
    """Work that may end early: `begin`, `advance` at most `count` times until `finished` (1,) bool on the device is
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
    """The model's weights that must stay on the device: all, those of `Component.weights`, or none."""
    ahead_of_time: ClassVar[bool] = False
    """Whether `vla-accel build` can build it into the cache of engines."""
    by_time: ClassVar[bool] = False
    """Whether its builder picks kernels by measuring, so that two builds may differ in their bits."""

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        """Why no component can run in this engine on `device` and what to type instead; None if one can."""
        return None

    @classmethod
    def lacks(cls, component: Component, precision: EnginePrecision) -> str | None:
        """Why this engine cannot compute a component in `precision`; None if it can, or if only building shows it."""
        has = PRECISIONS.get(cls.name, (precision,))
        return None if precision in has else f"it has {', '.join(has)}, got precision {precision}"

    def __init__(self, component: Component, device: torch.device, spec: EngineSpec) -> None:
        self.component, self.device, self.spec = component, device, spec
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.weights: Sequence[Tensor] = () if self.needs == "nothing" else component.weights()

    def write(self, name: str, value: Tensor) -> None:
        """Copy `value` into an input. Raises EngineError unless shape and dtype fit."""
        self._checked(name, value).copy_(value, non_blocking=True)

    def bind(self, name: str, source: Tensor) -> None:
        """Read an input from `source`, such as another engine's output, without a copy. Raises EngineError."""
        buffer = self._checked(name, source)
        if source.device != buffer.device:
            raise EngineError(f"{self.component.name}.{name}: expected device {buffer.device}, got {source.device}")
        self.inputs[name] = source

    def follow(self, earlier: Engine) -> str:
        """Overlap `earlier`, whose outputs this engine reads, if possible; return what overlaps, for the ledger."""
        return ""

    @abstractmethod
    def run(self) -> None:
        """Enqueue the work on the current stream. Synchronises only where the work itself decides when it ends."""

    def turns(self) -> Turns | None:
        """The work of `run` in pieces that a graph can hold; None if it is one piece."""
        return None

    def _allocate(self) -> None:
        self.inputs = {s.name: s.empty(self.device) for s in self.component.inputs}
        self.outputs = {s.name: s.empty(self.device) for s in self.component.outputs}

    def _checked(self, name: str, value: Tensor) -> Tensor:
        """The buffer of an input that `value` fits."""
        buffer = self.inputs.get(name)
        if buffer is None:
            raise EngineError(f"{self.component.name}: no input {name!r}; it has {', '.join(self.inputs)}")
        if value.shape != buffer.shape:
            expected, got = tuple(buffer.shape), tuple(value.shape)
            raise EngineError(f"{self.component.name}.{name}: expected shape {expected}, got {got}")
        if value.dtype != buffer.dtype:
            raise EngineError(f"{self.component.name}.{name}: expected dtype {buffer.dtype}, got {value.dtype}")
        return buffer

    def _copy_results(self, results: Any) -> None:
        """Copy what the module returned into the output buffers."""
        results, count = results if isinstance(results, tuple) else (results,), len(self.outputs)
        if len(results) != count:
            raise EngineError(f"{self.component.name}: declared {count} outputs, the module returned {len(results)}")
        for (name, buffer), result in zip(self.outputs.items(), results, strict=True):
            if result.shape != buffer.shape or result.dtype != buffer.dtype:
                raise EngineError(
                    f"{self.component.name}.{name}: declared {tuple(buffer.shape)} {buffer.dtype}, "
                    f"the module returned {tuple(result.shape)} {result.dtype}"
                )
            buffer.copy_(result)
