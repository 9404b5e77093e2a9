"""The tile configs of a suffix's products and attention: which ones fit each GPU, and the order to measure them in."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.support.gpus import A100, ARCHITECTURES, GPUS, H200, ORIN, RTX_4090
from vla_accel.kernels import config as configs
from vla_accel.kernels.attention.config import (
    CrossShape,
    KeySplit,
    NormedShape,
    SuffixShape,
    cross_tiles,
    key_splits,
    normed_tiles,
)
from vla_accel.kernels.autotune import Fastest
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.config import MOST_MEASURED
from vla_accel.kernels.gemm.config import (
    GemmSizes,
    Library,
    OneRow,
    Pipelined,
    Skinny,
    TritonConfig,
    candidates,
    default,
    skinny,
    variants,
    without_triton,
)
from vla_accel.kernels.gemm.hopper import HopperTile
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gpu import Gpu
from vla_accel.nn.kernel_choices import KernelChoices

EVERY_GPU = [gpu for one in GPUS.values() for gpu in (one, one.portable)]


def products(rows: int) -> dict[str, GemmSizes]:
    """The products of π0's and π0.5's expert, and one of GR00T's transformer."""
    return {
        "qkv": GemmSizes(rows, 1024, 128, groups=10, sides=2), "o": GemmSizes(rows, 2048, 1024),
        "gate_up": GemmSizes(rows, 1024, 4096, sides=2), "down": GemmSizes(rows, 4096, 1024),
        "layer norm": GemmSizes(rows, 1536, 6144, layer_norm=True),
    }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 10, 16, 17, 51, 80, 320])
def test_every_gpu_has_configs_that_fit(rows: int) -> None:
    for gpu in EVERY_GPU:
        for name, sizes in products(rows).items():
            found = candidates(gpu, sizes)
            assert found and len(found) == len({str(config) for config in found}) <= MOST_MEASURED + (
                6 if rows == 1 else 2
            )
            assert isinstance(found[0], Skinny) == (rows <= 16)
            assert any(getattr(c, "ready", False) for c in found) == (rows <= 16 and gpu.dependent_launch)
            assert all(c.why_not(gpu, sizes) is None and c.shared(sizes) <= gpu.shared_per_block for c in found)
            assert getattr(default(gpu, sizes), "split", 1) == 1
            # Programs share K of plain products alone.
            assert name in ("o", "down") or all(getattr(config, "split", 1) == 1 for config in found)
        attention = SuffixShape(1, rows, 800, 8, 1, 256)
        splits = key_splits(gpu, attention)
        assert splits and all(split.shared(attention) <= gpu.shared_per_block for split in splits)
        assert len(splits) == len({str(split) for split in splits})


@pytest.mark.parametrize(
    "sizes",
    [CrossShape(1, 50, 720, 193, 15, 64), CrossShape(2, 10, 48, 20, 3, 16), CrossShape(1, 50, 720, 900, 15, 64)],
)
def test_every_gpu_has_configs_for_cross_attention(sizes: CrossShape) -> None:
    for gpu in EVERY_GPU:
        found = cross_tiles(gpu, sizes)
        assert found and len(found) == len({str(config) for config in found}) <= MOST_MEASURED
        assert all(config.shared(sizes) <= gpu.shared_per_block for config in found)
        assert all(c.rows < 2 * max(sizes.tokens, 16) and c.block_k < 2 * max(sizes.k, 64) for c in found)
    # Where they fit, all keys are fetched before the wait, unless they are many.
    assert cross_tiles(H200, sizes)[0].keys == {193: 256, 20: 32, 900: 64}[sizes.prefix_tokens]


@pytest.mark.parametrize("sizes", [
    NormedShape(1, 32, 98, 24, 128), NormedShape(8, 98, 0, 24, 128), NormedShape(1, 120, 130, 24, 128, own=False),
    NormedShape(1, 32, 98, 24, 128, bytes=4), NormedShape(2, 5, 3, 2, 12),
])  # fmt: skip
def test_every_gpu_has_configs_for_heads_that_are_normed_together(sizes: NormedShape) -> None:
    """A thread norms keys next to at most 16 queries of four warps: with more, registers spill."""
    for gpu in (None, *GPUS.values()):
        found = normed_tiles(gpu, sizes)
        assert found and all(tile.why_not(gpu, sizes) is None for tile in found)
        assert not sizes.own or all(tile.queries <= 4 * tile.warps for tile in found)


