"""The Hopper GEMM's launches (`ops/cuda/gemm/`) in the emulator, and what its tests compare."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda_emulator import EmulatedDriver, EmulatedModule
from vla_accel.fp8 import E4M3
from vla_accel.kernels import nvrtc

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

    def touch(self, constant: Iterable[Tensor | None], produced: Iterable[Tensor | None]) -> None:
        """What the next launch may touch; `produced`: what a kernel before it writes."""
        self.constant, self.produced = ([one for one in some if one is not None] for some in (constant, produced))

    def _load(self, source: str, shared: dict[str, int], *rest: Any) -> EmulatedModule:
        module = EmulatedModule(source + _BEFORE, {**shared, "before": 0}, *rest, folder=self.folder)
        module.allow(*self.constant, *self.produced)
        for i, tensor in enumerate(self.produced):
            count = ctypes.c_int(tensor.numel() * tensor.element_size() // 2)
            module.launch("before", 1, 256, (ctypes.c_void_p(tensor.data_ptr()), count), dependent=i > 0)
        return module


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def room(rows: int, columns: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows to write, and these between rows of NaN that stay so."""
    whole = torch.full((rows + 2, columns), float("nan")).to(kind)
    return whole[1:-1], whole


def is_close(got: Tensor, want: Tensor, kind: torch.dtype) -> None:
    """Whether the root mean square of what they differ by is a rounding's."""
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < {FP8: 0.03, BF16: 0.004, FP16: 0.001}[kind], error
