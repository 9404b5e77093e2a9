"""One component ready to be called: its engine, in a CUDA graph if the engine allows one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vla_accel.component import Component
from vla_accel.config import EngineSpec
from vla_accel.engines import Engine, build
from vla_accel.engines.graph import capture
from vla_accel.errors import EngineError
from vla_accel.ledger import Ledger


class Stage:
    """`stage(name=tensor, …)` copies the inputs, enqueues the work and returns the static output buffers.

    `engine`, if any, is already recorded in the ledger; otherwise one is built.
    """

    def __init__(
        self, component: Component, spec: EngineSpec, device: torch.device, ledger: Ledger, engine: Engine | None = None
    ) -> None:
        self.component = component
        free = _free(device)
        self.engine = engine or build(component, spec, device=device, ledger=ledger)
        for buffer in self.engine.inputs.values():
            # The warm-up on uninitialised memory could index a table out of range.
            buffer.zero_()
        graph = capture([(component.name, self.engine)], lambda: None, ledger) if self.engine.capturable else None
        self.run: Callable[[], None] = graph.replay if graph is not None else self.engine.run
        """Enqueues the work on the contents of the input buffers."""
        # A program that measures its choices knows them only after its first run.
        detail = getattr(getattr(self.engine, "program", None), "detail", None)
        entry = ledger.entries.get(component.name)
        if detail and entry is not None and detail not in entry.detail:
            ledger.entries[component.name] = dataclasses.replace(entry, detail=detail)
        buffers = [*self.engine.inputs.values(), *self.engine.outputs.values()]
        self.bytes = max(free - _free(device), sum(b.nbytes for b in buffers))
        """Memory of this stage without shared weights."""

    @torch.inference_mode()
    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        for name, value in inputs.items():
            self.engine.write(name, value)
        self.run()
        return self.engine.outputs

    def output(self) -> Tensor:
        (value,) = self.engine.outputs.values()
        return value


def require_finite(value: Tensor, component: Component, inputs: tuple[Tensor, ...]) -> None:
    """Raise EngineError, naming the first module, if `value`, an output of `component` for `inputs`, is not finite."""
    bad = int((~torch.isfinite(value)).sum())
    if not bad:
        return
    culprit = first_non_finite(component.module, inputs)
    where = f"first in module {culprit}" if culprit else "not in the eager module: compare the engines"
    raise EngineError(
        f"{component.name}: {bad} of {value.numel()} output values are not finite, {where}; "
        "`vla-accel precision` shows each module's range, float32 or bfloat16 hold more than float16"
    )


@torch.inference_mode()
def first_non_finite(module: nn.Module, inputs: tuple[Tensor, ...]) -> str | None:
    """Return the name of the first submodule, in order of execution, whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = (value for value in tree_leaves(output) if isinstance(value, Tensor))
            if not found and any(not bool(torch.isfinite(t).all()) for t in tensors):
                found.append(name)

        return hook

    with contextlib.ExitStack() as handles:
        for name, part in module.named_modules():
            if name and not any(True for _ in part.children()):
                handles.enter_context(part.register_forward_hook(watch(name)))
        module(*inputs)
    return found[0] if found else None


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