def test_fewer_weights_are_loaded_early_where_shared_memory_is_small() -> None:
    ten = products(10)
    for name, chunks in (("gate_up", {H200: 4, A100: 4, RTX_4090: 2}), ("down", {H200: 4, A100: 3, RTX_4090: 1})):
        assert {gpu: skinny(ten[name], gpu).early for gpu in chunks} == chunks, name
    # π0-FAST's: of two sides two chunks are next to each other, and are shorter where they would not fit.
    one = GemmSizes(1, 2048, 16_384, sides=2)
    found = {gpu: skinny(one, gpu) for gpu in (H200, A100, RTX_4090)}
    assert [(config.block_k, config.early) for config in found.values()] == [(512, 3), (512, 2), (256, 2)]
    assert dataclasses.replace(found[A100], early=1).why_not(RTX_4090, one) is not None
    # A warp's piece of K stays one that tensor cores take.
    wide = dataclasses.replace(one, k=4096, weight_bytes=4, row_bytes=4)
    config = skinny(wide, RTX_4090)
    assert config.why_not(RTX_4090, wide) is None and config.block_k // config.parts == 16


def test_why_not_names_the_limit() -> None:
    ten, fifty = products(10)["gate_up"], products(50)["gate_up"]
    wide = Pipelined(16, 64, 128, stages=5)
    assert wide.why_not(None, ten) is None and wide.why_not(H200, ten) is None
    for config, gpu, sizes, text in (
        (wide, RTX_4090, ten, "184320 bytes of shared memory"),
        (skinny(ten, H200), H200, fifty, "for 16 rows, not 50"),
        (OneRow(2, 1), H200, products(1)["layer norm"], "only to paired rows"),
        (OneRow(2, 1), H200, ten, "a single row"),
        (OneRow(2, 1), H200, GemmSizes(1, 2050, 64, weight_bytes=1), "multiple of 4 bytes"),
        (Pipelined(64, 32, 64, split=2), H200, fifty, "only plain products"),
        (Pipelined(128, 128, 64, stages=2), H200, fifty, "more sums than registers"),
    ):
        assert text in (config.why_not(gpu, sizes) or "")


def test_the_default_keeps_the_gpu_busy() -> None:
    """It has about as many programs as the GPU has multiprocessors."""
    for gpu in (H200, RTX_4090, ORIN):
        for sizes in products(50).values():
            config = candidates(gpu, sizes)[0]
            assert isinstance(config, Pipelined)
            assert gpu.multiprocessors / 2 <= config.blocks(sizes) <= 4 * gpu.multiprocessors


def test_workspaces_hold_the_parts() -> None:
    sizes = GemmSizes(51, 2048, 1000)
    parts, counters = Pipelined(32, 64, 64, split=4).workspace(sizes)
    assert counters == 2 * 16 and parts == counters * 4 * 32 * 64
    assert Pipelined(32, 64, 64).workspace(sizes) == (0, 0)
    attention, split = SuffixShape(2, 50, 800, 8, 1, 256), KeySplit(32, 64, 4, 1, 4)
    assert (split.row_tiles(attention), split.prefix_splits(attention), split.splits(attention)) == (13, 4, 5)
    assert split.workspace(attention) == (2 * 13 * 5 * 32 * 256, 2 * 2 * 13 * 5 * 32, 2 * 13)


def test_a_program_of_a_batch_may_have_all_keys_of_a_sequence() -> None:
    sizes = SuffixShape(16, 10, 554, 8, 1, 256)
    for gpu in (H200, A100, RTX_4090, ORIN):
        found = [split for split in key_splits(gpu, sizes) if split.joined]
        whole = [split for split in found if split.splits(sizes) == 1]
        assert whole and all(split.blocks(sizes) == 16 * split.row_tiles(sizes) for split in whole)
        assert all(split.shared(sizes) <= gpu.shared_per_block and split.tiles > 1 for split in found)
        assert not any(split.joined for split in key_splits(gpu, dataclasses.replace(sizes, batch=1)))
    # On Hopper a tile may hold all queries of a sequence: its keys are read once.
    assert {split.row_tiles(sizes) for split in key_splits(H200, sizes) if split.joined} >= {1, 2, 3, 5}
    split = KeySplit(32, 64, 4, 3, 4)
    assert (split.splits(sizes), dataclasses.replace(split, joined=True).splits(sizes)) == (4, 3)


def test_tma_is_for_rows_of_whole_16_bytes() -> None:
    for k, size, whole in ((1000, 2, True), (1004, 2, False), (1008, 1, True), (1000, 1, False)):
        found = variants(H200, GemmSizes(50, k, 512, weight_bytes=size), Pipelined(64, 64, 64))
        assert whole == any(getattr(other, "tma", False) for other in found)


