"""Tensor maps: how Hopper's copy engine (TMA) finds boxes of a tensor."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Literal

import torch
from torch import Tensor

from vla_accel.kernels import nvrtc
from vla_accel.numeric import round_up

_BYTES, _ALIGNMENT = 128, 64
# CUtensorMapDataType; FP8 and INT8 travel as bytes.
_KINDS = {torch.bfloat16: 9, torch.float16: 6, torch.float8_e4m3fn: 0, torch.int8: 0}
_NO_INTERLEAVING, _ZEROS_OUTSIDE = 0, 0
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of a box's rows
_PROMOTIONS = {128: 2, 256: 3}  # CUtensorMapL2promotion


class TensorMap(ctypes.Structure):
    """The bytes of a map, `TensorMap` in `ptx.cu`."""

    _fields_ = [("bytes", ctypes.c_char * _BYTES)]


def tensor_map(x: Tensor, box: tuple[int, ...], promotion: Literal[128, 256] = 256) -> TensorMap:
    """A map of a tensor. Its boxes arrive with swizzled rows of 64 or 128 bytes, and zeros for what lies outside.

    Args:
        x: up to five dimensions, the last contiguous, of BF16, FP16, FP8 or INT8, at a multiple of 16 bytes.
        box: elements of a box by dimension of `x`: 64 or 128 bytes of the last one, at most 256 elements of the others.
        promotion: bytes that the L2 cache fetches at once.

    Raises:
        EngineError: the driver refuses the map.
    """
    return _encoded(nvrtc.driver(), x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), box, promotion)


@functools.lru_cache(maxsize=4096)
def _encoded(
    driver: Any, address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    box: tuple[int, ...], promotion: int,
) -> TensorMap:  # fmt: skip
    rank, size = len(shape), dtype.itemsize
    # The driver takes the innermost dimension first, and no stride for it.
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    pitches = (ctypes.c_uint64 * (rank - 1))(*(size * stride for stride in reversed(strides[:-1])))
    boxes, steps = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank)
    memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    aligned = round_up(ctypes.addressof(memory), _ALIGNMENT)
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), _KINDS[dtype], ctypes.c_uint32(rank), ctypes.c_void_p(address), sizes, pitches, boxes,
        steps, _NO_INTERLEAVING, _SWIZZLES[box[-1] * size], _PROMOTIONS[promotion], _ZEROS_OUTSIDE,
    )  # fmt: skip
    nvrtc.check_driver(status, f"tensor map of {shape} {dtype}")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, _BYTES))
