"""Engines made from a model's weights: kept by key, dropped when the weights change, used by one caller at a time."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_LORA = ("merged_adapters", "scaling", "_active_adapter", "_disable_adapters")
"""What peft's layers compute with besides tensors."""


class WeightState:
    """The weights of modules at one moment: address and version of every tensor, modules, processors, LoRA adapters.

    With `values` also norm and maximum of every tensor: a write through `tensor.data` (peft's `fuse_lora`) changes
    neither address nor version.
    """

    def __init__(self, *modules: nn.Module, values: bool = True) -> None:
        self._modules = modules
        self._found, tensors = self._look()
        self._values = _norms(tensors) if values else None

    def changed(self) -> bool:
        """Whether the weights differ from that moment. With `values` this waits for the GPU."""
        found, tensors = self._look()
        return found != self._found or (self._values is not None and not torch.equal(self._values, _norms(tensors)))

    def _look(self) -> tuple[list[Any], list[Tensor]]:
        found: list[Any] = [module.training for module in self._modules]
        tensors: list[Tensor] = []
        stack = list(self._modules)
        while stack:
            part = stack.pop()
            own = vars(part)
            found += (id(part), id(own.get("processor")))
            if _LORA[0] in own:
                values = {name: own.get(name) for name in _LORA}
                found.append({name: v.copy() if isinstance(v, (dict, list)) else v for name, v in values.items()})
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    version = -1 if tensor.is_inference() else tensor._version
                    found += (tensor.data_ptr(), version, tensor.dtype, tensor.device)
                    tensors.append(tensor)
            stack += [child for child in part._modules.values() if child is not None]
        return found, tensors


@torch.inference_mode()
def _norms(tensors: list[Tensor]) -> Tensor:
    """Norm and maximum of every floating-point tensor, on the CPU."""
    rows: list[Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        # torch has no reductions for eight bits.
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() and tensor.device.type != "meta":
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for (_, dtype), group in groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        rows.append(torch.stack(torch._foreach_norm(group, 2, dtype=wide)).double().cpu())
        rows.append(torch.stack(torch._foreach_max(group)).double().cpu())
    # A NaN would differ from itself.
    return torch.nan_to_num(torch.cat(rows)) if rows else torch.empty(0)


class Cache(Generic[K, T]):
    """Values made from a model's weights, dropped least recently used first while `full`. A deep copy is empty."""

    def __init__(self, full: Callable[[Iterable[T]], bool] = lambda _: False) -> None:
        self.made: OrderedDict[K, T] = OrderedDict()
        self.shared: dict[str, Any] = {}
        """What all keys share; dropped with them."""
        self._full, self._lock = full, threading.RLock()
        self._done: dict[torch.device, torch.cuda.Event] = {}
        self._weights: WeightState | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache[K, T]:
        return Cache(self._full)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Exclude other threads; the current stream waits for the previous caller's work on the GPU."""
        with self._lock:
            if device.type != "cuda":
                yield
                return
            stream = torch.cuda.current_stream(device)
            if device in self._done:
                stream.wait_event(self._done[device])
            try:
                yield
            finally:
                self._done.setdefault(device, torch.cuda.Event()).record(stream)

    def follow(self, *modules: nn.Module, values: bool = True) -> None:
        """Drop everything if the weights have changed since the previous call: see `WeightState`."""
        if self._weights is None or self._weights.changed():
            self.made.clear()
            self.shared.clear()
            self._weights = WeightState(*modules, values=values)

    def get(self, key: K, make: Callable[[], T]) -> T:
        """Return the value of `key`, made now if there is none."""
        if key not in self.made:
            self.made[key] = make()
            while len(self.made) > 1 and self._full(self.made.values()):
                self.drop_oldest()
        self.made.move_to_end(key)
        return self.made[key]

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """As `get`, for values that all keys share."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    def drop_oldest(self) -> bool:
        """Drop the least recently used value; False if there is none."""
        return bool(self.made) and self.made.popitem(last=False) is not None