def test_weights_come_first_where_they_fill_the_instruction() -> None:
    """On Hopper: weights of one byte in every such tile, of two in variants of it."""
    narrow, wide = (GemmSizes(50, 1024, 4096, sides=2, weight_bytes=size) for size in (1, 2))
    for gpu in (H200, H200.portable, A100, RTX_4090):
        tiles = [config for config in candidates(gpu, narrow) if isinstance(config, Pipelined)]
        assert {config.columns for config in tiles} > {64}, "some are filled, some are not"
        assert all(config.weights_first == (gpu is H200 and config.columns >= 64) for config in tiles)
        assert not any(getattr(config, "weights_first", False) for config in candidates(gpu, wide))
        for columns in (32, 64):
            found: list[Any] = variants(gpu, wide, Pipelined(64, columns, 64, stages=2))
            first = {config.tma for config in found if config.weights_first}
            assert first == ({True, False} if gpu is H200 and columns == 64 else set())
    # Rows that are normed on their way go back to shared memory.
    plain, first = (Pipelined(64, 64, 64, stages=2, weights_first=one) for one in (False, True))
    assert first.shared(wide) - plain.shared(wide) == 64 * 64 * 2
    assert first.shared(GemmSizes(50, 1024, 4096)) == plain.shared(GemmSizes(50, 1024, 4096))


@pytest.mark.parametrize("rows", [10, 41, 320])
def test_variants_fit_next_to_the_following_kernel_too(rows: int) -> None:
    for gpu in EVERY_GPU:
        for sizes in products(rows).values():
            for config in candidates(gpu, sizes):
                check_variants(gpu, sizes, config, variants(gpu, sizes, config))


def check_variants(gpu: Gpu, sizes: GemmSizes, config: TritonConfig, found: list[Any]) -> None:
    assert found[0] == config and len(found) == len({str(other) for other in found})
    assert all(other.why_not(gpu, sizes) is None for other in found)
    if not isinstance(config, Pipelined):
        releases = isinstance(config, Skinny) and gpu.dependent_launch
        assert found == [config, *([dataclasses.replace(config, releases=True)] if releases else [])]
        return
    assert {(o.rows, o.columns, o.split) for o in found} == {(config.rows, config.columns, config.split)}
    assert gpu.dependent_launch == any(other.prefetch for other in found)
    assert gpu.tma == any(other.tma for other in found)
    half = gpu.shared_per_multiprocessor // 2 - 1024
    if dataclasses.replace(config, stages=2).shared(sizes) <= half:
        assert any(other.shared(sizes) <= half for other in found)


# -- without Triton ----------------------------------------------------------------------------------------------------


def test_cublas_and_the_hopper_gemm_are_candidates_for_many_rows() -> None:
    sizes = functools.partial(GemmSizes, k=1024, columns=4096, sides=2)
    for gpu in (None, A100, H200.portable):
        assert without_triton(gpu, sizes(17)) == [Library()]
    found = without_triton(H200, sizes(160))
    assert found[0] == Library() and len(found) > 1 and all(isinstance(config, HopperTile) for config in found[1:])
    assert len({str(config) for config in found}) == len(found)
    # Few rows, and float32, which the Hopper GEMM does not take.
    assert without_triton(H200, sizes(16)) == []
    assert without_triton(H200, sizes(160, weight_bytes=4, row_bytes=4)) == [Library()]
    # cuBLAS does not widen weights of one byte.
    narrow = [without_triton(gpu, sizes(160, weight_bytes=1)) for gpu in (H200, A100, None)]
    assert narrow[0] and all(isinstance(config, HopperTile) for config in narrow[0]) and narrow[1:] == [[], []]
    assert without_triton(H200, sizes(160, weight_bytes=1, row_bytes=4)) == []
    # The kernel after cuBLAS norms no plain columns.
    normed = without_triton(H200, sizes(41, sides=1, layer_norm=True))
    assert normed and all(isinstance(config, HopperTile) for config in normed)


