"""Which implementation of an op runs: decided here alone, by the tensor's device, and steered by tests.

Every op has a torch reference, which defines what it computes. On a GPU it runs an own CUDA C++ kernel or a library's
where that is the fastest, else a Triton kernel (`triton_*.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

Path = Literal["reference", "triton", "cuda"]

_STEERED: contextvars.ContextVar[Path | None] = contextvars.ContextVar("steered path", default=None)


def path(where: Tensor | torch.device) -> Path:
    """The path of an op on a tensor: "cuda" on a GPU (what is fastest there), "reference" elsewhere; or as `steered`.

    "triton": Triton's kernels alone, also where CUDA C++ would be faster; products are the library's.
    """
    told = _STEERED.get()
    if told is not None:
        return told
    device = where if isinstance(where, torch.device) else where.device
    return "cuda" if device.type == "cuda" else "reference"


@contextlib.contextmanager
def steered(to: Path) -> Iterator[None]:
    """Within it every op of this thread takes a path. "triton" for tensors on a CPU needs Triton's interpreter
    (TRITON_INTERPRET=1 before triton is imported); "reference" runs anywhere."""
    token = _STEERED.set(to)
    try:
        yield
    finally:
        _STEERED.reset(token)


def kernels(module: str) -> Any:
    """A module of Triton kernels ("rows.triton_rows"), imported when a kernel is first called: it needs triton."""
    return importlib.import_module(f"vla_accel.kernels.{module}")
