"""Replacements of a transformer's forward: CUDA graphs of it, or torch.compile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from vla_accel.engines.graph import recording, warmed_up
from vla_accel.errors import EngineError
from vla_accel.images.cache import Cache
from vla_accel.images.plugged import original
from vla_accel.images.switches import refuse_modes, refuse_switches
from vla_accel.kernels.capture import Graph
from vla_accel.ledger import Ledger, LedgerEntry

_KEPT_GRAPHS = 8


@dataclass
class _Recorded:
    graph: Any
    inputs: list[Tensor]
    output: Tensor


class Forward(ABC):
    """A module's forward with new tensors as results, for any number of threads. A deep copy has its own engines."""

    def __init__(self, module: nn.Module, ledger: Ledger) -> None:
        self.module, self.ledger = module, ledger
        self.cache: Cache[str, _Recorded] = Cache(lambda made: len(list(made)) > _KEPT_GRAPHS)
        refuse_switches("transformer", module, hooks=False, adapters=False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        whole = named.pop("return_dict", True)
        sample = self.run(args, {**named, "return_dict": False})
        if not whole:
            return (sample,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=sample)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @abstractmethod
    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor: ...


class GraphedForward(Forward):
    """A module's forward as one CUDA graph for each shape; without a GPU the module's own forward, as the ledger says.

    Tensors anywhere in the arguments (also ControlNet's samples) are inputs of the graph; numbers and texts belong to
    the graph's key.
    """

    def __init__(self, module: nn.Module, ledger: Ledger) -> None:
        super().__init__(module, ledger)
        self._noted: torch.device | None = None
        self._note()

    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        paths, layout = tree_flatten_with_path((args, named))
        leaves = [leaf for _, leaf in paths]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = self.device
        on_gpu = device.type == "cuda" and all(t.is_cuda for t in tensors)
        refuse_switches("transformer", self.module, hooks=on_gpu, adapters=False)
        if not on_gpu:
            self._note()
            return original(self.module, "forward")(*args, **named)[0]
        refuse_modes("transformer", tensors, device)
        with self.cache.on(device), torch.no_grad():
            self._note()
            # A graph reads the module's own weights: their values may change, their addresses may not.
            self.cache.follow(self.module, values=False)
            for path, leaf in paths:
                if not isinstance(leaf, (Tensor, int, float, bool, str, type(None))):
                    got = type(leaf).__name__
                    raise EngineError(f"transformer{keystr(path[1:])}: expected tensors, numbers or texts, got {got}")
            shapes = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in leaves]
            with torch.inference_mode():
                recorded = self.cache.get(f"{shapes!r} {layout!r}", lambda: self._record(leaves, layout))
                for static, value in zip(recorded.inputs, tensors, strict=True):
                    static.copy_(value, non_blocking=True)
                recorded.graph.replay()
            return recorded.output.clone()

    def _record(self, leaves: list[Any], layout: Any) -> _Recorded:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, named = tree_unflatten(static, layout)
        forward, graph = original(self.module, "forward"), Graph()
        side = warmed_up(self.device, lambda: forward(*args, **named))
        try:
            with recording(graph, side):
                output = forward(*args, **named)[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineError(f"transformer: cannot be recorded as a CUDA graph: {error}") from error
        return _Recorded(graph, [value for value in static if isinstance(value, Tensor)], output)

    def _note(self) -> None:
        """Record in the ledger what runs on this device."""
        if (device := self.device) == self._noted:
            return
        if device.type == "cuda":
            entry = LedgerEntry("transformer", "native", "native", "", "CUDA graph of the module as it is")
        else:
            entry = LedgerEntry("transformer", "native", "eager", f"a CUDA graph needs a GPU, got {device}")
        self.ledger.record(entry)
        self._noted = device


class CompiledForward(Forward):
    """A module's forward by torch.compile with mode reduce-overhead."""

    def __init__(self, module: nn.Module, ledger: Ledger) -> None:
        super().__init__(module, ledger)
        ledger.record(LedgerEntry("transformer", "compile", "compile", "", "torch.compile, reduce-overhead"))

    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        refuse_switches("transformer", self.module, hooks=False, adapters=False)
        with self.cache.on(self.device):
            forward = original(self.module, "forward")
            compiled = self.cache.share("compiled", lambda: torch.compile(forward, mode="reduce-overhead"))
            torch.compiler.cudagraph_mark_step_begin()
            # The graphs own their outputs, which the next call overwrites.
            return compiled(*args, **named)[0].clone()
