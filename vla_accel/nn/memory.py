"""Bytes of tensors, each storage counted once however many tensors share it; and the free memory of a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dataclasses, mappings and sequences."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from tensors_in(getattr(value, part.name))
    elif isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


class Counted:
    """Counts storages, each the first time that it is met. `kind`: the device type that counts; others are left out,
    such as host memory in addition to a GPU's."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._met: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those storages that were not met before."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # Tensors without values have no address: each is one of its own.
            key = storage._cdata
            if tensor.device.type == self.kind and key not in self._met:
                self._met.add(key)
                total += storage.nbytes()
        return total


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes that this process may allocate on a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    # A limit can be set, but only newer torch says which, and only of a device with a number.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    allowed = int(fraction(torch.cuda.current_device() if device.index is None else device.index) * total)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    # What torch keeps and does not use is free to it.
    return min(free + reserved - allocated, allowed - allocated), allowed
