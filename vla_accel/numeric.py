"""Small arithmetic that several parts share: dtypes by name, the precision of products, sizes rounded up, powers
of two, cosines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What products compute in, by its name in configurations and on command lines. FP8 is another matter: `fp8`."""


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n` (1 or more)."""
    return 1 << (n - 1).bit_length()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two arrays as vectors, in float64; of two zeros 1, of one zero 0, NaN where a value is not finite."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size else float(not (x.any() or y.any()))


@contextlib.contextmanager
def matmul_precision(name: str | None = None) -> Iterator[None]:
    """torch's precision of FP32 products: `name` ("high" lets them be TF32's), None: as it is; afterwards what it was
    before. Else a baseline's setting would hold for every system that is timed or compared beside it."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(name or before)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch torch.autocast off: it would compute in another precision than the configuration's, and stay in graphs
    that are recorded under it."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
