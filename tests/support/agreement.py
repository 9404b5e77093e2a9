"""How near actions are to another project's, and a low precision to the exact result, compared with the plain module
in the same precision.

A fixed cosine would hang on how a CPU rounds BF16: AMX tiles, AVX512 and AVX2 differ, and the steps of a sampler spread
what they leave. What the plain module loses there is lost by the same rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Root mean squares of two ways to round one small model lie within a factor of 1.4, by any order of summing tried.
RATIO = 2.0
ACTIONS_ATOL = 1e-4
"""Of actions in float32. Rounding in the other projects themselves is 5e-6 at most; the least visible wrong formula
moves actions 5e-4."""


def rms(difference: Tensor) -> float:
    """Root mean square."""
    return float(difference.double().square().mean().sqrt())


def assert_as_near(got: Tensor, plain: Tensor, exact: Tensor, ratio: float = RATIO) -> None:
    """`got` is at most `ratio` times as far from `exact` as `plain` is, which is the plain module in its precision."""
    _check(got, plain, exact, ratio, rms)


def assert_mostly_as_near(got: Tensor, plain: Tensor, exact: Tensor, ratio: float = RATIO) -> None:
    """As `assert_as_near`, of the median along the first axis. A trained policy that is shown noise is of two minds now
    and then: one command of one chunk flips with any rounding, and outweighs all others."""
    _check(got, plain, exact, ratio, lambda difference: float(torch.tensor([rms(one) for one in difference]).median()))


def _check(got: Tensor, plain: Tensor, exact: Tensor, ratio: float, size_of: Callable[[Tensor], float]) -> None:
    assert got.shape == plain.shape == exact.shape and bool(torch.isfinite(got).all())
    ours, theirs = size_of(got.double() - exact.double()), size_of(plain.double() - exact.double())
    assert 0 < theirs < 0.1 * rms(exact), f"the plain module is off by {theirs:.3g} of {rms(exact):.3g}"
    assert ours <= ratio * theirs, f"off by {ours:.3g}, the plain module by {theirs:.3g}"


def assert_same(ours: Any, theirs: Any, what: str, record_property: Any, atol: float = ACTIONS_ATOL) -> None:
    """Ours, actions or what else there is `atol` for, are what another project makes of the same, in float32."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape and np.isfinite(ours).all()
    difference = float(np.abs(ours - theirs).max())
    record_property("max_abs_difference", difference)
    print(f"{what}: largest difference {difference:.1e}, rms {np.sqrt((theirs**2).mean()):.2f}")
    assert difference <= atol
