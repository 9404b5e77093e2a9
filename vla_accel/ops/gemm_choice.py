"""Own GEMM or the library's, where no table says which is the faster: measured when a program is built, and remembered.

Nothing is measured while a graph is captured, nor on a GPU that was handed in: there only what is known counts. Inside
`autotune.pinned` only the table counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from vla_accel.ops.autotune import is_pinned, remembered
from vla_accel.ops.cuda import gemm
from vla_accel.ops.gpu import Gpu

Trial = Callable[[Gpu], Callable[[gemm.Tiling | None], object]]
"""Makes operands for a GPU, and a call of the product with them: by a tiling, by the library for None."""

LIBRARY = "library"
CALLS = 10
"""Calls in a row that are measured together."""
_KNOWN: dict[tuple[torch.device, Gpu | None, torch.dtype, str, int, int, int], gemm.Tiling | None] = {}


def known(device: torch.device, kind: torch.dtype, activation: str, rows: int, n: int, k: int) -> gemm.Tiling | None:
    """The tiling that is faster than the library: by the table, or as it was measured; None where none is known to be.

    Arguments as `gemm.planned` takes them.
    """
    gpu = Gpu.of(device)
    found = gemm.planned(gpu, kind, activation, rows, n, k)
    if found is not None or gpu is None or is_pinned():
        return found
    return _KNOWN.get((device, gpu, kind, activation, rows, n, k))


def why_library(device: torch.device, kind: torch.dtype, activation: str, rows: int, n: int, k: int) -> str:
    """Why `measured` found no tiling, in a clause for the ledger."""
    gpu = Gpu.of(device)
    if gpu is None:
        return "there is no GPU"
    if reason := gemm.why_not_searched(gpu, rows, n, k):
        return reason
    measured = (device, gpu, kind, activation, rows, n, k) in _KNOWN
    return "it was measured to be slower" if measured else "no tiling of it is known for this size"


def measured(
    device: torch.device, kind: torch.dtype, activation: str, rows: int, n: int, k: int, trial: Trial
) -> gemm.Tiling | None:  # fmt: skip
    """`known`, and measured first where that is needed and can be done; a program asks while it is built."""
    gpu, sizes = Gpu.of(device), (kind, activation, rows, n, k)
    found = known(device, *sizes)
    key = (device, gpu, *sizes)
    if found is not None or gpu is None or key in _KNOWN:
        return found
    if is_pinned() or torch.cuda.is_current_stream_capturing():
        return found
    tilings = {str(tiling): tiling for tiling in gemm.searched(gpu, *sizes)}
    if tilings:
        call = trial(gpu)
        ways = {text: functools.partial(call, tilings.get(text)) for text in (LIBRARY, *tilings)}
        _KNOWN[key] = tilings.get(remembered(f"GEMM {kind} {activation} {rows}x{n}x{k}", ways, device, CALLS).way)
    return known(device, *sizes)
