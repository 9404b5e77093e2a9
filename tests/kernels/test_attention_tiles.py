"""How attention of many queries is cut: what a GPU has room for, and which cut is taken where none is measured."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpus import GPUS, H200
from vla_accel.kernels.attention import attending
from vla_accel.kernels.attention.attending import Sizes, choose
from vla_accel.kernels.attention.tiles import Tile, tiles
from vla_accel.kernels.autotune import Fastest
from vla_accel.runtime import Runtime


@pytest.mark.parametrize("name", GPUS)
def test_cuts_are_tried_where_there_is_something_to_cut(name: str) -> None:
    gpu = GPUS[name]
    for shape, count in (((544, 544, 256), 4), ((1024, 1024, 64), 5), ((70, 64, 72), 3), ((10, 17, 64), 1)):
        found = tiles(*shape, gpu)
        assert found[0] == Tile.of(*shape, gpu) and len(found) == count
        # Tensor cores take 16 queries a warp at least; nobody has more keys at once than there are.
        assert all(16 * tile.warps <= tile.queries for tile in found[1:]), found
        assert all(tile.keys <= shape[1] for tile in found[1:])
    wide = Tile.of(544, 544, 256, gpu)
    assert wide.stages == (2 if gpu.shared_per_block < 128 << 10 else 3)
    # Fewer keys at once where they would leave no registers, or have no room (`test_kernels_compile.py` compiles them).
    keys = {head_dim: Tile.of(256, 256, head_dim, gpu).keys for head_dim in (64, 72, 256)}
    few = name in ("B200", "Thor") or gpu.shared_per_block < 128 << 10
    assert keys == {64: 128, 72: 64 if few else 128, 256: 32}


def test_the_fastest_tile_is_taken_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once for own kernels, whether they are asked for or raced; the others' race knows it."""
    sizes = Sizes(1, 40, 40, 2, 1, 16, torch.float32, padded=True, quantised=False)
    asked: list[Tile | None] = []
    best = tiles(40, 40, 16, H200)[-1]

    def measured(what: str, calls: dict, runtime: Runtime, repeats: int) -> Fastest:
        for call in calls.values():
            call()
        return Fastest(str(best) if what.startswith("tile of") else "own", {"own": 2e-3})

    monkeypatch.setattr(attending, "own_kernel", lambda *_: ("Triton", ""))
    monkeypatch.setattr(attending, "remembered", measured)
    monkeypatch.setattr(attending, "attention", lambda *_, tile, **__: asked.append(tile))
    made = attending._tensors
    monkeypatch.setattr(attending, "_tensors", lambda sizes, _: made(sizes, torch.device("cpu")))
    monkeypatch.setattr(attending, "_trial", lambda *_: lambda: None)
    runtime = Runtime(torch.device("cuda"), H200, "cuda")
    own, raced = (choose(way, sizes, runtime) for way in ("own", "auto"))
    assert own.tile == raced.tile == best
    assert own.detail == f"attention own (Triton {best})" and f"own 2.0 µs; own: {best}" in raced.detail
    assert set(asked) == set(tiles(40, 40, 16, H200))
