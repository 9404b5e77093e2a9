"""Check that an autoencoder's engine fits into the GPU's memory before it is made."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vla_accel.component import Component
from vla_accel.errors import DeviceMemoryError
from vla_accel.nn import memory

MARGIN = 0.5
"""Share of the activations added for workspaces and fragmentation. Decoding 1024x1024 in BF16 on an H100 took 1.4 times
the activations for Stable Diffusion in eager and 1.7 times in native, 1.0 and 0.9 times for Qwen-Image."""


def required_bytes(component: Component) -> int:
    """Return the bytes that an engine needs besides the weights, from a run of the module on the meta device."""
    meta = torch.device("meta")
    copies: dict[int, Any] = {}
    for tensor in (*component.module.parameters(), *component.module.buffers()):
        empty = torch.empty_like(tensor, device=meta)
        copies[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    module = copy.deepcopy(component.module, copies)
    inputs = [spec.empty(meta) for spec in component.inputs]
    buffers = sum(t.nbytes for t in (*inputs, *(s.empty(meta) for s in component.outputs)))
    with torch.inference_mode(), _OwnAttention(), _Alive() as alive:
        module(*inputs)
    return buffers + int((1 + MARGIN) * alive.peak)


def free_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return (free, total) bytes of a GPU for this process; None for a CPU, where nothing is checked."""
    return memory.free_memory(device) if device.type == "cuda" else None


def check_fits(component: Component, device: torch.device, drop_oldest: Callable[[], bool]) -> None:
    """Raise DeviceMemoryError, which names what takes less, if the component does not fit.

    `drop_oldest` frees the least recently used engine; it returns False if there is none.
    """
    found = free_bytes(device)
    if found is None:
        return
    needed = required_bytes(component)
    while needed > found[0] and drop_oldest():
        found = free_bytes(device) or found
    if needed <= found[0]:
        return
    (source,) = component.inputs
    fewer = "one image at a time (enable_slicing()) or " if source.shape[0] > 1 else ""
    raise DeviceMemoryError(
        f"{component.name}: {tuple(source.shape)} needs about {needed / 1e9:.2f} GB of GPU memory, "
        f"{found[0] / 1e9:.2f} of {found[1] / 1e9:.2f} GB are free; run {fewer}tiles: plug_in() the autoencoder and "
        "call its enable_tiling(), with smaller tiles if it is on"
    )


class _Alive(TorchDispatchMode):
    """Counts the bytes of results that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        storages = (result.untyped_storage() for result in tree_leaves(results) if isinstance(result, Tensor))
        for storage in storages:
            if storage not in self._met:
                self._met.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, storage.nbytes())
        return results

    def _drop(self, size: int) -> None:
        self.now -= size


class _OwnAttention(TorchFunctionMode):
    """Attention without a matrix of all scores, as the engines compute it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))
