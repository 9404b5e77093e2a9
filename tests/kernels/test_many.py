"""Products of many suffix rows without Triton's, without a GPU: tilings of the own GEMM, how pairs of weight rows come,
what its launches are given, and what is tried beside Triton's."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pytest
import torch

from tests.kernels.test_gemm import Recorder
from tests.support.gpus import A100, GPUS, H200
from vla_accel.errors import EngineError
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import Fastest
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm import suffix_tilings
from vla_accel.kernels.gemm.hopper import Tiling, suffix
from vla_accel.kernels.gemm.hopper.arguments import Call, Suffix
from vla_accel.kernels.gemm.hopper.few import few
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.suffix_tilings import Library, Own, Pipelined, Product
from vla_accel.kernels.gemm.suffix_types import Heads, Rotation
from vla_accel.nn import kernel_choices as cuts
from vla_accel.nn.kernel_choices import KernelChoices

# Weight rows, K, and rows of a group of pairs, of π0's and π0.5's expert.
WEIGHTS = ((2560, 1024, 256), (1024, 2048, 0), (8192, 1024, 8192), (1024, 4096, 0))


@pytest.mark.parametrize("rows", [33, 50, 80, 160, 200, 320, 512, 1000])
def test_tilings_run_and_keep_the_chip_busy(rows: int) -> None:
    for n, k, paired in WEIGHTS:
        found = few(H200, rows, n, k, paired)
        assert {t.resident for t in found} == {1, 2} and len(set(found)) == len(found) <= 8
        x, weight = (torch.empty(size, k, dtype=torch.bfloat16, device="meta") for size in (rows, n))
        for tiling in found:
            assert suffix.why_not(H200, x, weight, tiling, paired // 2) is None
            blocks = -(-rows // tiling.tokens) * (n // tiling.weight_rows) * tiling.split
            waves = -(-blocks // 132)
            assert blocks >= 0.6 * 132 * waves, (rows, n, tiling)
            assert tiling.tokens * -(-rows // tiling.tokens) < rows + 8 * -(-rows // tiling.tokens)


def test_elsewhere_there_are_none() -> None:
    for gpu in (None, A100, GPUS["B200"], H200.portable):
        assert few(gpu, 160, 1024, 2048) == []
    assert few(H200, 32, 1024, 2048) == [] != few(H200, 33, 1024, 2048)
    for n, k, paired in ((720, 1024, 0), (1024, 1020, 0), (2400, 1024, 48)):
        assert few(H200, 160, n, k, paired) == []


def test_why_not_says_what_does_not_fit() -> None:
    def reason(tiling: Tiling, n: int = 1024, k: int = 2048, half: int = 0, kind: torch.dtype = torch.bfloat16) -> str:
        x, weight = (torch.empty(size, k, dtype=kind, device="meta") for size in (160, n))
        return suffix.why_not(H200, x, weight, tiling, half) or ""

    good = Tiling(1, 1, 1, 80, 4)
    assert reason(good) == reason(good, 2560, 1024, 128) == ""
    assert "torch.float32" in reason(good, kind=torch.float32)
    assert "shares what it fetches" in reason(Tiling(1, 1, 1, 80, 4, across=2))
    assert "takes several tiles" in reason(Tiling(1, 1, 1, 80, 4, persistent=True))
    assert "do not fill" in reason(Tiling(2, 1, 1, 80, 4), 1024 + 64) and "do not fill" in reason(good, half=48)
    assert "empty" in reason(Tiling(1, 1, 1, 80, 4, split=3), k=128)


def places(half: int, rows: int, weight_rows: int) -> list[int]:
    """Which row of a weight each row of all tiles is, by the sizes, strides and coordinates of the tensor map."""
    sizes, strides = (8, 2, half // 8, weight_rows // (2 * half)), (1, half, 8, 2 * half)
    box = (8, 2, rows // 16, 1)
    found = []
    for row in range(0, weight_rows, rows):
        # As gemm.cu asks for a tile.
        corner = (0, 0, row % (2 * half) // 16, row // (2 * half))
        for inside in range(rows):
            at, left = [], inside
            for size, start in zip(box, corner, strict=True):
                at.append(start + left % size)
                left //= size
            assert all(a < size for a, size in zip(at, sizes, strict=True))
            found.append(sum(a * stride for a, stride in zip(at, strides, strict=True)))
    return found


@pytest.mark.parametrize(("half", "rows", "weight_rows"), [(128, 64, 2560), (128, 128, 2560), (4096, 128, 8192)])
def test_pairs_of_weight_rows_meet_in_a_thread(half: int, rows: int, weight_rows: int) -> None:
    """Eight rows of a side, then the eight that are `half` further: a lane has a row and the one eight below it."""
    found = places(half, rows, weight_rows)
    assert sorted(found) == list(range(weight_rows))
    for row in range(0, weight_rows, 16):
        for g in range(8):
            group, inside = row // (2 * half), row % (2 * half)
            # pair_of and head_columns of suffix.cu.
            pair = inside // 16 * 8 + g
            assert found[row + g] == group * 2 * half + pair and found[row + 8 + g] == found[row + g] + half
            for eight in (0, 8):
                column = inside // 16 * 8 + ((inside + eight) // 8 % 2) * half
                assert found[row + eight + g] % (2 * half) == column + g


def test_launches_are_given_what_they_read_and_write(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Fields(monkeypatch)
    monkeypatch.setattr(nvrtc, "driver", lambda: Maps(maps))
    maps: list[tuple[Any, ...]] = []
    tiling, rows, width = Tiling(2, 1, 1, 40, 4, split=2), 34, 256
    run: dict[str, Any] = {"gpu": H200, "tiling": tiling}
    x, a = (torch.zeros(rows, columns, dtype=torch.bfloat16) for columns in (width, 512))
    gate, scale = torch.ones(width), torch.ones(width)
    moments = Moments.like(x, 64, True)
    suffix.onto(a, torch.zeros(width, 512, dtype=torch.bfloat16), gate, x, moments, scale, **run)
    got = recorder.launches[-1]
    assert moments.scaled is not None and got["scaled"] == moments.scaled.data_ptr() and got["out"] == x.data_ptr()
    assert (got["sums_out"], got["squares_out"]) == (moments.sums.data_ptr(), moments.squares.data_ptr())
    assert (got["gate"], got["next_scale"]) == (gate.data_ptr(), scale.data_ptr()) and not got["dependent"]
    assert (got["rows"], got["columns"], got["chunks"], got["tiles"], got["blocks"]) == (rows, width, 8, 2, 4)
    assert all(f"#define {macro}\n" in recorder.source for macro in ("SUFFIX 1", "RESIDUAL 1", "NORM 0"))
    # The last layer writes no moments.
    suffix.onto(a, torch.zeros(width, 512, dtype=torch.bfloat16), None, x, None, None, **run)
    got = recorder.launches[-1]
    assert got["gate"] is got["scaled"] is got["squares_out"] is got["next_scale"] is None
    with pytest.raises(EngineError, match="moments are of 64 columns, got 32"):
        suffix.onto(a, torch.zeros(width, 512, dtype=torch.bfloat16), None, x, Moments.like(x, 32, False), None, **run)
    weight, out = torch.zeros(1024, width, dtype=torch.bfloat16), torch.zeros(rows, 512, dtype=torch.bfloat16)
    squares, shift = torch.ones(5, rows), torch.ones(1024)
    suffix.gated(x, weight, squares, shift, out, eps=1e-3, activation=Activation.SWIGLU, **run)
    got = recorder.launches[-1]
    assert (got["half"], got["of_tiles"], got["width"], got["columns"]) == (512, 5, width, 512)
    assert (got["squares"], got["shift"], got["out"]) == (squares.data_ptr(), shift.data_ptr(), out.data_ptr())
    assert all(
        f"#define {macro}\n" in recorder.source
        for macro in ("SUFFIX 2", f"ACTIVATION {Activation.SWIGLU.code}", "NORM 3")
    )
    assert maps[-1] == ([256, 8, 2, 64, 1], [512, 512 * 512, 8 * 512, 1024 * 512], [64, 8, 2, 8, 1])
    cos, sin, lengths = torch.ones(90, 64), torch.zeros(90, 64), torch.tensor([3, 9], dtype=torch.int32)
    q, k, v = (torch.zeros(2, 17, heads, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    suffix.heads(x, weight, squares, None, Rotation(cos, sin, lengths), Heads(q, k, v), eps=1e-3, **run)
    got = recorder.launches[-1]
    assert [got[name] for name in ("out", "k", "v", "cos", "sin", "lengths")] == [
        tensor.data_ptr() for tensor in (q, k, v, cos, sin, lengths)
    ]
    assert [got[n] for n in ("half", "of_tokens", "heads", "kv_heads", "columns")] == [64, 17, 4, 2, 1024]
    assert "#define SUFFIX 3\n" in recorder.source and got["shift"] is None
    assert maps[-1] == ([256, 8, 2, 8, 8], [512, 64 * 512, 8 * 512, 128 * 512], [64, 8, 2, 8, 1])


class Fields(Recorder):
    """With the fields of a call and of those that it is an extension of."""

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...], **options: Any) -> None:
        call = arguments[2]
        own = {field: getattr(call, field) for field, *_ in Call._fields_}
        values = {field: getattr(call.suffix, field) for field, *_ in Suffix._fields_} | own
        values |= {f"of_{name}": getattr(call.suffix, name) for name in ("tiles", "tokens")}
        self.launches.append({"name": name, "blocks": blocks, "threads": threads, **values, **options})


class Maps:
    """Stands for the driver: keeps sizes, strides and boxes of tensor maps of pairs."""

    def __init__(self, maps: list[tuple[Any, ...]]) -> None:
        self.maps = maps

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
        at, _, rank, _, sizes, strides, box, *_ = arguments
        ctypes.memset(at, 0x5A, 128)
        if rank.value == 5:
            self.maps.append((list(sizes), list(strides), list(box)))
        return 0


def test_what_is_tried_beside_triton() -> None:
    product = functools.partial(Product, k=1024, columns=4096, sides=2)
    for gpu in (None, A100, H200.portable):
        assert suffix_tilings.beside(gpu, product(33)) == [Library()]
    found = suffix_tilings.beside(H200, product(160))
    assert found[0] == Library() and len(found) > 1 and all(isinstance(way, Own) for way in found[1:])
    assert len({str(way) for way in found}) == len(found)
    # Few rows, weights of one byte, and float32's own GEMM.
    assert suffix_tilings.beside(H200, product(32)) == suffix_tilings.beside(H200, product(160, weight=1)) == []
    assert suffix_tilings.beside(H200, product(160, weight=4, activation=4)) == [Library()]


@pytest.mark.parametrize("best", ["pipelined", "cuBLAS"])
def test_triton_s_best_is_measured_beside_the_library(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def remembered(what: str, ways: dict[str, Any], *_: Any) -> Fastest:
        asked.append(list(ways))
        for run in ways.values():
            run()
        return Fastest(next((way for way in reversed(ways) if way.startswith(best)), next(iter(ways))))

    monkeypatch.setattr(cuts, "remembered", remembered)
    x, product, made = (
        torch.zeros(40, 64),
        Product(40, 128, 64, weight=4, activation=4),
        KernelChoices(torch.device("cpu"), Chain(None)),
    )
    seen: list[int] = []

    def run() -> None:
        moments = made["o"].moments
        assert moments is not None
        seen.append(moments.columns)

    written = functools.partial(Moments.like, x, scaled=False)
    made.product("o", product, run, moments=written, backends="all")
    assert len(asked) == 3 and asked[2] == [asked[2][0], "cuBLAS"] and asked[2][0] in asked[1]
    taken = made["o"].tile_config
    assert isinstance(taken, Library if best == "cuBLAS" else Pipelined)
    # A row's moments are of the whole row behind the library.
    assert seen[-1] == 64 and set(seen[:-1]) >= {16}
    made.product("o", product, run, moments=written)
    assert len(asked) == 5, "who does not ask for it is not given it"
