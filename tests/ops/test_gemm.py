"""The Hopper GEMM (`ops/cuda/gemm/`) against what its source expects, without a GPU: tilings, what
blocks fetch for each other, tensor maps, launches, and the ops that use them."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.gpus import GPUS, H200
from vla_accel.errors import EngineError
from vla_accel.fp8 import E4M3
from vla_accel.ops import gemm_choice, linear, norms
from vla_accel.ops.autotune import Fastest
from vla_accel.ops.cuda import gemm, runtime
from vla_accel.ops.cuda.gemm import TABLES, Tiling, launch, search
from vla_accel.ops.cuda.gemm.tiling import SHARED_LIMIT
from vla_accel.ops.dispatch import steered
from vla_accel.ops.gpu import Gpu, assumed
from vla_accel.ops.linear import Linear, make_linear, pair
from vla_accel.ops.reference import GATED

SOURCE = runtime.source_of({}, "gemm/epilogue", "gemm/gemm")
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
@pytest.mark.parametrize("activation", list(launch.ACTIVATIONS))
def test_shared_memory_holds_all(tiling: Tiling, activation: str) -> None:
    assert tiling.why_not(activation) is None
    ring = tiling.stages * (tiling.weight_rows + tiling.tokens) * 128
    pitch = (32 if activation in GATED else 64) * 2 + 16
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
    full = next(t for t in many if t.memory("none").size <= 232_448 < t.memory("none", True).size)
    assert full.why_not() is None and "shared memory" in (full.why_not(normed=True) or "")
    assert "norms of one" in (Tiling(2, 1, 2, 136, 3, persistent=True).why_not(normed=True) or "")


@pytest.mark.parametrize(("key", "least", "most", "tiling"), TABLE)
def test_the_table_is_of_tilings_that_run(
    key: tuple[str, str, int, int], least: int, most: int, tiling: Tiling
) -> None:
    kind, activation, n, k = key
    chunks = -(-k * (1 if kind == "fp8" else 2) // 128)
    assert kind in ("fp8", "half") and tiling.why_not(activation) is None
    if (n, k) in ((1152, 1152), (1152, 4352), (2048, 16_384)):
        assert tiling.why_not(activation, residual=True) is None
    elif kind == "half" and activation != "geglu":
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
        monkeypatch.setattr(runtime, "load_module", self.load)
        monkeypatch.setattr(launch, "driver", lambda: self)

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


def operands(rows: int, n: int, k: int, kind: torch.dtype, activation: str = "none") -> tuple[Tensor, Tensor, Tensor]:
    out = torch.zeros(rows, n // 2 if activation in GATED else n, dtype=BF16)
    return torch.zeros(rows, k).to(kind), torch.zeros(n, k).to(kind), out


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("rows", [1, 100, 544])
def test_a_launch_covers_the_output(tiling: Tiling, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    for (n, k), kind in itertools.product(((1152, 4352), (64, 1152)), (BF16, FP8)):
        x, weight, out = operands(rows, n, k, kind)
        gemm.gemm(x, weight, None, out, gpu=H200, tiling=tiling, scale=0.5, dependent=False)
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
        ((x, weight, None, out), {"moments": good, "activation": "gelu"}, "plain product"),
        ((x, weight, None, narrow), {"moments": good, "inverse_scale": 1.0}, "plain product"),
        ((x, weight, None, out), {"norm": gemm.Norm(good, None, 1e-6)}, r"\(3, 100, 2\)"),
        ((x, weight, None, out), {"norm": gemm.Norm(norm.moments, torch.zeros(64), 1e-6)}, "128 weight rows"),
        ((x, weight, None, out[:, :64].contiguous()), {"norm": norm, "activation": "swiglu"}, "before swiglu"),
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
        ((x, weight, out[0], out[:, :64].contiguous()), {"activation": "geglu"}, "no bias"),
        ((x, weight, None, out), {"tiling": Tiling(1, 1, 1, 64, 4, 1, 1, 2)}, "part of 2 empty"),
        ((x, weight, None, out), {"tiling": Tiling(1, 1, 1, 60, 4)}, "multiple of 8"),
        ((x, weight, None, misaligned(out)), {}, "multiples of 16 bytes"),
        ((misaligned(x), weight, None, out), {}, "multiples of 16 bytes"),
    ]  # fmt: skip
    for arguments, options, text in wrong:
        with pytest.raises(EngineError, match=text):
            gemm.gemm(*arguments, gpu=H200, **{"tiling": tiling, **options})


def test_elsewhere_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("half", "none", 128, 64)
    monkeypatch.setitem(TABLES["sm_90a"], key, ((9, 16, TILINGS[0]), (20, 64, TILINGS[1])))
    assert gemm_choice.known(torch.device("cpu"), BF16, "none", 9, 128, 64) is None
    cuda = torch.device("cuda")
    for gpu in GPUS.values():
        hopper = gpu.capability == (9, 0)
        with assumed(gpu):
            found = [gemm.planned(Gpu.of(cuda), BF16, "none", rows, 128, 64) for rows in (8, 9, 16, 17, 20, 64, 65)]
        assert found == ([None, *[TILINGS[0]] * 2, None, *[TILINGS[1]] * 2, None] if hopper else [None] * 7)
    assert gemm.planned(H200, FP8, "none", 8, 128, 64) is None
    assert gemm.planned(H200, BF16, "gelu", 8, 128, 64) is None


KNOWN_WEIGHTS = sorted({key for key, *_ in TABLE})


@pytest.mark.parametrize("rows", [129, 288, 576, 1088, 2176, 4352, 8704])
def test_tilings_that_are_searched_for_run_and_waste_little(rows: int) -> None:
    for kind, activation, n, k in KNOWN_WEIGHTS:
        dtype = FP8 if kind == "fp8" else BF16
        found = gemm.searched(H200, dtype, activation, rows, n, k)
        assert 1 <= len(found) <= search.MEASURED and len(set(found)) == len(found)
        chunks = -(-k * (1 if kind == "fp8" else 2) // 128)
        for tiling in found:
            assert tiling.why_not(activation) is None
            if activation not in GATED:
                assert tiling.why_not(activation, residual=True) is None
                assert tiling.why_not(activation, normed=True) is None
            assert -(-chunks // tiling.split) * (tiling.split - 1) < chunks
            tiles = -(-rows // tiling.tokens)
            assert rows <= tiles * tiling.tokens < rows + 8 * tiles * tiling.parts


def test_small_products_are_cut_so_that_most_multiprocessors_have_a_tile() -> None:
    """SmolVLA's prefix: 177 rows by 960 columns are 15 tiles of weights."""
    found = gemm.searched(H200, BF16, "none", 177, 960, 960)
    assert len(found) == search.MEASURED
    assert all(75 <= -(-177 // t.tokens) * -(-960 // t.weight_rows) * t.split <= 132 for t in found), found


def test_nothing_is_searched_for_where_the_kernel_cannot_run_or_gains_nothing() -> None:
    for gpu in (None, H200.portable, GPUS["B200"]):
        assert gemm.searched(gpu, BF16, "none", 576, 2048, 2048) == []
    for rows in (1, 128, 16_385):
        assert gemm.searched(H200, BF16, "none", rows, 2048, 2048) == []
    for n, k in ((2048, 2049), (2040, 2048), (256, 256)):
        assert gemm.searched(H200, BF16, "none", 576, n, k) == [], (n, k)
    assert gemm.searched(H200, BF16, "none", 576, 2048, 2048) != []


def test_own_or_library_is_measured_once_while_a_program_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    way = 1

    def remembered(what: str, ways: dict[str, Any], device: object, repeats: int) -> Fastest:
        asked.append([what, *ways])
        return Fastest(list(ways)[way])

    monkeypatch.setattr(gemm_choice, "remembered", remembered)
    monkeypatch.setattr(gemm_choice, "_KNOWN", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Gpu, "of", lambda _: H200)

    def measured(rows: int) -> Tiling | None:
        return gemm_choice.measured(torch.device("cpu"), BF16, "none", rows, 2048, 2048, lambda _: lambda _: None)

    size = (torch.device("cpu"), BF16, "none", 576, 2048, 2048)
    assert gemm_choice.known(*size) is None and not asked, "a call measures nothing"
    found = measured(576)
    assert found is gemm_choice.known(*size) and found == gemm.searched(H200, *size[1:])[0]
    assert asked[0][:2] == ["GEMM torch.bfloat16 none 576x2048x2048", "library"] and len(asked[0]) > 2
    assert measured(576) is found and len(asked) == 1
    way = 0
    assert measured(584) is None and len(asked) == 2
    assert measured(584) is None and len(asked) == 2, "the library is an answer, too"
    # The table is believed, a graph is not disturbed.
    assert measured(544) == gemm.planned(H200, *size[1:3], 544, 2048, 2048)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert measured(600) is None and len(asked) == 2


@pytest.mark.parametrize("activation", list(launch.ACTIVATIONS))
@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_measured_is_the_product_with_its_activation(
    activation: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library and by a tiling, with the output that the program has."""
    seen: list[Tensor] = []
    monkeypatch.setattr(gemm, "gemm", lambda x, weight, bias, out, **_: seen.append(out))
    monkeypatch.setattr(linear, "library_product", linear.linear)
    layer = make_linear(draw(64, 32), None if activation in GATED else draw(64), BF16, 4.0 if fp8 else None)
    call = linear._trial(layer, activation, 6, H200)
    call(TILINGS[0])
    (out,) = seen
    call(None)
    assert out.shape == (6, 32 if activation in GATED else 64)
    assert out.dtype == (FP8 if fp8 and activation != "none" else BF16)
    x = draw(6, 32).to(layer.weight.dtype).float() * layer.input_scale_value
    y = x @ (layer.weight.float() * layer.weight_scale_value).T + (0 if layer.bias is None else layer.bias.float())
    if activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation in GATED:
        gate = y[:, :32]
        y = (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * y[:, 32:]
    assert float((out.float() - y).abs().max() / y.abs().max()) < (0.07 if out.dtype == FP8 else 0.02)


def test_the_ledger_names_whose_products_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_linear(torch.zeros(128, 64), None, BF16)
    products = {"a": (layer, "none"), "b": (layer, "gelu")}
    assert linear.products_by(8, products) == ("", False)
    monkeypatch.setattr(
        gemm, "planned", lambda device, kind, activation, *_: TILINGS[0] if activation == "none" else None
    )
    for early in (False, True):
        monkeypatch.setattr(linear, "dependent_launches", lambda _, early=early: early)
        with steered("cuda"):
            assert linear.products_by(8, products) == (", products in CUDA C++: a; cuBLAS: b", early)


# -- the ops, on the CPU ----------------------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fp8", [False, True])
def test_gate_and_up_by_eights_are_the_same_product(fp8: bool) -> None:
    x, weight, bias = draw(5, 32), draw(48, 32, seed=1), draw(48, seed=2)
    whole = make_linear(weight, bias, torch.float32, 4.0 if fp8 else None)
    paired = pair(whole)
    assert paired.paired and paired.weight.shape == whole.weight.shape and paired.bytes == whole.bytes
    # Gate's first eight rows, up's first eight, gate's next eight …
    bits = (lambda t: t.view(torch.uint8)) if fp8 else (lambda t: t)
    assert torch.equal(bits(paired.weight)[:8], bits(whole.weight)[:8])
    assert torch.equal(bits(paired.weight)[8:16], bits(whole.weight)[24:32])
    assert torch.equal(bits(paired.weight)[40:48], bits(whole.weight)[40:48])
    x = x.to(FP8) if fp8 else x
    scale = whole.input_scale_value * whole.weight_scale_value
    gate, up = F.linear(x.float() * scale, whole.weight.float(), bias).chunk(2, 1)
    want = F.gelu(gate, approximate="tanh") * up
    for layer in (whole, paired):
        got, scratch = torch.empty(5, 24), torch.empty(5, 48)
        linear.gate_up(x, layer, scratch, got, inverse_scale=None)
        torch.testing.assert_close(got, want)
        narrow = torch.empty(5, 24).to(FP8)
        linear.gate_up(x, layer, scratch, narrow, inverse_scale=10.0)
        assert torch.equal(narrow.float(), (got * 10).clamp(-448, 448).to(FP8).float())


def test_halves_that_are_no_eights_stay_as_they_are() -> None:
    layer = make_linear(draw(24, 8), None, torch.float32)
    assert pair(layer) is layer


def test_linear_gelu_is_linear_and_gelu() -> None:
    x, layer = draw(3, 16), make_linear(draw(32, 16, seed=1), draw(32, seed=2), torch.float32)
    want = F.gelu(F.linear(x, layer.weight, layer.bias), approximate="tanh")
    out = torch.empty(3, 32)
    linear.linear_gelu(x, layer, out, out, inverse_scale=None)
    torch.testing.assert_close(out, want)
    wide, narrow = out.clone(), torch.empty(3, 32).to(FP8)
    linear.linear_gelu(x, layer, out, narrow, inverse_scale=30.0)
    assert torch.equal(narrow.float(), (wide * 30).clamp(-448, 448).to(FP8).float())


def test_an_own_gemm_gets_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(Gpu, "of", lambda _: H200)
    monkeypatch.setattr(gemm, "planned", lambda *_: TILINGS[0])
    monkeypatch.setattr(gemm, "why_not", lambda *_: None)
    monkeypatch.setattr(gemm, "gemm", lambda x, weight, bias, out, **options: seen.append({"bias": bias, **options}))
    layer = Linear(torch.zeros(32, 16).to(FP8), torch.ones(32), torch.tensor(0.5), torch.tensor(0.25), 0.5, 0.25)
    x, out = torch.zeros(2, 16).to(FP8), torch.zeros(2, 32)
    assert linear.launched_own_gemm(x, layer, out, "gelu", 3.0, True)
    assert seen == [
        {
            "bias": layer.bias,
            "gpu": H200,
            "tiling": TILINGS[0],
            "activation": "gelu",
            "scale": 0.125,
            "inverse_scale": 3.0,
            "dependent": True,
        }
    ]
    # A GeGLU's product has no bias.
    assert not linear.launched_own_gemm(x, pair(layer), out[:, :16], "geglu", None, True) and len(seen) == 1


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_norms_inside_the_products_are_the_norms(offset: float) -> None:
    """A residual of great mean, too: what is normed varies by one part in hundreds."""
    rows, width, hidden = 7, 192, 40
    x, a = draw(rows, width) + offset, draw(rows, 32, seed=1)
    first = make_linear(draw(width, 32, seed=2), draw(width, seed=3), torch.float32)
    second = norms.with_sums(make_linear(draw(hidden, width, seed=4), draw(hidden, seed=5), torch.float32))
    moments = torch.full((3, rows, 2), float("nan"))
    residual = x.clone()
    norms.residual_linear(a, first, residual, moments)
    want = x + F.linear(a, first.weight, first.bias)
    torch.testing.assert_close(residual, want)
    parts = want.view(rows, 3, 64)
    torch.testing.assert_close(moments[..., 0].T, parts.mean(2))
    torch.testing.assert_close(moments[..., 1].T, parts.var(2, unbiased=False) * 64)
    out = torch.empty(rows, hidden)
    for layer_norm, gelu in itertools.product((False, True), repeat=2):
        norms.normed_linear(want, moments, second, out, layer_norm=layer_norm, eps=1e-6, gelu=gelu)
        normed = F.layer_norm(want, (width,), eps=1e-6) if layer_norm else F.rms_norm(want, (width,), eps=1e-6)
        expected = F.linear(
            normed.double(), second.weight.double(), second.bias.double() if second.bias is not None else None
        )
        expected = F.gelu(expected, approximate="tanh") if gelu else expected
        torch.testing.assert_close(out.double(), expected, atol=2e-3 if offset else 2e-5, rtol=1e-4)


def test_normed_rows_have_moments_that_change_nothing() -> None:
    x, layer = (
        F.layer_norm(draw(5, 128), (128,)),
        norms.with_sums(make_linear(draw(16, 128, seed=1), None, torch.float32)),
    )
    moments, out = norms.moments_buffer(5, 128, x.device, 1e-3), torch.empty(5, 16)
    for layer_norm in (False, True):
        norms.normed_linear(x, moments, layer, out, layer_norm=layer_norm, eps=1e-3)
        torch.testing.assert_close(out, F.linear(x, layer.weight))


def test_norms_are_folded_where_every_product_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    products = [(make_linear(torch.zeros(n, 64), None, BF16), "none") for n in (64, 128)]
    assert not norms.can_be_inside(8, 64, *products)
    for known in ((64,), (64, 128)):
        monkeypatch.setattr(gemm, "planned", lambda *sizes, known=known: TILINGS[0] if sizes[4] in known else None)
        with steered("cuda"):
            assert norms.can_be_inside(8, 64, *products) == (len(known) == 2)


@pytest.mark.parametrize("silu", [False, True])
def test_a_norm_inside_gate_and_up_is_the_norm(silu: bool) -> None:
    rows, width, hidden = 7, 128, 24
    x, a = draw(rows, width), draw(rows, 32, seed=1)
    residual, moments = x.clone(), torch.empty(2, rows, 2)
    norms.residual_linear(a, make_linear(draw(width, 32, seed=2), None, torch.float32), residual, moments)
    layer = make_linear(draw(2 * hidden, width, seed=3), None, torch.float32)
    normed = F.rms_norm(residual, (width,), eps=1e-6)
    want, got = torch.empty(rows, hidden), torch.empty(rows, hidden)
    linear.gate_up(normed, layer, torch.empty(rows, 2 * hidden), want, inverse_scale=None, silu=silu)
    norms.normed_gate_up(residual, moments, pair(layer), got, eps=1e-6, silu=silu)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_gate_and_up_that_are_not_paired_or_quantised_take_no_norm_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "planned", lambda *_: TILINGS[0])
    plain = make_linear(draw(64, 64), None, BF16)
    quantised = pair(make_linear(draw(64, 64), None, BF16, 4.0))
    with steered("cuda"):
        assert norms.can_be_inside(8, 64, (pair(plain), "swiglu"))
        assert not norms.can_be_inside(8, 64, (plain, "swiglu"))
        assert not norms.can_be_inside(8, 64, (quantised, "swiglu"))
        assert not norms.can_be_inside(8, 80, (pair(plain), "swiglu")), "moments are of 64 columns"
        persistent = Tiling(2, 1, 2, 136, 3, persistent=True)
        monkeypatch.setattr(gemm, "planned", lambda *_: persistent)
        assert linear.has_own_gemm(8, pair(plain), "swiglu")
        assert not norms.can_be_inside(8, 64, (pair(plain), "swiglu")), "a block has the norms of one tile"
