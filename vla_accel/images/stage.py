"""One component ready to be called: its engine, and a CUDA graph round it where the engine allows one."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from vla_accel.component import Component
from vla_accel.config import EngineSpec
from vla_accel.engines import Engine, build
from vla_accel.engines.graph import Captured, capture
from vla_accel.errors import EngineError
from vla_accel.ledger import Ledger


class Stage:
    """`stage(name=tensor, …)` copies the inputs in, enqueues the work and returns the static output buffers.

    Outputs are overwritten by the next call. Never synchronises.
    """

    def __init__(
        self, component: Component, spec: EngineSpec, device: torch.device, ledger: Ledger, engine: Engine | None = None
    ) -> None:
        """`engine`: one that was made and recorded elsewhere, instead of one from `build()`."""
        self.component = component
        free = _free(device)
        self.engine = engine or build(component, spec, device=device, ledger=ledger)
        for buffer in self.engine.inputs.values():
            # Warming up on what memory happens to hold could index a table out of range.
            buffer.zero_()
        self._graph: Captured | None = (
            capture([(component.name, self.engine)], lambda: None, ledger) if self.engine.capturable else None
        )
        self._note_choices(ledger)
        buffers = [*self.engine.inputs.values(), *self.engine.outputs.values()]
        self.bytes = max(free - _free(device), sum(b.nbytes for b in buffers))
        """Memory that this stage holds besides shared weights."""

    @torch.inference_mode()
    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        for name, value in inputs.items():
            self.engine.write(name, value)
        self.run()
        return self.engine.outputs

    def run(self) -> None:
        """Enqueue the work on what is in the input buffers."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.engine.run()

    def output(self) -> Tensor:
        """The one output buffer."""
        (value,) = self.engine.outputs.values()
        return value

    def _note_choices(self, ledger: Ledger) -> None:
        # A program that measures its ways of computing knows them only after it has run once.
        detail = getattr(getattr(self.engine, "program", None), "detail", None)
        entry = ledger.entries.get(self.component.name)
        if detail and entry is not None and detail not in entry.detail:
            ledger.entries[self.component.name] = dataclasses.replace(entry, detail=detail)


def require_finite(value: Tensor, component: Component, inputs: tuple[Tensor, ...]) -> None:
    """Raise EngineError if `value`, an output of `component` for `inputs`, is not finite: names the first module."""
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
    """The name of the first submodule, in order of execution, that turns finite inputs into non-finite outputs."""
    found: list[str] = []

    def watch(name: str) -> object:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            values: tuple[object, ...] = tuple(output) if isinstance(output, (tuple, list)) else (output,)
            tensors = [v for v in values if isinstance(v, torch.Tensor)]
            if not found and any(not bool(torch.isfinite(t).all()) for t in tensors):
                found.append(name)

        return hook

    leaves = [(n, m) for n, m in module.named_modules() if n and not any(True for _ in m.children())]
    handles = [m.register_forward_hook(watch(n)) for n, m in leaves]  # type: ignore[arg-type]
    try:
        module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
