"""How a suffix's ops are cut: what every GPU has room for, and what is taken where nothing is measured."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.gpus import A100, ARCHITECTURES, GPUS, H200, ORIN, RTX_4090
from vla_accel.kernels.attention.config import CrossShape, KeySplit, SuffixShape, cross_tiles, key_splits
from vla_accel.kernels.gemm import suffix_tilings
from vla_accel.kernels.gemm.suffix_tilings import Pipelined, Product, Skinny, candidates, default, variants, why_not


def products(rows: int) -> dict[str, Product]:
    """Of π0's and π0.5's expert."""
    return {
        "qkv": Product(rows, 1024, 128, groups=10, sides=2), "o": Product(rows, 2048, 1024),
        "gate_up": Product(rows, 1024, 4096, sides=2), "down": Product(rows, 4096, 1024),
    }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 10, 16, 17, 50, 51, 80, 320, 512])
@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_cuts_that_fit(name: str, rows: int) -> None:
    for gpu in (GPUS[name], GPUS[name].portable):
        for product in products(rows).values():
            found = candidates(gpu, product)
            assert found and len(found) == len({str(cut) for cut in found})
            assert isinstance(found[0], Skinny) == (rows <= 16)
            for cut in found:
                assert cut.shared(product) <= gpu.shared_per_block and why_not(gpu, product, cut) is None
            assert getattr(default(gpu, product), "split", 1) == 1
        sizes = SuffixShape(1, rows, 800, 8, 1, 256)
        found = key_splits(gpu, sizes)
        assert found and all(cut.shared(sizes) <= gpu.shared_per_block for cut in found)
        assert len(found) == len({str(cut) for cut in found})


@pytest.mark.parametrize(
    "sizes",
    [CrossShape(1, 50, 720, 193, 15, 64), CrossShape(2, 10, 48, 20, 3, 16), CrossShape(1, 50, 720, 900, 15, 64)],
)
@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_cuts_for_layers_that_cross(name: str, sizes: CrossShape) -> None:
    for gpu in (GPUS[name], GPUS[name].portable):
        found = cross_tiles(gpu, sizes)
        assert found and len(found) == len({str(cut) for cut in found}) <= suffix_tilings.MOST_TRIED
        assert all(cut.shared(sizes) <= gpu.shared_per_block for cut in found)
        assert all(cut.rows < 2 * max(sizes.tokens, 16) and cut.block_k < 2 * max(sizes.k, 64) for cut in found)
    # Where there is room, all keys are fetched before the wait, unless they are many.
    assert cross_tiles(H200, sizes)[0].keys == {193: 256, 20: 32, 900: 64}[sizes.prefix_tokens]


def test_fewer_weights_are_fetched_ahead_where_shared_memory_is_small() -> None:
    ten = products(10)
    for name, chunks in (("gate_up", {H200: 4, A100: 4, RTX_4090: 2}), ("down", {H200: 4, A100: 3, RTX_4090: 1})):
        assert {gpu: Skinny.of(ten[name], gpu).ahead for gpu in chunks} == chunks, name
    # π0-FAST's: of two sides two chunks lie beside each other, and are shorter where they would have no room.
    one = Product(1, 2048, 16_384, sides=2)
    cuts = {gpu: Skinny.of(one, gpu) for gpu in (H200, A100, RTX_4090)}
    assert [(cut.block_k, cut.ahead) for cut in cuts.values()] == [(512, 3), (512, 2), (256, 2)]
    assert why_not(RTX_4090, one, dataclasses.replace(cuts[A100], ahead=1)) is not None
    # A warp's piece of K stays one that tensor cores take.
    wide = Skinny.of(dataclasses.replace(one, k=4096, weight=4, activation=4), RTX_4090)
    assert why_not(RTX_4090, one, wide) is None and wide.block_k // wide.parts == 16


def test_why_not_names_the_limit() -> None:
    product = products(10)["gate_up"]
    wide = Pipelined(16, 64, 128, stages=5)
    assert why_not(None, product, wide) is None and why_not(H200, product, wide) is None
    assert why_not(RTX_4090, product, wide) == f"{wide} needs 184320 bytes of shared memory a block"
    fifty = dataclasses.replace(product, rows=50)
    assert why_not(H200, fifty, Skinny.of(product, H200)) == (
        "skinny 16x32x256/8, 4 ahead is for 16 rows, not 50"
    )  # fmt: skip
    assert why_not(H200, fifty, Pipelined(64, 32, 64, split=2)) == "programs share K of plain products alone"
    tall = Pipelined(128, 128, 64, stages=2)
    assert why_not(H200, fifty, tall) == f"{tall} has more sums than registers"


def test_cuts_keep_the_chip_busy() -> None:
    """The first to try has about as many programs as the GPU has multiprocessors."""
    for gpu in (H200, RTX_4090, ORIN):
        for product in products(50).values():
            blocks = candidates(gpu, product)[0].blocks(product)
            assert gpu.multiprocessors / 2 <= blocks <= 4 * gpu.multiprocessors


def test_parts_have_room() -> None:
    product = Product(51, 2048, 1000)
    parts, counters = Pipelined(32, 64, 64, split=4).workspace(product)
    assert counters == 2 * 16 and parts == counters * 4 * 32 * 64
    assert Pipelined(32, 64, 64).workspace(product) == (0, 0)
    sizes = SuffixShape(2, 50, 800, 8, 1, 256)
    cut = KeySplit(32, 64, 4, 1, 4)
    assert (cut.row_tiles(sizes), cut.prefix_splits(sizes), cut.splits(sizes)) == (13, 4, 5)
    assert cut.workspace(sizes) == (2 * 13 * 5 * 32 * 256, 2 * 2 * 13 * 5 * 32, 2 * 13)


def test_a_batch_s_programs_may_have_all_keys_of_a_sequence() -> None:
    sizes = SuffixShape(16, 10, 554, 8, 1, 256)
    for gpu in (H200, A100, RTX_4090, ORIN):
        found = [cut for cut in key_splits(gpu, sizes) if cut.joined]
        whole = [cut for cut in found if cut.splits(sizes) == 1]
        assert whole and all(cut.blocks(sizes) == 16 * cut.row_tiles(sizes) for cut in whole)
        assert all(cut.shared(sizes) <= gpu.shared_per_block and cut.tiles > 1 for cut in found)
        assert not any(cut.joined for cut in key_splits(gpu, dataclasses.replace(sizes, batch=1)))
    # On Hopper a tile may hold all queries of a sequence: its keys are read once.
    assert {cut.row_tiles(sizes) for cut in key_splits(H200, sizes) if cut.joined} >= {1, 2, 3, 5}
    cut = KeySplit(32, 64, 4, 3, 4)
    assert (cut.splits(sizes), dataclasses.replace(cut, joined=True).splits(sizes)) == (4, 3)


def test_few_are_tried() -> None:
    for gpu in ARCHITECTURES.values():
        for product in products(320).values():
            assert len(candidates(gpu, product)) <= suffix_tilings.MOST_TRIED + 1


def test_tma_is_for_rows_of_whole_16_bytes() -> None:
    for k, size, whole in ((1000, 2, True), (1004, 2, False), (1008, 1, True), (1000, 1, False)):
        product = Product(50, k, 512, weight=size)
        found = variants(H200, product, Pipelined(64, 64, 64))
        assert whole == any(getattr(other, "tma", False) for other in found)


def test_weights_are_the_first_operand_where_that_has_an_instruction() -> None:
    """On Hopper: of one byte in every tile that its products fill, of two in variants of such a tile."""
    narrow, wide = (Product(50, 1024, 4096, sides=2, weight=size) for size in (1, 2))
    for gpu in (H200, H200.portable, A100, RTX_4090):
        tiles = [cut for cut in candidates(gpu, narrow) if isinstance(cut, Pipelined)]
        assert {cut.columns for cut in tiles} > {64}, "some are filled, some are not"
        assert all(cut.weights_first == (gpu is H200 and cut.columns >= 64) for cut in tiles)
        assert not any(getattr(cut, "weights_first", False) for cut in candidates(gpu, wide))
        for columns in (32, 64):
            found = [
                cut for cut in variants(gpu, wide, Pipelined(64, columns, 64, stages=2)) if isinstance(cut, Pipelined)
            ]
            assert any(cut.weights_first for cut in found) == (gpu is H200 and columns == 64)
            if gpu is H200 and columns == 64:
                assert {cut.tma for cut in found if cut.weights_first} == {True, False}
    # Its rows, normed on their way, go back to shared memory.
    plain, first = (Pipelined(64, 64, 64, stages=2, weights_first=one) for one in (False, True))
    assert first.shared(wide) - plain.shared(wide) == 64 * 64 * 2
    assert first.shared(Product(50, 1024, 4096)) == plain.shared(Product(50, 1024, 4096))


@pytest.mark.parametrize("rows", [10, 41, 50, 320])
@pytest.mark.parametrize("name", GPUS)
def test_variants_of_a_cut_fit_beside_the_next_kernel_too(name: str, rows: int) -> None:
    for gpu in (GPUS[name], GPUS[name].portable):
        for product in products(rows).values():
            for cut in candidates(gpu, product):
                found = variants(gpu, product, cut)
                assert found[0] == cut and len(found) == len({str(other) for other in found})
                assert all(why_not(gpu, product, other) is None for other in found)
                if isinstance(cut, Skinny):
                    assert found == [cut]
                    continue
                tiles = {(other.rows, other.columns, other.split) for other in found if isinstance(other, Pipelined)}
                assert tiles == {(cut.rows, cut.columns, cut.split)}
                assert gpu.dependent_launch == any(getattr(other, "ahead", False) for other in found)
                assert gpu.tma == any(getattr(other, "tma", False) for other in found)
                half = gpu.shared_per_multiprocessor // 2 - 1024
                if dataclasses.replace(cut, stages=2).shared(product) <= half:
                    assert any(other.shared(product) <= half for other in found)
