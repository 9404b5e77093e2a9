"""The Hopper GEMM without a GPU: tile configs, the table, the search, tensor maps and the arguments of launches."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.gpus import A100, GPUS, H200, assumed
from vla_accel.errors import EngineError
from vla_accel.fp8 import E4M3
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm import hopper
from vla_accel.kernels.gemm.config import known
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Rotation
from vla_accel.kernels.gemm.hopper import TABLES, HopperTile
from vla_accel.kernels.gemm.hopper.config import SHARED_LIMIT, HopperSizes, Use, few_rows
from vla_accel.kernels.gemm.hopper.launch import why_not as why_not_product
from vla_accel.kernels.gemm.hopper.launch import why_not_tile
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu

BF16, FP8, INT8 = torch.bfloat16, E4M3.dtype, torch.int8
NONE, GELU, GEGLU, SWIGLU = Activation.NONE, Activation.GELU, Activation.GEGLU, Activation.SWIGLU
# One of every kind: plain, several blocks and parts, sharing either operand or both, split, persistent.
TILES = (
    HopperTile(1, 1, 1, 64, 4), HopperTile(2, 2, 1, 128, 3), HopperTile(2, 1, 2, 136, 4),
    HopperTile(1, 1, 1, 136, 4, 2, 1), HopperTile(1, 1, 1, 104, 4, 2, 2), HopperTile(2, 1, 1, 88, 3, 1, 3),
    HopperTile(2, 1, 1, 136, 4, 1, 1, 2), HopperTile(1, 1, 1, 128, 3, 1, 2, 3), HopperTile(1, 1, 1, 128, 3, resident=2),
    HopperTile(3, 1, 1, 104, 4), HopperTile(2, 1, 2, 136, 3, persistent=True),
    HopperTile(2, 1, 1, 72, 4, 2, 1, persistent=True), HopperTile(2, 1, 1, 128, 6, 1, 1, 3),
)  # fmt: skip
TABLE = [(key, *row) for key, rows in TABLES["sm_90a"].items() for row in rows]
NORMED, RESIDUAL = Use(normed=True), Use(residual=True)


def why_not(tile: HopperTile, *uses: Use, k: int = 4096) -> str | None:
    return tile.why_not(H200, HopperSizes(544, 2048, k, uses=uses or (Use(),)))


# -- tile configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("gated", [False, True])
def test_shared_memory_holds_everything(tile: HopperTile, gated: bool) -> None:
    assert why_not(tile, Use(gated)) is None
    ring = tile.stages * (tile.weight_rows + tile.tokens) * 128
    pitch = (32 if gated else 64) * 2 + 16
    share = -(-tile.tokens // 8 // tile.split) * 8
    for normed in (False, True):
        staging, exchange, barriers, size = tile.memory(gated, normed)
        staged = staging + tile.groups * (tile.width if tile.split == 1 else share) * pitch
        assert barriers >= max(ring, staged) and staging % 16 == exchange % 16 == barriers % 16 == 0
        assert barriers + 16 * tile.stages + (8 * tile.tokens if normed else 0) + 1024 <= size
        assert size <= SHARED_LIMIT or (normed and why_not(tile, Use(gated, normed=True)))
        # The next tile's stages arrive while a persistent block stages its output.
        assert not tile.persistent or staging >= ring
        if tile.split > 1:
            sums = tile.weight_rows * share * (tile.split - 1) * 4
            assert exchange + sums <= barriers
            # The staging is written while sums are read; sums arrive while stages are read, or after all are.
            assert staging >= exchange + sums or staged <= exchange
            assert exchange == 0 or exchange >= ring
    begin, fetching, multiplying = tile.registers
    assert begin * tile.threads * tile.resident <= 65_536
    assert fetching + tile.groups * multiplying <= begin * (tile.groups + 1)
    assert not (begin % 8 or fetching % 8 or multiplying % 8)


@pytest.mark.parametrize("activation", Activation)
def test_an_activation_that_the_epilogue_lacks_is_refused(activation: Activation) -> None:
    x, weights = torch.zeros(16, 64, dtype=torch.bfloat16), Linear(torch.zeros(32, 64, dtype=torch.bfloat16), None)
    out = torch.zeros(16, 16 if activation.gated else 32, dtype=torch.bfloat16)
    reason = why_not_product(H200, x, weights, out, Epilogue(activation=activation))
    refused = activation in (Activation.SILU, Activation.MISH)
    assert (reason is not None and f"got {activation}" in reason) == refused, reason
    assert refused or reason is None


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_blocks_of_a_cluster_fetch_every_row(count: int) -> None:
    """As `share_start` of gemm.cu places the shares."""
    for width in range(64, 257, 8):
        share = HopperTile(1, 1, 1, width, 2, across=count).shares[1]
        starts = [i * (width - share) // max(count - 1, 1) // 8 * 8 for i in range(count)]
        assert share % 8 == 0 and all(start % 8 == 0 for start in starts)
        assert {row for start in starts for row in range(start, start + share)} == set(range(width))


@pytest.mark.parametrize(
    ("tile", "uses", "text"),
    [
        (HopperTile(1, 1, 1, 60, 4), (), "multiple of 8"),
        (HopperTile(1, 1, 1, 264, 4), (), "multiple of 8"),
        (HopperTile(1, 1, 1, 128, 4, 1, 1, 2, persistent=True), (), "split"),
        (HopperTile(1, 1, 1, 128, 4, 8, 3), (), "cluster"),
        (HopperTile(1, 1, 1, 128, 12), (), "shared memory"),
        (HopperTile(1, 1, 1, 128, 6, resident=2), (), "shared memory"),
        (HopperTile(2, 2, 1, 208, 3), (), "registers"),
        (HopperTile(1, 1, 1, 128, 2, resident=3), (), "registers"),
        (HopperTile(3, 1, 1, 200, 3), (RESIDUAL,), "registers"),
        (HopperTile(2, 1, 2, 136, 3, persistent=True), (NORMED,), "norms of one"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tile: HopperTile, uses: tuple[Use, ...], text: str) -> None:
    assert text in (why_not(tile, *uses) or "")
    assert not uses or why_not(tile) is None


def test_norms_take_shared_memory_and_parts_of_k_are_not_empty() -> None:
    sizes = itertools.product(range(2, 13), range(8, 257, 8))
    many = (HopperTile(1, 1, 1, width, stages) for stages, width in sizes)
    full = next(t for t in many if t.memory(False).size <= SHARED_LIMIT < t.memory(False, True).size)
    assert why_not(full) is None and "shared memory" in (why_not(full, NORMED) or "")
    assert "part of 2 empty" in (why_not(HopperTile(1, 1, 1, 64, 4, 1, 1, 2), k=64) or "")


# -- the table and the search ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "least", "most", "tile"), TABLE)
def test_configs_of_the_table_run(
    key: tuple[str, Activation, int, int], least: int, most: int, tile: HopperTile
) -> None:
    kind, activation, n, k = key
    uses = [Use(activation.gated)]
    if (n, k) in ((1152, 1152), (1152, 4352), (2048, 16_384)):
        uses.append(RESIDUAL)
    elif kind == "half" and not activation.gated:
        uses.append(NORMED)
    assert tile.why_not(H200, HopperSizes(most, n, k, 1 if kind == "fp8" else 2, tuple(uses))) is None
    # No tile is all padding, and little of the tiles is.
    whole = -(-most // (tile.tokens * tile.along)) * tile.tokens * tile.along
    assert kind in ("fp8", "half") and n % 64 == 0 and 0 < least <= most and whole < 1.2 * least
    assert [row[:2] for row in TABLES["sm_90a"][key]] == sorted(row[:2] for row in TABLES["sm_90a"][key])


def test_the_table_is_for_its_architecture_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("half", NONE, 128, 64)
    monkeypatch.setitem(TABLES["sm_90a"], key, ((9, 16, TILES[0]), (20, 64, TILES[1])))
    assert known(torch.device("cpu"), BF16, NONE, 9, 128, 64) is None
    for gpu in GPUS.values():
        with assumed(gpu):
            of_device = Gpu.of(torch.device("cuda"))
            found = [hopper.planned(of_device, BF16, NONE, rows, 128, 64) for rows in (8, 9, 16, 17, 20, 64, 65)]
        hit = gpu.capability == (9, 0)
        assert found == ([None, *[TILES[0]] * 2, None, *[TILES[1]] * 2, None] if hit else [None] * 7)
    assert hopper.planned(H200, FP8, NONE, 8, 128, 64) is None
    assert hopper.planned(H200, BF16, GELU, 8, 128, 64) is None


@pytest.mark.parametrize("rows", [64, 129, 576, 1024, 1025, 2176, 8704])
def test_searched_configs_run_and_waste_little(rows: int) -> None:
    for kind, activation, n, k in sorted({key for key, *_ in TABLE}):
        found = hopper.searched(H200, FP8 if kind == "fp8" else BF16, activation, rows, n, k)
        assert 1 <= len(found) <= (8 if rows > 1024 else 11) and len(set(found)) == len(found)
        # Configs that run norms are not persistent.
        kinds = {(tile.across, tile.persistent) for tile in found}
        assert rows <= 1024 or kinds == {(1, False), (2, False)} | (
            {(1, True), (2, True)} if activation.gated else set()
        )
        uses = (Use(gated=True),) if activation.gated else (Use(), RESIDUAL, NORMED)
        for tile in found:
            assert tile.why_not(H200, HopperSizes(rows, n, k, 1 if kind == "fp8" else 2, uses)) is None
            tiles = -(-rows // tile.tokens)
            assert rows <= tiles * tile.tokens < rows + 8 * tiles * tile.parts


def test_small_products_give_most_multiprocessors_a_tile() -> None:
    """SmolVLA's prefix: 177 rows by 960 columns are 15 tiles of weights."""
    found = hopper.searched(H200, BF16, NONE, 177, 960, 960)
    assert len(found) > 3
    assert all(75 <= -(-177 // t.tokens) * -(-960 // t.weight_rows) * t.split <= 132 for t in found), found


def test_nothing_is_searched_where_the_kernel_cannot_run_or_gains_nothing() -> None:
    for gpu in (None, H200.portable, GPUS["B200"]):
        assert hopper.searched(gpu, BF16, NONE, 576, 2048, 2048) == []
    for rows, n, k in ((1, 2048, 2048), (32, 2048, 2048), (32_769, 2048, 2048), (576, 2048, 2049), (576, 256, 256)):
        assert hopper.searched(H200, BF16, NONE, rows, n, k) == [], (rows, n, k)
    assert hopper.searched(H200, BF16, NONE, 576, 2048, 2048) != []


@pytest.mark.parametrize("kind", [BF16, FP8])
def test_some_hundreds_of_rows_share_k_where_tiles_are_few(kind: torch.dtype) -> None:
    """X-VLA's transformer has 262 rows."""
    wide, deep = (hopper.searched(H200, kind, NONE, 262, n, k) for n, k in ((4096, 1024), (1024, 4096)))
    assert all({tile.resident for tile in found} == {1, 2} for found in (wide, deep))
    assert any(tile.split > 2 for tile in deep) and wide[0].split == 1


@pytest.mark.parametrize("rows", [17, 32, 33, 50, 80, 200, 512, 1000])
def test_configs_for_few_rows_run_and_keep_the_gpu_busy(rows: int) -> None:
    """Weight rows, K, and rows of a group of pairs, of π0's and π0.5's expert."""
    for n, k, paired in ((2560, 1024, 256), (1024, 2048, 0), (8192, 1024, 8192), (1024, 4096, 0)):
        found = few_rows(H200, rows, n, k, paired)
        assert {t.resident for t in found} == {1, 2} and len(set(found)) == len(found) <= 8
        weights = Linear(torch.empty(n, k, dtype=BF16, device="meta"))
        for tile in found:
            epilogue, norm = Epilogue(residual=not paired), Norm(0.0) if paired else None
            x = torch.empty(rows, k, dtype=BF16, device="meta")
            assert why_not_tile(x, weights, epilogue, norm, tile, paired // 2) is None
            blocks = -(-rows // tile.tokens) * (n // tile.weight_rows) * tile.split
            assert blocks >= 0.6 * 132 * -(-blocks // 132), (rows, n, tile)
            assert tile.tokens * -(-rows // tile.tokens) < rows + 8 * -(-rows // tile.tokens)


@pytest.mark.parametrize("rows", [33, 51, 98, 262, 640])
def test_configs_for_weights_of_one_byte_have_more_stages(rows: int) -> None:
    for n, k, paired in ((4608, 1536, 0), (1536, 6144, 0), (3072, 3072, 0), (8192, 1024, 8192)):
        found = few_rows(H200, rows, n, k, paired, widened=True)
        assert {t.resident for t in found} == {1, 2} and len(set(found)) == len(found) <= 8
        assert rows > 262 or max(t.stages for t in found) > 8
        weights = Linear(torch.empty(n, k, dtype=FP8, device="meta"))
        for tile in found:
            epilogue, norm = Epilogue(residual=not paired), Norm(0.0) if paired else None
            x = torch.empty(rows, k, dtype=BF16, device="meta")
            assert why_not_tile(x, weights, epilogue, norm, tile, paired // 2) is None
            assert tile.memory(bool(paired), bool(paired), True).size <= SHARED_LIMIT // tile.resident
    assert few_rows(H200, 98, 3072, 1032) != [] == few_rows(H200, 98, 3072, 1032, widened=True)


def test_a_stage_of_one_byte_weights_is_smaller_and_needs_more_registers() -> None:
    sizes = HopperSizes(544, 2048, 4096)
    deep, wide = HopperTile(1, 1, 1, 64, 16), HopperTile(1, 1, 1, 256, 4)
    assert deep.memory(False, False, True).barriers == deep.memory(False).barriers - 16 * 64 * 64
    assert deep.why_not(H200, sizes) and deep.why_not(H200, replace(sizes, widened=True)) is None
    assert wide.why_not(H200, sizes) is None
    assert "registers" in (wide.why_not(H200, replace(sizes, widened=True, uses=(RESIDUAL,))) or "")


def test_elsewhere_there_are_no_configs_for_few_rows() -> None:
    for gpu in (None, A100, GPUS["B200"], H200.portable):
        assert few_rows(gpu, 160, 1024, 2048) == []
    assert few_rows(H200, 16, 1024, 2048) == [] != few_rows(H200, 17, 1024, 2048)
    for n, k, paired in ((720, 1024, 0), (1024, 1020, 0), (2400, 1024, 48)):
        assert few_rows(H200, 160, n, k, paired) == []


# -- launches ----------------------------------------------------------------------------------------------------------


class Recorder:
    """Replaces a loaded module and the driver that makes tensor maps."""

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
        values = {field: getattr(arguments[2], field) for field, *_ in arguments[2]._fields_}
        self.launches.append({"name": name, "blocks": blocks, "threads": threads, **values, **options})

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
        at, kind, _, address, sizes, strides, box, steps, interleave, swizzle, _, fill = arguments
        inner = box[0] * (1 if kind == 0 else 2)
        assert at.value % 64 == 0 and set(steps) == {1} and (interleave, fill) == (0, 0)
        assert swizzle == {64: 2, 128: 3}[inner]
        ctypes.memset(at, 0x5A, 128)
        self.maps.append((kind, address.value, list(sizes), list(strides), list(box)))
        return 0

    def macros(self, **values: int) -> bool:
        return all(f"#define {name} {value}\n" in self.source for name, value in values.items())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def launch(
    x: Tensor, weights: Linear, out: Tensor | Heads, tile: HopperTile = TILES[0], norm: Norm | None = None,
    **epilogue: Any,
) -> None:  # fmt: skip
    hopper.gemm(x, weights, out, Epilogue(**epilogue), norm, tile, H200)


def operands(rows: int, n: int, k: int, kind: torch.dtype = BF16) -> tuple[Tensor, Linear, Tensor]:
    return torch.zeros(rows, k).to(kind), Linear(torch.zeros(n, k).to(kind)), torch.zeros(rows, n, dtype=BF16)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rows", [1, 100, 544])
def test_a_launch_covers_the_output(tile: HopperTile, rows: int, recorder: Recorder) -> None:
    for (n, k), kind in itertools.product(((1152, 4352), (64, 1152)), (BF16, FP8)):
        x, weights, out = operands(rows, n, k, kind)
        launch(x, replace(weights, weight_scale_value=0.5), out, tile)
        got, maps = recorder.launches[-1], recorder.maps[-2:]
        assert got["blocks"] % tile.cluster == 0 and got["cluster"] == tile.cluster and not got["dependent"]
        assert got["threads"] == tile.threads and got["scale"] == 0.5 and got["bias"] is None
        assert got["rows"] == rows and got["columns"] == n and got["chunks"] * 128 >= k * x.element_size()
        along, across = tile.tokens * tile.along, tile.weight_rows * tile.across
        weight_tiles, rest = divmod(got["tiles"], got["token_tiles"])
        assert (got["token_tiles"] - 1) * along < rows <= got["token_tiles"] * along
        assert rest == 0 and weight_tiles * across >= n > (weight_tiles - 1) * across
        most = 132 * tile.resident if tile.persistent else got["blocks"]
        assert got["blocks"] == min(got["tiles"] * tile.cluster, most // tile.cluster * tile.cluster)
        for (code, address, sizes, strides, box), matrix, share in zip(
            maps, (weights.weight, x), tile.shares, strict=True
        ):
            assert code == (0 if kind == FP8 else 9) and address == matrix.data_ptr()
            assert sizes == [k, matrix.shape[0]] and strides == [k * matrix.element_size()]
            assert box[0] * matrix.element_size() == 128 and box[1] <= 256 and share % box[1] == 0


@pytest.mark.parametrize("kind", [FP8, INT8])
def test_a_launch_gets_weights_of_one_byte(kind: torch.dtype, recorder: Recorder) -> None:
    x, weights = torch.zeros(51, 1536, dtype=BF16), Linear(torch.zeros(512, 1536).to(kind))
    out, tile = torch.zeros(51, 512, dtype=BF16), HopperTile(1, 1, 1, 56, 12)
    scales = torch.ones(512) if kind == INT8 else torch.tensor(0.5)
    weights = replace(weights, weight_scale=scales, weight_scale_value=0.5 if kind == FP8 else 1.0)
    launch(x, weights, out, tile)
    got, (of_weights, of_rows) = recorder.launches[-1], recorder.maps[-2:]
    assert got["scale"] == weights.weight_scale_value and got["chunks"] == 24
    assert got["scales"] == (scales.data_ptr() if kind == INT8 else None)
    assert of_weights == (0, weights.weight.data_ptr(), [1536, 512], [1536], [64, 64])
    assert of_rows == (9, x.data_ptr(), [1536, 51], [3072], [64, 56])
    assert recorder.macros(KIND=0, WIDEN=1 if kind == FP8 else 2) and "wgmma_bf16_by_registers" in recorder.source
    assert recorder.shared == tile.memory(False, False, True).size
    launch(x.to(FP8), replace(weights, weight=weights.weight.to(FP8)), out, TILES[0])
    assert recorder.macros(KIND=2, WIDEN=0)


def test_a_launch_gets_the_residual_and_the_moments_to_write(recorder: Recorder) -> None:
    x, weights, out = operands(34, 256, 512)
    gate, scale, moments = torch.ones(256), torch.ones(256), Moments.like(out, 64, True)
    tile = HopperTile(2, 1, 1, 40, 4, split=2)
    launch(x, weights, out, tile, gate=gate, residual=True, moments=moments, next_scale=scale)
    got = recorder.launches[-1]
    assert moments.scaled is not None and got["scaled"] == moments.scaled.data_ptr() and got["out"] == out.data_ptr()
    assert (got["sums_out"], got["squares_out"]) == (moments.sums.data_ptr(), moments.squares.data_ptr())
    assert (got["gate"], got["next_scale"]) == (gate.data_ptr(), scale.data_ptr())
    assert (got["rows"], got["columns"], got["chunks"], got["tiles"], got["blocks"]) == (34, 256, 8, 2, 4)
    assert recorder.macros(RESIDUAL=1, NORM=0, PAIRS=0, ROPE=0)
    # The last layer writes no moments.
    launch(x, weights, out, tile, residual=True)
    got = recorder.launches[-1]
    assert got["gate"] is got["scaled"] is got["squares_out"] is got["next_scale"] is None


def test_a_launch_gets_the_moments_of_its_rows(recorder: Recorder) -> None:
    x, weights, out = operands(100, 128, 192)
    launch(x, weights, out)
    plain, got = recorder.shared, recorder.launches[-1]
    assert got["squares"] is got["weight_sums"] is None and recorder.macros(RESIDUAL=0, NORM=0)
    moments, sums = Moments.like(x), torch.zeros(128)
    for weight_sums, number in ((None, 1), (sums, 2)):
        launch(x, weights, out, norm=Norm(1e-3, moments, sums=weight_sums))
        got = recorder.launches[-1]
        assert (got["sums"], got["squares"]) == (moments.sums.data_ptr(), moments.squares.data_ptr())
        assert abs(got["eps"] - 1e-3) < 1e-9 and (got["moment_tiles"], got["width"]) == (3, 192)
        assert got["weight_sums"] == (None if weight_sums is None else sums.data_ptr())
        assert recorder.macros(NORM=number) and recorder.shared == plain + 8 * TILES[0].tokens


def test_pairs_come_by_a_tensor_map_of_their_own(recorder: Recorder) -> None:
    rows, width, tile = 34, 256, HopperTile(2, 1, 1, 40, 4, split=2)
    x, weights, out = torch.zeros(rows, width, dtype=BF16), Linear(torch.zeros(1024, width, dtype=BF16)), None
    norm, shift = Norm(1e-3, Moments.like(x, 64, True)), torch.ones(1024)
    assert norm.moments is not None and norm.moments.scaled is not None
    out = torch.zeros(rows, 512, dtype=BF16)
    launch(x, weights, out, tile, norm, shift=shift, activation=SWIGLU)
    got = recorder.launches[-1]
    assert (got["half"], got["columns"], got["shift"]) == (512, 512, shift.data_ptr())
    assert recorder.macros(PAIRS=1, ROPE=0, NORM=1, ACTIVATION=SWIGLU.code)
    weight_map, row_map = recorder.maps[-2:]
    assert weight_map[2:] == ([256, 8, 2, 64, 1], [512, 512 * 512, 8 * 512, 1024 * 512], [64, 8, 2, 8, 1])
    assert row_map[1] == norm.moments.scaled.data_ptr(), "the product reads the scaled rows"
    rope = Rotation(torch.ones(90, 64), torch.zeros(90, 64), torch.tensor([3, 9], dtype=torch.int32))
    heads = Heads(*(torch.zeros(2, 17, count, 128, dtype=BF16) for count in (4, 2, 2)))
    launch(x, weights, heads, tile, norm, rope=rope)
    got = recorder.launches[-1]
    assert [got[name] for name in ("out", "k", "v", "cos", "sin", "starts")] == [
        tensor.data_ptr() for tensor in (heads.q, heads.k, heads.v, rope.cos, rope.sin, rope.starts)
    ]
    assert [got[n] for n in ("half", "tokens", "heads", "kv_heads", "columns")] == [64, 17, 4, 2, 1024]
    assert recorder.macros(PAIRS=1, ROPE=1) and got["shift"] is None
    assert recorder.maps[-1][2:] == ([256, 8, 2, 8, 8], [512, 64 * 512, 8 * 512, 128 * 512], [64, 8, 2, 8, 1])


def misaligned(like: Tensor) -> Tensor:
    """A tensor as large, eight bytes after a multiple of sixteen."""
    step = 8 // like.element_size()
    return torch.empty(like.numel() + step, dtype=like.dtype)[step:].view(like.shape)


def test_operands_and_epilogues_that_do_not_fit_are_refused(recorder: Recorder) -> None:
    x, weights, out = operands(100, 128, 192)
    half, quantised = out[:, :64].contiguous(), (x.to(FP8), Linear(weights.weight.to(FP8)))
    of_out, of_x = Moments.like(out), Norm(1e-6, Moments.like(x), sums=torch.zeros(128))
    paired, biased = replace(weights, paired=True), replace(weights, bias=out[0], paired=True)
    onto: dict[str, Any] = {"residual": True, "moments": of_out}
    persistent, wide_pairs = HopperTile(2, 1, 2, 136, 3, persistent=True), HopperTile(1, 1, 1, 64, 4, across=2)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x.float(), weights, out), {}, "got torch.float32"),
        ((x, weights, out.half()), {}, "got torch.float16"),
        ((x.half(), Linear(weights.weight.to(FP8)), out.half()), {}, "got torch.float16 and torch.float8_e4m3fn"),
        ((x[:, :184].contiguous(), Linear(weights.weight[:, :184].to(FP8).contiguous()), out), {}, "16 bytes"),
        ((x, Linear(weights.weight[:, :32]), out), {}, "weight .128, 32."),
        ((x, weights, out[:, :64]), {}, "out .100, 64."),
        ((x[:, :60], Linear(weights.weight[:, :60]), out), {}, "16 bytes"),
        ((x, weights, out.t().contiguous().t()), {}, "contiguous"),
        ((x[:1].expand(100, 192), weights, out), {}, "do not overlap"),
        ((x.view(-1).as_strided((100, 192), (184, 1)), weights, out), {}, "do not overlap"),
        ((x, weights, misaligned(out)), {}, "aligned to 16 bytes"),
        ((misaligned(x), weights, out), {}, "aligned to 16 bytes"),
        ((x, weights, out), {"tile": HopperTile(1, 1, 1, 60, 4)}, "multiple of 8"),
        ((x, biased, half), {"activation": GEGLU}, "without a bias"),
        ((x, paired, half), {"activation": GEGLU, "shift": torch.zeros(128)}, "no shift"),
        ((x, weights, half), {"activation": GEGLU, "norm": of_x, "tile": wide_pairs}, "shares its operands"),
        ((x, weights, out), {**onto, "moments": Moments.like(x)}, r"moments of 128 columns .* got .* \(3, 100\)"),
        ((x, weights, out), {**onto, "moments": replace(of_out, sums=of_out.sums.double())}, "got torch.float64"),
        ((x, weights, out), {**onto, "moments": Moments.like(out, 32)}, "moments of 64 columns, got 32"),
        ((x, weights, out), {**onto, "activation": GELU}, "plain product"),
        ((x, weights, out.to(FP8)), {**onto, "quantize": 1.0}, "plain product"),
        ((x, weights, out), {"gate": torch.zeros(128)}, "come with a residual"),
        ((x, paired, half), {"activation": GEGLU, "moments": of_out}, "neither gated nor rotated"),
        ((x, weights, out), {"residual": True, "skip_every": 2}, "rows with constants"),
        ((x, weights, out), {"norm": Norm(1e-6)}, "come with moments"),
        ((x, weights, out), {"norm": Norm(1e-6, of_out)}, "moments of 192 columns"),
        ((x, weights, out), {"norm": replace(of_x, sums=torch.zeros(64))}, "128 weight rows"),
        ((x, paired, half), {"norm": of_x, "activation": SWIGLU}, "before swiglu"),
        ((*quantised, out), {"norm": of_x}, "only BF16"),
        ((x, weights, out), {"norm": of_x, "tile": persistent}, "norms of one"),
    ]  # fmt: skip
    for arguments, options, text in wrong:
        with pytest.raises(EngineError, match=text):
            launch(*arguments, **options)
    assert not recorder.launches


# -- pairs of weight rows ----------------------------------------------------------------------------------------------


def rows_of_tiles(half: int, rows: int, weight_rows: int) -> list[int]:
    """The weight row in each row of all tiles, by the sizes, strides and coordinates of the tensor map."""
    sizes, strides = (8, 2, half // 8, weight_rows // (2 * half)), (1, half, 8, 2 * half)
    found = []
    for row in range(0, weight_rows, rows):
        corner = (0, 0, row % (2 * half) // 16, row // (2 * half))  # as gemm.cu fetches a tile
        for inside in range(rows):
            at, left = [], inside
            for size, start in zip((8, 2, rows // 16, 1), corner, strict=True):
                at.append(start + left % size)
                left //= size
            assert all(a < size for a, size in zip(at, sizes, strict=True))
            found.append(sum(a * stride for a, stride in zip(at, strides, strict=True)))
    return found


@pytest.mark.parametrize(("half", "rows", "weight_rows"), [(128, 64, 2560), (128, 128, 2560), (4096, 128, 8192)])
def test_pairs_of_weight_rows_meet_in_a_thread(half: int, rows: int, weight_rows: int) -> None:
    """Eight rows of a side, then the eight that are `half` further: a lane has a row and the one eight below it."""
    found = rows_of_tiles(half, rows, weight_rows)
    assert sorted(found) == list(range(weight_rows))
    for row, g in itertools.product(range(0, weight_rows, 16), range(8)):
        group, inside = row // (2 * half), row % (2 * half)
        # load_rows and head_columns of epilogue.cu.
        assert found[row + g] == group * 2 * half + inside // 16 * 8 + g and found[row + 8 + g] == found[row + g] + half
        for eight in (0, 8):
            column = inside // 16 * 8 + ((inside + eight) // 8 % 2) * half
            assert found[row + eight + g] % (2 * half) == column + g
