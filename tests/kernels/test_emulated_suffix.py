"""What the Hopper GEMM does for the rows of a denoise loop (`gemm/suffix.cu`), in the emulator, against the ops without
kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.emulated_gemm import BF16, FP16, EmulatedGemm, drawn, is_close, room
from tests.support.gpus import H200
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm import suffix as ops
from vla_accel.kernels.gemm.hopper import Tiling, suffix
from vla_accel.kernels.gemm.hopper.few import few
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.moments import write as write_moments
from vla_accel.kernels.gemm.suffix_types import Heads, Rotation
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.rows import rope_tables

SEQUENCES = {33: 3, 40: 2, 80: 2, 160: 4}
"""Of so many rows."""
EPS, HEAD = 1e-3, 128


def cases(n: int, k: int, paired: int = 0) -> Any:
    """Rows, each with a tiling whose blocks share no K and with all that are tried by a weight (n, k) of π0's expert;
    the best three for few rows are quick."""
    found = []
    for rows in SEQUENCES:
        for i, tiling in enumerate((Tiling(1, 1, 1, 24, 4), *few(H200, rows, n, k, paired))):
            short = f"{tiling.groups}x{tiling.width} {tiling.stages} {tiling.split} {tiling.resident}"
            marks = pytest.mark.slow if i > 3 or rows > 80 else ()
            found.append(pytest.param(rows, tiling, id=f"{rows} {short}", marks=marks))
    return pytest.mark.parametrize(("rows", "tiling"), found)


def width_for(tiling: Tiling) -> int:
    """Of rows of x, so that stages are used again, and the last block has a chunk less and 8 columns of its last."""
    return 64 * (tiling.split * (tiling.stages + 2) - 2) + 8


@pytest.fixture
def gemms(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGemm]:
    with Chain(H200).resumed():
        yield EmulatedGemm(monkeypatch, emulated)


def modulated(rows: int, k: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Moments]:
    """Rows of any size, the scale of their norm, and their moments, of 32 columns each."""
    x, scale = (drawn(rows, k) * (1 + torch.arange(rows)[:, None] % 5)).to(kind), drawn(k, seed=1) / 4
    moments = Moments.like(x, 32, True)
    write_moments(x, scale, moments)
    return x, scale, moments


def untouched(*whole: Tensor) -> bool:
    return all(one[0].isnan().all() and one[-1].isnan().all() for one in whole)


@cases(1024, 2048)
def test_a_gated_residual_and_the_next_norm_s_moments(rows: int, tiling: Tiling, gemms: EmulatedGemm) -> None:
    n, k = 3 * tiling.weight_rows, width_for(tiling)
    gate, scale = drawn(n, seed=2), drawn(n, seed=3) / 4
    for kind, gated, written in ((BF16, True, "scaled"), (BF16, False, "plain"), (FP16, True, "none")):
        a, weight, before = drawn(rows, k).to(kind), drawn(n, k, seed=4).to(kind) * k**-0.5, drawn(rows, n, seed=5)
        x, whole = room(rows, n, kind)
        want = x.copy_(before).clone()
        moments = None if written == "none" else Moments.like(x, 64, written == "scaled")
        ops.project(a, Linear(weight), gate if gated else None, want)
        outputs = () if moments is None else (moments.sums, moments.squares, moments.scaled)
        gemms.touch((weight, gate, scale), (a, x, *outputs))
        suffix.onto(a, weight, gate if gated else None, x, moments, scale, gpu=H200, tiling=tiling)
        is_close(x, want, kind)
        assert untouched(whole)
        if moments is not None:
            # They are of what was rounded, so they say nothing of the product's own roundings.
            real = Moments.like(x, 64, written == "scaled")
            write_moments(x, scale, real)
            torch.testing.assert_close(moments.sums, real.sums, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(moments.squares, real.squares, atol=1e-4, rtol=1e-4)
            assert moments.scaled is None or (real.scaled is not None and torch.equal(moments.scaled, real.scaled))


@cases(8192, 1024, 8192)
def test_gate_and_up_of_normed_rows(rows: int, tiling: Tiling, gemms: EmulatedGemm) -> None:
    half, k = 3 * tiling.weight_rows // 2, width_for(tiling)
    for kind, activation, shifted in (
        (BF16, Activation.GEGLU, True),
        (BF16, Activation.SWIGLU, False),
        (FP16, Activation.SWIGLU, True),
    ):
        x, scale, moments = modulated(rows, k, kind)
        weight, shift = drawn(2 * half, k, seed=2).to(kind) * k**-0.5, drawn(2 * half, seed=3) if shifted else None
        want = torch.empty(rows, half)
        ops.gate_up_geglu(x, Linear(weight), scale, shift, want, eps=EPS, activation=activation)
        out, whole = room(rows, half, kind)
        assert moments.scaled is not None
        gemms.touch((weight, shift), (moments.scaled, moments.squares, out))
        run: dict[str, Any] = {"gpu": H200, "tiling": tiling, "eps": EPS, "activation": activation}
        suffix.gated(moments.scaled, weight, moments.squares, shift, out, **run)
        is_close(out, want, kind)
        assert untouched(whole)


@cases(2560, 1024, 256)
def test_rotated_heads_of_normed_rows(rows: int, tiling: Tiling, gemms: EmulatedGemm) -> None:
    """Sequences begin behind prefixes of different lengths."""
    batch, k, of_q, of_kv = SEQUENCES[rows], width_for(tiling), 3, 2
    tokens, n = rows // batch, (of_q + 2 * of_kv) * HEAD
    lengths = torch.tensor([90, 5, 31, 64][:batch], dtype=torch.int32)
    cos, sin = rope_tables(90 + tokens, HEAD, torch.device("cpu"))
    for kind, shifted in ((BF16, True), (FP16, False)):
        x, scale, moments = modulated(rows, k, kind)
        weight, shift = drawn(n, k, seed=2).to(kind) * k**-0.5, drawn(n, seed=3) if shifted else None
        made = [room(rows, heads * HEAD, kind) for heads in (of_q, of_kv, of_kv)]
        q, k_out, v = (out.view(batch, tokens, -1, HEAD) for out, _ in made)
        rotation = Rotation(cos, sin, lengths)
        want = [torch.empty(out.shape) for out in (q, k_out, v)]
        ops.qkv_rope(x, Linear(weight), scale, shift, rotation, Heads(*want), eps=EPS)
        assert moments.scaled is not None
        gemms.touch((weight, shift, cos, sin), (moments.scaled, moments.squares, lengths, q, k_out, v))
        run: dict[str, Any] = {"gpu": H200, "tiling": tiling, "eps": EPS}
        suffix.heads(moments.scaled, weight, moments.squares, shift, rotation, Heads(q, k_out, v), **run)
        for got, expected in zip((q, k_out, v), want, strict=True):
            is_close(got, expected, kind)
        assert untouched(*(whole for _, whole in made))
