"""The Hopper GEMM (`ops/cuda/gemm/`) against what its source expects, without a GPU: tilings, what
blocks fetch for each other, tensor maps, launches."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.gpus import GPUS, H200, assumed
from vla_accel.errors import EngineError
from vla_accel.fp8 import E4M3
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm import choice as gemm_choice
from vla_accel.kernels.gemm import hopper as gemm
from vla_accel.kernels.gemm.hopper import TABLES, Tiling, search
from vla_accel.kernels.gemm.hopper.tiling import SHARED_LIMIT
from vla_accel.kernels.gpu import Gpu

SOURCE = nvrtc.source_of({}, "gemm/hopper/epilogue", "gemm/hopper/gemm")
BF16, FP8 = torch.bfloat16, E4M3.dtype
# One of every kind: plain, several blocks and parts, sharing either operand or both, split, persistent.
TILINGS = (
    Tiling(1, 1, 1, 64, 4), Tiling(2, 2, 1, 128, 3), Tiling(2, 1, 2, 136, 4), Tiling(1, 1, 1, 136, 4, 2, 1),
    Tiling(1, 1, 1, 104, 4, 2, 2), Tiling(2, 1, 1, 88, 3, 1, 3), Tiling(2, 1, 1, 136, 4, 1, 1, 2),
    Tiling(1, 1, 1, 128, 3, 1, 2, 3), Tiling(1, 1, 1, 128, 3, resident=2), Tiling(3, 1, 1, 104, 4),
    Tiling(2, 1, 2, 136, 3, persistent=True), Tiling(2, 1, 1, 72, 4, 2, 1, persistent=True),
    Tiling(2, 1, 1, 128, 6, 1, 1, 3),
)  # fmt: skip
TABLE = [(key, *row) for key, rows in TABLES["sm_90a"].items() for row in rows]


def macro(name: str) -> str:
    """A macro's text, its lines joined."""
    found = re.search(rf"#define {name}(?:\([^)]*\))? (.*)", SOURCE)
    assert found, name
    return found[1]


def share(rows: int, count: int) -> int:
    """SHARE of the source."""
    text = macro("SHARE").replace("ROWS", str(rows)).replace("COUNT", str(count)).replace("/", "//")
    return eval(text)


