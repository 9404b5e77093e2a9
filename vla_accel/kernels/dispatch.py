"""Which implementation of an op runs. Every op has a torch reference, which defines what it computes. On a GPU it runs
an own CUDA C++ kernel or a library's where that is the fastest, else a Triton kernel (`triton_*.py`).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from vla_accel.runtime import Backend, current


def path(where: Tensor | torch.device) -> Backend:
    """Return the backend of an op on a tensor, as the current runtime says."""
    return current(where).backend


def kernels(module: str) -> Any:
    """Return a module of Triton kernels ("rows.triton_rows"). It is imported here because it needs triton."""
    return importlib.import_module(f"vla_accel.kernels.{module}")
