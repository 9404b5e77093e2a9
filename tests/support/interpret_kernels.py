"""Cases of kernel_cases.py and kernel_shapes.py in Triton's interpreter (`interpreter`, test_kernels). `main` runs the
named ones, or all that are fast, and prints a JSON list for each: name, what is wrong or nothing, worst difference."""

from __future__ import annotations

import json
import traceback
from typing import Any

import numpy as np
import torch

from tests.support import kernel_calls as calls
from tests.support import kernel_cases as cases
from tests.support import kernel_shapes as shapes
from tests.support.runtimes import steered

CPU = torch.device("cpu")
# The interpreter multiplies BF16 wrongly.
# Sums of float32 in another order differ by 7e-6 at most; the bound leaves room for other CPUs.
DTYPE, WORST, MEAN, FP8_MEAN = torch.float32, 5e-5, 5e-6, 1e-4


def round_as_hardware_does() -> None:
    """To FP8 the interpreter rounds a mantissa of ones up to zeros and forgets the carry: half of the right value.

    What is too large becomes NaN, so that a kernel that does not saturate shows.
    """
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: np.ndarray, of: Any, to: Any, rounding: Any) -> np.ndarray:
        if to.is_fp8e4nv() and of.is_fp32():
            flat = torch.from_numpy(values.astype(np.float32, copy=True))
            flat[flat.abs() > 464] = float("nan")
            return flat.to(calls.FP8).view(torch.uint8).numpy()
        return convert(values, of, to, rounding)

    interpreter._convert_float = converted


def run(name: str) -> tuple[str, float]:
    """What is wrong, or nothing, and the worst difference of outputs that are not FP8."""
    call = shapes.call_of(name, DTYPE)
    # The first call leaves its counters.
    repeat = 2 if call.op in ("suffix_attention", "prefix_attention") else 1
    try:
        with steered("triton"):
            got = calls.outputs_of(call, CPU, kernel=True, repeat=repeat)
        want = calls.outputs_of(call, CPU, kernel=False)
        calls.check(call, got, WORST, MEAN, FP8_MEAN)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}", float("nan")
    wide = [calls.difference(a, b).worst for a, b in zip(got, want, strict=True) if a.dtype != calls.FP8]
    return "", max(wide, default=0.0)


def main(*names: str) -> None:
    round_as_hardware_does()
    for case in names or (*cases.CASES, *shapes.TALL, *shapes.CONFIGS):
        print(json.dumps([case, *run(case)]), flush=True)
