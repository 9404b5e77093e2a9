"""Arithmetic that several parts share: dtypes by name, rounding of sizes, cosines, the precision of products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in configurations and on command lines. FP8 needs scales: see `fp8`."""


def resolve_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a policy's large products: "auto" is BF16 on a GPU, FP32 on a CPU."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[precision]


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` (1 or more)."""
    return 1 << (n - 1).bit_length()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of two arrays, in float64: 1 for two zeros, 0 for one, NaN if a value is not finite."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size else float(not (x.any() or y.any()))


@contextlib.contextmanager
def matmul_precision(name: str | None = None) -> Iterator[None]:
    """Set torch's precision of FP32 products within the block, and restore it afterwards, also what the block sets.

    `name`: as in torch.set_float32_matmul_precision ("high" allows TF32); None keeps the current setting.
    """
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(name or before)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Disable torch.autocast: it would override the configured precision, also in graphs captured within the block."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        yield  # Entering both takes 8 µs of a call.
        return
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
