"""Whether an autoencoder's engine fits into the GPU's memory, before it is made."""

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
"""Of the activations, for workspaces of convolutions and fragmentation. Decoding 1024x1024 in BF16 on an H100 took 1.4
times the activations for Stable Diffusion in eager and 1.7 times in native, 1.0 and 0.9 times for Qwen-Image."""


def required_bytes(component: Component) -> int:
    """Bytes that an engine needs besides the weights: its buffers, and the largest sum of activations at one time.

    The module runs on the meta device, where tensors have sizes and no values.
    """
    module = copy.deepcopy(component.module, _on_meta(component.module))
    inputs = [spec.empty(torch.device("meta")) for spec in component.inputs]
    buffers = sum(t.nbytes for t in (*inputs, *(s.empty(torch.device("meta")) for s in component.outputs)))
    with torch.inference_mode(), _OwnAttention(), _Alive() as alive:
        module(*inputs)
    return buffers + int((1 + MARGIN) * alive.peak)


def free_bytes(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of a GPU for this process; None for a CPU, where nothing is checked."""
    return memory.free_memory(device) if device.type == "cuda" else None


def check_fits(component: Component, device: torch.device, give_up: Callable[[], bool]) -> None:
    """Raise DeviceMemoryError if the component does not fit, and name what takes less.

    Args:
        give_up: frees the engine that was used longest ago; returns False if there is none.
    """
    found = free_bytes(device)
    if found is None:
        return
    needed = required_bytes(component)
    while needed > found[0] and give_up():
        found = free_bytes(device) or found
    if needed <= found[0]:
        return
    (source,) = component.inputs
    batch = source.shape[0]
    fewer = "one image at a time (enable_slicing()) or " if batch > 1 else ""
    raise DeviceMemoryError(
        f"{component.name}: {tuple(source.shape)} needs about {needed / 1e9:.2f} GB of GPU memory, "
        f"{found[0] / 1e9:.2f} of {found[1] / 1e9:.2f} GB are free; run {fewer}tiles: plug_in() the autoencoder and "
        "call its enable_tiling(), with smaller tiles if it is on"
    )


def _on_meta(module: nn.Module) -> dict[int, Any]:
    """What `copy.deepcopy` takes for the tensors of a module: the same without values."""
    tensors = (*module.parameters(), *module.buffers())
    made = {id(t): torch.empty_like(t, device="meta") for t in tensors}
    return {
        id(t): nn.Parameter(made[id(t)], requires_grad=False) if isinstance(t, nn.Parameter) else made[id(t)]
        for t in tensors
    }


class _Alive(TorchDispatchMode):
    """Counts the bytes of results that are alive, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._add(result.untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._met:
            return
        self._met.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


class _OwnAttention(TorchFunctionMode):
    """Attention without a matrix of all scores, as the engines compute it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))
