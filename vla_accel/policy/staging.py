"""Staging buffers: host memory from which a GPU uploads, and how a call's inputs get there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.families.family import Rows

ALIGNMENT = 256
"""Bytes; CUDA's allocator guarantees it, and kernels and libraries may rely on it."""
PARALLEL_BYTES = 1 << 18
"""A row of at least so many bytes is copied by several threads (torch's)."""


def host_buffer(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def upload(on_device: Tensor, on_host: Tensor) -> None:
    if len(on_device):
        on_device.copy_(on_host, non_blocking=True)


def fill(
    name: str, slots: Sequence[np.ndarray], rows: Rows, pieces: Sequence[tuple[Tensor, Tensor]] = ()
) -> None:  # fmt: skip
    """Copy rows into their slots; what a row leaves of its slot along the first axis becomes zero. `pieces`: where a
    row is uploaded from its slot at once."""
    if len(rows) != len(slots):
        raise EngineError(f"{name}: expected {len(slots)} rows, got {len(rows)}")
    for index, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        if row.shape == slot.shape:
            _copy(row, slot)
        elif row.ndim == slot.ndim > 0 and row.shape[1:] == slot.shape[1:] and len(row) < len(slot):
            np.copyto(slot[: len(row)], row, casting="no")
            slot[len(row) :] = 0
        else:
            raise EngineError(f"{name}: expected shape {slot.shape}, got {row.shape}")
        if pieces:
            upload(*pieces[index])


def _copy(row: np.ndarray, slot: np.ndarray) -> None:
    """Copy a row of the same shape and dtype."""
    if row.nbytes >= PARALLEL_BYTES and row.dtype == slot.dtype and row.flags.c_contiguous:
        _memory(slot).copy_(_memory(row))
    else:
        np.copyto(slot, row, casting="no")


def _memory(array: np.ndarray) -> Tensor:
    """The bytes of a contiguous array, which may be read-only: torch would warn of it."""
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)