def start(rows: int, count: int, i: int) -> int:
    """START of the source for one of several."""
    text = macro("START").split(":", 1)[1].rsplit(")", 1)[0].replace("SHARE(ROWS, COUNT)", str(share(rows, count)))
    text = text.replace("(COUNT > 1 ? COUNT - 1 : 1)", str(count - 1)).replace("ROWS", str(rows)).replace("/", "//")
    return eval(re.sub(r"\bi\b", str(i), text))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_blocks_fetch_every_row_for_each_other(count: int) -> None:
    for rows in range(64, 513, 8):
        size = share(rows, count)
        places = [start(rows, count, i) for i in range(count)]
        assert size % 8 == 0 and all(place % 8 == 0 for place in places)
        assert {row for place in places for row in range(place, place + size)} == set(range(rows))
        tiling = Tiling(1, 1, 1, 64, 2, 1, count)
        if rows == tiling.weight_rows:
            assert tiling.shares[0] == size


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("activation", [Activation.NONE, Activation.GELU, Activation.GEGLU, Activation.SWIGLU])
def test_shared_memory_holds_all(tiling: Tiling, activation: Activation) -> None:
    assert tiling.why_not(activation) is None
    ring = tiling.stages * (tiling.weight_rows + tiling.tokens) * 128
    pitch = (32 if activation.gated else 64) * 2 + 16
    share = -(-tiling.tokens // 8 // tiling.split) * 8
    tokens = tiling.width if tiling.split == 1 else share
    for normed in (False, True):
        staging, exchange, barriers, size = tiling.memory(activation, normed)
        staged = staging + tiling.groups * tokens * pitch
        assert barriers >= max(ring, staged) and staging % 16 == exchange % 16 == barriers % 16 == 0
        assert barriers + 16 * tiling.stages + (8 * tiling.tokens if normed else 0) + 1024 <= size
        assert size <= SHARED_LIMIT or (normed and tiling.why_not(activation, normed=True))
        if tiling.persistent:
            # The next tile's stages arrive while the output is staged.
            assert staging >= ring
        if tiling.split > 1:
            sums = tiling.weight_rows * share * (tiling.split - 1) * 4
            assert exchange + sums <= barriers
            # The staging is written while sums are read; sums arrive while stages are read, or after all are.
            assert staging >= exchange + sums or staged <= exchange
            assert exchange == 0 or exchange >= ring
    begin, fetching, multiplying = tiling.registers
    assert begin * tiling.threads * tiling.resident <= 65_536
    assert fetching + tiling.groups * multiplying <= begin * (tiling.groups + 1)
    assert not (begin % 8 or fetching % 8 or multiplying % 8)


@pytest.mark.parametrize(
    ("tiling", "text"),
    [
        (Tiling(1, 1, 1, 60, 4), "multiple of 8"),
        (Tiling(1, 1, 1, 264, 4), "multiple of 8"),
        (Tiling(1, 1, 1, 128, 4, 1, 1, 2, persistent=True), "split"),
        (Tiling(1, 1, 1, 128, 4, 8, 3), "cluster"),
        (Tiling(1, 1, 1, 128, 12), "shared memory"),
        (Tiling(1, 1, 1, 128, 6, resident=2), "shared memory"),
        (Tiling(2, 2, 1, 208, 3), "registers"),
        (Tiling(1, 1, 1, 128, 2, resident=3), "registers"),
    ],
)
def test_what_a_kernel_cannot_hold_is_refused(tiling: Tiling, text: str) -> None:
    assert text in (tiling.why_not() or "")


def test_a_residual_and_norms_take_room() -> None:
    wide = Tiling(3, 1, 1, 200, 3)
    assert wide.why_not() is None and "registers" in (wide.why_not(residual=True) or "")
    sizes = itertools.product(range(2, 13), range(8, 257, 8))
    many = (Tiling(1, 1, 1, width, stages) for stages, width in sizes)
    full = next(t for t in many if t.memory(Activation.NONE).size <= 232_448 < t.memory(Activation.NONE, True).size)
    assert full.why_not() is None and "shared memory" in (full.why_not(normed=True) or "")
    assert "norms of one" in (Tiling(2, 1, 2, 136, 3, persistent=True).why_not(normed=True) or "")


@pytest.mark.parametrize(("key", "least", "most", "tiling"), TABLE)
def test_the_table_is_of_tilings_that_run(
    key: tuple[str, Activation, int, int], least: int, most: int, tiling: Tiling
) -> None:
    kind, activation, n, k = key
    chunks = -(-k * (1 if kind == "fp8" else 2) // 128)
    assert kind in ("fp8", "half") and tiling.why_not(activation) is None
    if (n, k) in ((1152, 1152), (1152, 4352), (2048, 16_384)):
        assert tiling.why_not(activation, residual=True) is None
    elif kind == "half" and activation is not Activation.GEGLU:
        assert tiling.why_not(activation, normed=True) is None
    assert -(-chunks // tiling.split) * (tiling.split - 1) < chunks
    # No tile is all padding, and little of the tiles is.
    whole = -(-most // (tiling.tokens * tiling.along)) * tiling.tokens * tiling.along
    assert n % 64 == 0 and 0 < least <= most and whole < 1.2 * least
    assert [row[:2] for row in TABLES["sm_90a"][key]] == sorted(row[:2] for row in TABLES["sm_90a"][key])


def misaligned(like: Tensor) -> Tensor:
    """As large, eight bytes after a multiple of sixteen."""
    step = 8 // like.element_size()
    return torch.empty(like.numel() + step, dtype=like.dtype)[step:].view(like.shape)


# -- launches ---------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for a loaded module and for the driver that makes tensor maps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[dict[str, Any]] = []
        self.maps: list[tuple[Any, ...]] = []
        self.source = ""
        monkeypatch.setattr(nvrtc, "load_module", self.load)
        monkeypatch.setattr(nvrtc, "driver", lambda: self)

    def load(self, source: str, shared: dict[str, int], architecture: str, device: torch.device) -> Recorder:
        assert architecture == "sm_90a"
        self.source, self.shared = source, shared["gemm"]
        return self

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...], **options: Any) -> None:
        call = arguments[2]
        values = {field: getattr(call, field) for field, *_ in call._fields_}
        self.launches.append({"name": name, "blocks": blocks, "threads": threads, **values, **options})

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
        at, kind, rank, address, sizes, strides, box, steps, interleave, swizzle, _, fill = arguments
        assert (
            at.value % 64 == 0
            and rank.value == 2
            and list(steps) == [1, 1]
            and (interleave, swizzle, fill) == (0, 3, 0)
        )
        ctypes.memset(at, 0x5A, 128)
        self.maps.append((kind, address.value, list(sizes), list(strides), list(box)))
        return 0


def operands(
    rows: int, n: int, k: int, kind: torch.dtype, activation: Activation = Activation.NONE
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.zeros(rows, n // 2 if activation.gated else n, dtype=BF16)
    return torch.zeros(rows, k).to(kind), torch.zeros(n, k).to(kind), out


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("rows", [1, 100, 544])
def test_a_launch_covers_the_output(tiling: Tiling, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    for (n, k), kind in itertools.product(((1152, 4352), (64, 1152)), (BF16, FP8)):
        x, weight, out = operands(rows, n, k, kind)
        gemm.gemm(x, weight, None, out, gpu=H200, tiling=tiling, scale=0.5)
        got, maps = recorder.launches[-1], recorder.maps[-2:]
        assert got["blocks"] % tiling.cluster == 0 and got["cluster"] == tiling.cluster and not got["dependent"]
        assert got["threads"] == tiling.threads and got["scale"] == 0.5 and got["bias"] is None
        assert got["rows"] == rows and got["columns"] == n and got["chunks"] * 128 >= k * x.element_size()
        across = tiling.weight_rows * tiling.across
        assert (
            (got["token_tiles"] - 1) * tiling.tokens * tiling.along
            < rows
            <= got["token_tiles"] * tiling.tokens * tiling.along
        )
        assert got["tiles"] % got["token_tiles"] == 0
        assert got["tiles"] // got["token_tiles"] * across >= n > (got["tiles"] // got["token_tiles"] - 1) * across
        if tiling.persistent:
            assert got["blocks"] <= 132 * tiling.resident
        else:
            assert got["blocks"] == got["tiles"] * tiling.cluster
        for (code, address, sizes, strides, box), matrix, share in zip(maps, (weight, x), tiling.shares, strict=True):
            assert code == (0 if kind == FP8 else 9) and address == matrix.data_ptr()
            assert sizes == [k, matrix.shape[0]] and strides == [k * matrix.element_size()]
            assert box[0] * matrix.element_size() == 128 and box[1] <= 256 and share % box[1] == 0


def test_a_launch_takes_moments_and_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    x, weight, out = operands(100, 128, 192, BF16)
    gemm.gemm(x, weight, None, out, gpu=H200, tiling=TILINGS[0])
    got = recorder.launches[-1]
    plain = recorder.shared
    assert got["moments_out"] is None and got["moments"] is None and got["weight_sums"] is None
    for macro_of in ("#define RESIDUAL 0\n", "#define NORM 0\n"):
        assert macro_of in recorder.source
    moments, sums = torch.zeros(2, 100, 2), torch.zeros(128)
    gemm.gemm(x, weight, None, out, gpu=H200, tiling=TILINGS[0], moments=moments)
    assert recorder.launches[-1]["moments_out"] == moments.data_ptr() and "#define RESIDUAL 1\n" in recorder.source
    of_x = torch.zeros(3, 100, 2)
    for weight_sums, number in ((None, 1), (sums, 2)):
        gemm.gemm(x, weight, None, out, gpu=H200, tiling=TILINGS[0], norm=gemm.Norm(of_x, weight_sums, 1e-3))
        got = recorder.launches[-1]
        assert got["moments"] == of_x.data_ptr() and abs(got["eps"] - 1e-3) < 1e-9
        assert got["weight_sums"] == (None if weight_sums is None else sums.data_ptr())
        assert f"#define NORM {number}\n" in recorder.source and "#define MOMENTS 3\n" in recorder.source
        assert recorder.shared == plain + 8 * TILINGS[0].tokens


def test_moments_and_norms_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(monkeypatch)
    x, weight, out = operands(100, 128, 192, BF16)
    good, norm = torch.zeros(2, 100, 2), gemm.Norm(torch.zeros(3, 100, 2), torch.zeros(128), 1e-6)
    narrow, quantised = out.to(FP8), (x.to(FP8), weight.to(FP8))
    wrong = [
        ((x, weight, None, out), {"moments": torch.zeros(100, 2, 2)}, r"\(2, 100, 2\), got torch.float32 \(100"),
        ((x, weight, None, out), {"moments": good.double()}, "got torch.float64"),
        ((x, weight, None, out), {"moments": good.transpose(0, 1).contiguous().transpose(0, 1)}, "whole"),
        ((x, weight, None, out), {"moments": good, "activation": Activation.GELU}, "plain product"),
        ((x, weight, None, narrow), {"moments": good, "inverse_scale": 1.0}, "plain product"),
        ((x, weight, None, out), {"norm": gemm.Norm(good, None, 1e-6)}, r"\(3, 100, 2\)"),
        ((x, weight, None, out), {"norm": gemm.Norm(norm.moments, torch.zeros(64), 1e-6)}, "128 weight rows"),
        ((x, weight, None, out[:, :64].contiguous()), {"norm": norm, "activation": Activation.SWIGLU}, "before swiglu"),
        ((*quantised, None, out), {"norm": norm}, "only BF16"),
        ((x, weight, None, out), {"norm": norm, "tiling": Tiling(2, 1, 2, 136, 3, persistent=True)}, "norms of one"),
    ]  # fmt: skip
    for arguments, options, text in wrong:
        with pytest.raises(EngineError, match=text):
            gemm.gemm(*arguments, gpu=H200, **{"tiling": TILINGS[0], **options})


def test_a_product_says_what_it_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(monkeypatch)
    tiling = TILINGS[0]
    x, weight, out = operands(8, 128, 64, BF16)
    wrong = [
        ((x.float(), weight, None, out), {}, "x is torch.float32"),
        ((x, weight, None, out.half()), {}, "out is torch.float16"),
        ((x, weight[:, :32], None, out), {}, "the weight"),
        ((x, weight, None, out[:, :64]), {}, "out"),
        ((x[:, :60], weight[:, :60], None, out), {}, "16 bytes"),
        ((x, weight, None, out.t().contiguous().t()), {}, "contiguous"),
        ((x, weight, out[0], out[:, :64].contiguous()), {"activation": Activation.GEGLU}, "no bias"),
        ((x, weight, None, out), {"tiling": Tiling(1, 1, 1, 64, 4, 1, 1, 2)}, "part of 2 empty"),
        ((x, weight, None, out), {"tiling": Tiling(1, 1, 1, 60, 4)}, "multiple of 8"),
        ((x, weight, None, misaligned(out)), {}, "multiples of 16 bytes"),
        ((misaligned(x), weight, None, out), {}, "multiples of 16 bytes"),
    ]  # fmt: skip
    for arguments, options, text in wrong:
        with pytest.raises(EngineError, match=text):
            gemm.gemm(*arguments, gpu=H200, **{"tiling": tiling, **options})


def test_elsewhere_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("half", Activation.NONE, 128, 64)
    monkeypatch.setitem(TABLES["sm_90a"], key, ((9, 16, TILINGS[0]), (20, 64, TILINGS[1])))
    assert gemm_choice.known(torch.device("cpu"), BF16, Activation.NONE, 9, 128, 64) is None
    cuda = torch.device("cuda")
    for gpu in GPUS.values():
        hopper = gpu.capability == (9, 0)
        with assumed(gpu):
            found = [
                gemm.planned(Gpu.of(cuda), BF16, Activation.NONE, rows, 128, 64) for rows in (8, 9, 16, 17, 20, 64, 65)
            ]
        assert found == ([None, *[TILINGS[0]] * 2, None, *[TILINGS[1]] * 2, None] if hopper else [None] * 7)
    assert gemm.planned(H200, FP8, Activation.NONE, 8, 128, 64) is None
    assert gemm.planned(H200, BF16, Activation.GELU, 8, 128, 64) is None


KNOWN_WEIGHTS = sorted({key for key, *_ in TABLE})


@pytest.mark.parametrize("rows", [129, 288, 576, 1024, 1025, 1088, 2176, 4352, 8704, 17_408])
def test_tilings_that_are_searched_for_run_and_waste_little(rows: int) -> None:
    for kind, activation, n, k in KNOWN_WEIGHTS:
        dtype = FP8 if kind == "fp8" else BF16
        found = gemm.searched(H200, dtype, activation, rows, n, k)
        many = rows > search.MANY
        most = search.BEST * len(search.KINDS_OF_MANY) if many else search.MEASURED
        assert 1 <= len(found) <= most and len(set(found)) == len(found)
        # What a norm is taken into is not persistent.
        kinds = {(tiling.across, tiling.persistent) for tiling in found}
        assert not many or kinds == {(1, False), (2, False)} | ({(1, True), (2, True)} if activation.gated else set())
        chunks = -(-k * (1 if kind == "fp8" else 2) // 128)
        for tiling in found:
            assert tiling.why_not(activation) is None
            if not activation.gated:
                assert tiling.why_not(activation, residual=True) is None
                assert tiling.why_not(activation, normed=True) is None
            assert -(-chunks // tiling.split) * (tiling.split - 1) < chunks
            tiles = -(-rows // tiling.tokens)
            assert rows <= tiles * tiling.tokens < rows + 8 * tiles * tiling.parts


def test_small_products_are_cut_so_that_most_multiprocessors_have_a_tile() -> None:
    """SmolVLA's prefix: 177 rows by 960 columns are 15 tiles of weights."""
    found = gemm.searched(H200, BF16, Activation.NONE, 177, 960, 960)
    assert len(found) == search.MEASURED
    assert all(75 <= -(-177 // t.tokens) * -(-960 // t.weight_rows) * t.split <= 132 for t in found), found


def test_nothing_is_searched_for_where_the_kernel_cannot_run_or_gains_nothing() -> None:
    for gpu in (None, H200.portable, GPUS["B200"]):
        assert gemm.searched(gpu, BF16, Activation.NONE, 576, 2048, 2048) == []
    for rows in (1, 128, 32_769):
        assert gemm.searched(H200, BF16, Activation.NONE, rows, 2048, 2048) == []
    for n, k in ((2048, 2049), (2040, 2048), (256, 256)):
        assert gemm.searched(H200, BF16, Activation.NONE, 576, n, k) == [], (n, k)
    assert gemm.searched(H200, BF16, Activation.NONE, 576, 2048, 2048) != []
