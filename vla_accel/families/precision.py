"""torch's precision of FP32 products: a setting of the process that other projects' models change as they are made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def matmul_precision(name: str | None = None) -> Iterator[None]:
    """The precision `name` ("high" lets products be TF32's), None: as it is; afterwards what it was before. Else a
    baseline's setting would hold for every system that is timed or compared beside it."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(name or before)
        yield
    finally:
        torch.set_float32_matmul_precision(before)
