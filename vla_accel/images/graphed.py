"""A module's forward, recorded as CUDA graphs or compiled, in the place of its own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from vla_accel.engines.graph import recording
from vla_accel.errors import EngineError
from vla_accel.images.exclusive import Exclusive
from vla_accel.images.plugged import original
from vla_accel.images.switches import refuse_hooks, refuse_modes, refuse_offloading
from vla_accel.images.weights import WeightState
from vla_accel.ledger import Ledger, LedgerEntry

_KEPT_GRAPHS = 8
_PLAIN = (int, float, bool, str, type(None))


@dataclass
class _Recorded:
    graph: Any
    inputs: list[Tensor]
    output: Tensor


class GraphedForward:
    """A module's forward as one CUDA graph for each shape. Returns new tensors; any number of threads may call.

    Tensors anywhere in the arguments (ControlNet's samples, too) are inputs of the graph; numbers and texts are part
    of what tells graphs apart. The least recently used of several graphs is given up, and all of them when the module
    has other weights or adapters. Without a GPU the module's own forward runs, and the ledger says so.
    """

    def __init__(self, module: nn.Module, ledger: Ledger) -> None:
        self.module, self.ledger = module, ledger
        refuse_offloading("transformer", module)
        self._exclusive = Exclusive()
        self._recorded: OrderedDict[str, _Recorded] = OrderedDict()
        self._weights: WeightState | None = None
        self._on: torch.device | None = None
        self._note(next(module.parameters()).device)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedForward:
        made = copy.copy(self)
        memo[id(self)] = made
        made.module, made.ledger = copy.deepcopy(self.module, memo), copy.deepcopy(self.ledger, memo)
        made._exclusive, made._recorded, made._weights = Exclusive(), OrderedDict(), None
        return made

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The module's forward.

        Raises:
            EngineError: a forward that cannot be recorded, an input that needs a gradient, or hooks on the module.
        """
        refuse_offloading("transformer", self.module)
        whole = named.pop("return_dict", True)
        paths, layout = tree_flatten_with_path((args, named))
        leaves = [leaf for _, leaf in paths]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = next(self.module.parameters()).device
        if device.type != "cuda" or not all(t.is_cuda for t in tensors):
            self._note(device)
            return original(self.module, "forward")(*args, **named, return_dict=whole)
        refuse_hooks("transformer", self.module)
        refuse_modes("transformer", tensors, device)
        with self._exclusive.on(device), torch.no_grad():
            self._note(device)
            # A graph reads the module's own weights: their values may change, their places may not.
            if self._weights is None or self._weights.changed():
                self._recorded.clear()
                self._weights = WeightState(self.module, values=False)
            for path, leaf in paths:
                if not isinstance(leaf, (Tensor, *_PLAIN)):
                    name = keystr(path[1:])
                    raise EngineError(
                        f"transformer{name}: expected tensors, numbers or texts, got {type(leaf).__name__}"
                    )
            with torch.inference_mode():
                recorded = self._graph(leaves, layout)
                for static, value in zip(recorded.inputs, tensors, strict=True):
                    static.copy_(value, non_blocking=True)
                recorded.graph.replay()
            sample = recorded.output.clone()
        if not whole:
            return (sample,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=sample)

    def _graph(self, leaves: list[Any], layout: TreeSpec) -> _Recorded:
        parts = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in leaves]
        key = f"{parts!r} {layout!r}"
        if key not in self._recorded:
            self._recorded[key] = self._record(leaves, layout)
            while len(self._recorded) > _KEPT_GRAPHS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(key)
        return self._recorded[key]

    def _record(self, leaves: list[Any], layout: TreeSpec) -> _Recorded:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, named = tree_unflatten(static, layout)
        forward = original(self.module, "forward")

        def run() -> Tensor:
            return forward(*args, **named, return_dict=False)[0]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, side):
                output = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineError(f"transformer: cannot be recorded as a CUDA graph: {error}") from error
        return _Recorded(graph, [value for value in static if isinstance(value, Tensor)], output)

    def _note(self, device: torch.device) -> None:
        if device == self._on:
            return
        if device.type == "cuda":
            entry = LedgerEntry("transformer", "native", "native", "", "CUDA graph of the module as it is")
        else:
            entry = LedgerEntry("transformer", "native", "eager", f"a CUDA graph needs a GPU, got {device}")
        self.ledger.record(entry)
        self._on = device


class CompiledForward:
    """A module's forward by torch.compile with mode reduce-overhead; one thread at a time."""

    def __init__(self, module: nn.Module, ledger: Ledger) -> None:
        self.module = module
        refuse_offloading("transformer", module)
        self._exclusive = Exclusive()
        self._compiled: Any = None
        ledger.record(LedgerEntry("transformer", "compile", "compile", "", "torch.compile, reduce-overhead"))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        made = copy.copy(self)
        memo[id(self)] = made
        made.module = copy.deepcopy(self.module, memo)
        made._exclusive, made._compiled = Exclusive(), None
        return made

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The module's forward. Its graphs own their outputs, which the next call overwrites: they are copied."""
        refuse_offloading("transformer", self.module)
        whole = named.pop("return_dict", True)
        with self._exclusive.on(next(self.module.parameters()).device):
            if self._compiled is None:
                self._compiled = torch.compile(original(self.module, "forward"), mode="reduce-overhead")
            torch.compiler.cudagraph_mark_step_begin()
            sample = self._compiled(*args, **named, return_dict=False)[0].clone()
        if not whole:
            return (sample,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=sample)