@pytest.mark.parametrize("best", ["pipelined", "cuBLAS"])
def test_the_best_of_triton_is_measured_against_cublas(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def remembered(what: str, ways: dict[str, Any], *_: Any) -> Fastest:
        asked.append(list(ways))
        for run in ways.values():
            run()
        return Fastest(next((way for way in reversed(ways) if way.startswith(best)), next(iter(ways))))

    monkeypatch.setattr(configs, "remembered", remembered)
    x, sizes = torch.zeros(40, 64), GemmSizes(40, 128, 64, weight_bytes=4, row_bytes=4)
    made, seen = KernelChoices(torch.device("cpu"), Chain(None)), list[int]()
    moments_of_x = functools.partial(Moments.like, x)

    def run() -> None:
        moments = made["o"].moments
        assert moments is not None
        seen.append(moments.columns)

    made.product("o", sizes, run, moments=moments_of_x, every_backend=True)
    first, compared, *_ = asked
    assert compared == [compared[0], "cuBLAS"] and compared[0] in first
    assert isinstance(made["o"].config, Library if best == "cuBLAS" else Pipelined)
    # The moments of cuBLAS's rows have one tile.
    assert {16, 64} <= set(seen)
    asked.clear()
    made.product("o", sizes, run, moments=moments_of_x)
    assert asked and not any("cuBLAS" in ways for ways in asked), "cuBLAS is measured on request only"


@pytest.mark.parametrize(("factor", "stages"), [(1.4, 3), (1.6, 2), (None, 2)])
def test_variants_of_a_kernel_that_is_far_too_slow_are_not_compiled(
    factor: float | None, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`factor`: of cuBLAS's time; None: the kernel cannot run, for example because memory is short."""
    asked: list[list[str]] = []

    def remembered(what: str, ways: dict[str, Any], *_: Any) -> Fastest:
        asked.append(list(ways))
        times = {way: 1.0 if way == "cuBLAS" else factor or 1.0 for way in ways}
        if factor is None and "cuBLAS" in ways:
            times = {"cuBLAS": 1.0}
        return Fastest(min(times, key=times.__getitem__), times)

    def variants_of(gpu: Any, sizes: Any, config: Any) -> list[Any]:
        return [config, dataclasses.replace(config, stages=7)]

    monkeypatch.setattr(configs, "remembered", remembered)
    monkeypatch.setattr("vla_accel.kernels.gemm.config.variants", variants_of)
    x, sizes = torch.zeros(40, 64), GemmSizes(40, 128, 64, weight_bytes=4, row_bytes=4)
    made = KernelChoices(torch.device("cpu"), Chain(None))
    made.product("o", sizes, lambda: None, moments=functools.partial(Moments.like, x), every_backend=True)
    assert len(asked) == stages and asked[1][1:] == ["cuBLAS"] and made["o"].config == Library()
    assert stages == 2 or (asked[2][0] == "cuBLAS" and "7 stages" in asked[2][1])


@pytest.mark.parametrize("best", ["computed", "written"])
def test_few_rows_write_moments_where_that_is_faster(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def remembered(what: str, ways: dict[str, Any], *_: Any) -> Fastest:
        for run in ways.values():
            run()
        return Fastest(best if best in ways else next(iter(ways)), {best: 1.0})

    monkeypatch.setattr(configs, "remembered", remembered)
    x, sizes = torch.zeros(10, 64), GemmSizes(10, 128, 64, weight_bytes=4, row_bytes=4)
    made, seen = KernelChoices(torch.device("cpu"), Chain(None)), list[bool]()
    moments_of_x = functools.partial(Moments.like, x)
    made.product("o", sizes, lambda: None, moments=moments_of_x)
    assert isinstance(made["o"].config, Skinny) and made["o"].moments is None
    made.few_rows_moments({"o": (sizes, moments_of_x)}, lambda: seen.append(made["o"].moments is not None))
    assert seen == [False, True]
    written = made["o"].moments
    assert written is None if best == "computed" else written is not None and written.columns == 16
    assert made.detail.endswith(f"; moments {best}")
    # Moments that do not fit are no choice.
    made.few_rows_moments({"o": (sizes, lambda columns: None)}, lambda: seen.append(True))
    assert len(seen) == 2
    # Products of other kernels have chosen already.
    made.product("o", GemmSizes(40, 128, 64), lambda: None, moments=moments_of_x)
    made.few_rows_moments({"o": (sizes, moments_of_x)}, lambda: seen.append(True))
    assert len(seen) == 2


def test_a_measured_config_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_MEASURED", {})
    monkeypatch.setattr(configs, "remembered", lambda what, ways, *_: Fastest(list(ways)[1], {"x": 1.0}))
    cpu, found = torch.device("cpu"), candidates(H200, GemmSizes(50, 1024, 1024))
    assert configs.measured("o", cpu) is None
    assert configs.measure("o", found, lambda _: None, cpu, 1).config is found[1] is configs.measured("o", cpu)
    assert configs.measured("p", cpu) is None
    assert all(len(candidates(gpu, sizes)) <= 7 for gpu in ARCHITECTURES.values() for sizes in products(320).values())
