"""The launches of the Hopper GEMM in the emulator, and what its tests compare."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda_emulator import EmulatedDriver, EmulatedModule
from vla_accel.fp8 import E4M3
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gemm.moments import Moments, write

BF16, FP16, FP8 = torch.bfloat16, torch.float16, E4M3.dtype
_BEFORE = """
extern "C" __global__ void before(u16* tensor, int count) {
  volatile u16* out = tensor;  // A compiler would leave out what changes nothing.
  griddepcontrol_wait();
  for (int i = threadIdx.x; i < count; i += 256) out[i] = out[i];
}
"""


class EmulatedGemm:
    """Launches go to the emulator while `patch` holds. Kernels may touch what `touch` was last given alone, and some of
    it comes from a kernel before them in a chain, so that they must not read it before they have waited for it."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.constant: list[Tensor] = []
        self.produced: list[Tensor] = []
        patch.setattr(nvrtc, "load_module", self._load)
        patch.setattr(nvrtc, "driver", EmulatedDriver)

    def touch(self, *arguments: Any) -> None:
        """Set what the next launch may touch: the tensors in its arguments. A kernel before it writes the rows, the
        outputs and the moments, so that the launch must not read them before it has waited."""
        x, weights, out, epilogue, norm = arguments
        produced = _tensors([x, out, epilogue.moments, norm and norm.moments])
        self.produced, addresses = produced, {tensor.data_ptr() for tensor in produced}
        self.constant = [one for one in _tensors([weights, epilogue, norm]) if one.data_ptr() not in addresses]

    def _load(self, source: str, shared: dict[str, int], *rest: Any) -> EmulatedModule:
        module = EmulatedModule(source + _BEFORE, {**shared, "before": 0}, *rest, folder=self.folder)
        module.allow(*self.constant, *self.produced)
        for i, tensor in enumerate(self.produced):
            count = ctypes.c_int(tensor.numel() * tensor.element_size() // 2)
            module.launch("before", 1, 256, (ctypes.c_void_p(tensor.data_ptr()), count), dependent=i > 0)
        return module


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in lists and dataclasses, too."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list) else []


def moments_of(x: Tensor, scale: Tensor | None, columns: int) -> Moments:
    """The moments of rows in tiles of `columns`."""
    moments = Moments.like(x, columns, scale is not None)
    write(x, scale, moments)
    return moments


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def buffer(rows: int, columns: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows to write, and these between rows of NaN that stay so."""
    whole = torch.full((rows + 2, columns), float("nan")).to(kind)
    return whole[1:-1], whole


def is_close(got: Tensor, want: Tensor, kind: torch.dtype) -> None:
    """Whether the root mean square of what they differ by is a rounding's."""
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < {FP8: 0.03, BF16: 0.004, FP16: 0.001}[kind], error
