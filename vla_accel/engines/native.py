"""The native engine runs a component's fused program; `graph.capture` records it into a CUDA graph.

Without a GPU the same program runs the ops' torch references, for checking; the ledger records it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from vla_accel.component import Component
from vla_accel.config import EngineSpec
from vla_accel.engines.base import Engine, Turns
from vla_accel.errors import EngineError
from vla_accel.kernels.attention.choice import Choice
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.nvrtc import on
from vla_accel.runtime import current


def why_not(gpu: Gpu, precision: str) -> str | None:
    """Why a GPU cannot run the native engine in a precision of `EngineSpec`; None if it can."""
    if gpu.bf16 and (precision != "fp8" or gpu.fp8) and (precision != "int8" or gpu.int8):
        return None
    needed = "8.9" if precision == "fp8" else "8.0"
    return f"the native engine needs compute capability {needed} or newer, this GPU ({gpu.name}) has {gpu.version}"


def _without_triton() -> str | None:
    found = importlib.util.find_spec("triton") is not None
    return None if found else "the native engine needs triton: pip install triton"


class NativeEngine(Engine):
    """Runs `component.native`'s program."""

    name = "native"
    needs = "nothing"

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        gpu = Gpu.of(device)
        if gpu is None:
            return "it needs a GPU; on a CPU it runs its reference operations, for checking"
        return why_not(gpu, "auto") or _without_triton()

    def __init__(self, component: Component, device: torch.device, spec: EngineSpec) -> None:
        super().__init__(component, device, spec)
        if component.native is None:
            raise EngineError(f"{component.name}: the native engine has no program for this component")
        if spec.keep and "native" not in component.quantised:
            raise EngineError(
                f"{component.name}: keep: expected none where no product is in FP8, got {', '.join(spec.keep)}"
            )
        runtime = current(device)
        gpu = runtime.gpu
        if gpu is not None:
            reason = why_not(gpu, spec.precision) or _without_triton()
            if reason is not None:
                raise EngineError(f"{component.name}: {reason}")
        self._allocate()
        kernels = "auto" if gpu is None else spec.native.kernels
        self.runtime = {"auto": runtime, "portable": runtime.portable, "triton": runtime.triton}[kernels]
        with self.runtime.open():
            self.program: Any = component.native(spec)
        if spec.attention not in ("auto", "own") and not isinstance(getattr(self.program, "attention", None), Choice):
            raise EngineError(f"{component.name}: attention: expected auto or own here, got {spec.attention}")
        self.capturable = device.type == "cuda"
        self.detail = self.program.detail if self.capturable else f"{self.program.detail}, torch reference ops (no GPU)"
        if runtime.deterministic:
            self.detail += ", no kernel chosen by measurement"
        if kernels != "auto" and self.runtime.gpu is not None:
            named = {"portable": "portable kernels", "triton": "Triton's kernels only"}[kernels]
            self.detail += f", {named} (as on compute capability {self.runtime.gpu.version})"

    def follow(self, earlier: Engine) -> str:
        if not (self.capturable and isinstance(earlier, NativeEngine) and hasattr(self.program, "follow")):
            return ""
        return self.program.follow(earlier.program, earlier.outputs)

    @torch.inference_mode()
    def run(self) -> None:
        self._enqueue(lambda: self.program(self.inputs, self.outputs))

    def turns(self) -> Turns | None:
        program = self.program
        if not hasattr(program, "turns"):
            return None
        return Turns(
            program.turns, program.finished, lambda: self._enqueue(lambda: program.begin(self.inputs)),
            lambda: self._enqueue(program.advance), lambda: self._enqueue(lambda: program.end(self.outputs)),
        )  # fmt: skip

    def _enqueue(self, work: Callable[[], None]) -> None:
        with on(self.device), self.runtime.open():
            work()
