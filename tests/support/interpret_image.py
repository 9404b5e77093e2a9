"""Run every kernel of `kernels/image/triton_image.py` in Triton's interpreter, against its torch reference.

Prints one line a case: name and the largest difference, relative to the largest value; with --few about half of them.
Run by test_image_ops.py in a process of its own, because the interpreter is chosen when triton is first imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.interpreter import patch_once
from tests.support.runtimes import steered
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.ops import GroupNorm, Sum

DTYPE = torch.float16


def both(run: Callable[[], Tensor | tuple[Tensor, ...]]) -> float:
    """The largest relative difference between kernel and reference."""
    want = run()
    with steered("triton"):
        got = run()
    pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]  # type: ignore[arg-type]
    return max(float((a.float() - b.float()).abs().max() / a.float().abs().max()) for a, b in pairs)  # type: ignore[union-attr]


def cases(few: bool) -> dict[str, float]:
    """Name to difference."""
    found: dict[str, float] = {}
    # Channels that are no power of two; a height and width that fill no tile.
    every = list(itertools.product((False, True), (0, 1, 2), (False, True)))
    some = [(False, 0, False), (False, 1, True), (True, 2, False)]
    for channels, (height, width), added in ((24, (6, 4), some if few else every), (96, (2, 14), some)):
        for residual, shift, phased in added:
            shape = (2, height // 2 + 1, width // 2 + 1, 4 * channels) if phased else (2, height, width, channels)
            x = Sum(
                torch.randn(shape, dtype=DTYPE),
                torch.randn(2, height, width, channels, dtype=DTYPE) if residual else None,
                (None, torch.randn(channels), torch.randn(2, channels))[shift],
                phased,
            )
            gamma, skip = torch.randn(channels), torch.randn(2, height, width, 16, dtype=DTYPE)
            norm = GroupNorm(8, 1 + torch.randn(channels), torch.randn(channels), 1e-5)
            wide = GroupNorm(8, 1 + torch.randn(channels + 16), torch.randn(channels + 16), 1e-5)
            runs: dict[str, Callable[[], Tensor | tuple[Tensor, ...]]] = {
                "add_up": lambda x=x: ops.add_up(x),
                "add_up padded": lambda x=x: ops.add_up(x, pad=True),
                "rms_act kept": lambda x=x, g=gamma: ops.rms_act(x, g, activation=Activation.SILU, keep=True),
                "rms_act": lambda x=x, g=gamma: ops.rms_act(x, g, activation=Activation.NONE, keep=False),
                "group_act kept": lambda x=x, n=norm: ops.group_act(x, n, activation=Activation.SILU, keep=True),
                "group_act": lambda x=x, n=norm: ops.group_act(x, n, activation=Activation.NONE, keep=False),
                "group_act skip": lambda x=x, n=wide, s=skip: ops.group_act(
                    x, n, activation=Activation.SILU, keep=True, skip=s
                ),
            }
            for name, run in runs.items():
                found[f"{name} {channels} residual={residual} shift={shift} phased={phased}"] = both(run)
    # Several stretches of pixels, and groups of 42 channels, three to a program: the last program has two.
    large = Sum(torch.randn(2, 10, 14, 320, dtype=DTYPE), torch.randn(2, 10, 14, 320, dtype=DTYPE), torch.randn(2, 320))
    wide, skip = GroupNorm(8, 1 + torch.randn(336), torch.randn(336), 1e-5), torch.randn(2, 10, 14, 16, dtype=DTYPE)
    found["group_act large"] = both(
        lambda: ops.group_act(large, wide, activation=Activation.SILU, keep=True, skip=skip)
    )
    alone = GroupNorm(32, 1 + torch.randn(320), torch.randn(320), 1e-5)
    plain = Sum(large.value)
    found["group_act of one tensor"] = both(lambda: ops.group_act(plain, alone, activation=Activation.NONE, keep=True))
    rows, residual = torch.randn(10, 40, dtype=DTYPE), torch.randn(10, 40, dtype=DTYPE)
    weight, bias, shift = 1 + torch.randn(40), torch.randn(40), torch.randn(40)
    found["add_layer_norm"] = both(lambda: ops.add_layer_norm(rows, residual, shift, weight, bias, 1e-5))
    found["layer_norm alone"] = both(lambda: ops.add_layer_norm(rows, None, None, weight, bias, 1e-5))
    found["geglu_erf"] = both(lambda: ops.geglu_erf(rows))
    gates = torch.randn(11, 2 * 300, dtype=DTYPE)
    found["geglu_erf wide"] = both(lambda: ops.geglu_erf(gates))
    # Large and very unequal scores: a softmax that forgets to shift overflows here.
    found["softmax"] = both(lambda: ops.softmax(100 * torch.randn(6, 5000, generator=torch.manual_seed(1)), DTYPE))
    q, k, v = torch.randn(3, 2, 60, 48, dtype=DTYPE).unbind(0)
    found["attend"] = both(lambda: ops.attend(q, k, v, how="products"))
    for width, how in ((384, "flash"), (512, "flash-64")):
        # Views of one product, as a layer has them; the last block of queries and of keys is not full.
        q, k, v = torch.randn(2, 150, 3 * width, dtype=DTYPE).chunk(3, dim=-1)
        with steered("triton"):
            got = ops.attend(q, k, v, how=how)
        want = ops.attend(q.float(), k.float(), v.float())
        found[f"attend {how} {width}"] = float((got.float() - want).abs().max() / want.abs().max())
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    patch_once()
    for case, difference in cases("--few" in sys.argv).items():
        print(f"{difference:.3e} {case}")
