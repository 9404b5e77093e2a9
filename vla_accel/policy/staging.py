"""Staging buffers: host memory from which a GPU uploads, and how a call's inputs get there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.families.family import Rows

ALIGNMENT = 256
"""Bytes; CUDA's allocator guarantees it, and kernels and libraries may rely on it."""


def host_buffer(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def upload(on_device: Tensor, on_host: Tensor) -> None:
    if len(on_device):
        on_device.copy_(on_host, non_blocking=True)


def fill(
    name: str, slots: Sequence[np.ndarray], rows: Rows, pieces: Sequence[tuple[Tensor, Tensor]] = ()
) -> None:  # fmt: skip
    """Copy rows into their slots; the rest of the slot along the first axis is filled with zeros. `pieces`: where a row
    is uploaded from its slot at once."""
    if len(rows) != len(slots):
        raise EngineError(f"{name}: expected {len(slots)} rows, got {len(rows)}")
    for index, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        if row.dtype != slot.dtype:
            raise EngineError(f"{name}: expected dtype {slot.dtype}, got {row.dtype}")
        if row.shape == slot.shape:
            _copy(slot, row)
        elif row.ndim == slot.ndim > 0 and row.shape[1:] == slot.shape[1:] and len(row) < len(slot):
            np.copyto(slot[: len(row)], row, casting="no")
            slot[len(row) :] = 0
        else:
            raise EngineError(f"{name}: expected shape {slot.shape}, got {row.shape}")
        if pieces:
            upload(*pieces[index])


def _copy(slot: np.ndarray, row: np.ndarray) -> None:
    """Copy an array into a contiguous one of its shape."""
    if row.ndim == 3 and row.shape[2] == 3 and not row[:1].flags.c_contiguous:
        # An image whose channels come first, in reverse or with a fourth one, or that is mirrored. NumPy's inner loop
        # is the last axis: three bytes long, it would take four times as long.
        for channel in range(3):
            np.copyto(slot[..., channel], row[..., channel], casting="no")
    else:
        np.copyto(slot, row, casting="no")
