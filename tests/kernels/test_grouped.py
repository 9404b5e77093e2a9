"""`kernels/loop/grouped.cu` and SmolVLA's sizes in the streamed loop, without a GPU: who makes what, who sees what,
where it lies, what is launched. The kernels' arithmetic is repeated here in Python."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.support.gpus import H200
from tests.support.smolvla_loops import EXPERTS, FULL, Loops, expert_of
from tests.support.streamed_support import ROOM, RecordedModule
from vla_accel.families.smolvla.native_loop import SmolVlaExpertWeights, sizes_of, steps_of
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.loop import launch, schedule, why_not
from vla_accel.kernels.loop.schedule import MAX_CLUSTER, STAGE_BYTES, WARPS, Grouped, Schedule, held_tiles

SMOLVLA = sizes_of(expert_of(**FULL, depth=16))
SOURCE = "".join(Path(schedule.__file__).with_name(name).read_text() for name in ("core.cu", "grouped.cu"))
CASES = [
    (name, largest) for name, case in EXPERTS.items() if len(case.lengths) == 1 and "large" not in name
    for largest in (MAX_CLUSTER, 8)
]  # fmt: skip


def grouped_of(name: str, largest: int) -> Grouped:
    case = EXPERTS[name]
    found = Grouped.of(sizes_of(case.config), 1, case.prefix_tokens, H200, largest)
    assert isinstance(found, Grouped)
    return found


def test_the_published_size_is_what_it_was_made_for() -> None:
    """A block for each tile of rows, two units of weights a block, and shared memory beside it for `down`."""
    found = Schedule.of(SMOLVLA, 1, 177, H200)
    assert why_not(H200, SMOLVLA, 1, "bf16") is None and (SMOLVLA.width, SMOLVLA.normed) == (768, 720)
    grouped = found.grouped
    assert grouped is not None and found.attend is None and found.apart is None
    assert (grouped.ranks, grouped.units, grouped.tiles, grouped.rounds, grouped.blocks) == (10, 2, 1, 2, 50)
    assert grouped.shared + found.shared["down"] + 2048 <= H200.shared_per_multiprocessor
    assert "attention" not in found.blocks and {"grouped", "mix"} <= found.blocks.keys()


@pytest.mark.parametrize(("name", "largest"), CASES)
def test_every_unit_and_tile_has_one_block(name: str, largest: int) -> None:
    """`GroupUnits::at` over all clusters names every unit of the weight once; so do the tiles of rows."""
    grouped, e, tokens = grouped_of(name, largest), EXPERTS[name].config.expert, EXPERTS[name].config.action_horizon
    group, head_units = e.heads // e.kv_heads, e.head_dim // 16
    for crosses in (False, True):
        units, count = [], (group + (0 if crosses else 2)) * head_units
        for kv in range(e.kv_heads):
            for rank in range(grouped.ranks):
                mine = (count - rank + grouped.ranks - 1) // grouped.ranks
                assert 0 <= mine <= grouped.units
                for unit in range(rank, rank + mine * grouped.ranks, grouped.ranks):
                    owner = unit // head_units
                    head = kv * group + owner if owner < group else e.heads + (owner - group) * e.kv_heads + kv
                    units.append(head * head_units + unit % head_units)
                    # And back, as the columns' emit finds its place among the block's own.
                    back = head - kv * group if head < e.heads else group + (head - e.heads) // e.kv_heads
                    assert (back * head_units + units[-1] % head_units) // grouped.ranks == (
                        unit - rank
                    ) // grouped.ranks
        expected = (e.heads + (0 if crosses else 2 * e.kv_heads)) * head_units
        assert sorted(units) == list(range(expected))
    tiles = -(-tokens * group // 16)
    dealt = [rank + n * grouped.ranks for n in range(grouped.tiles) for rank in range(grouped.ranks)]
    assert sorted(t for t in dealt if t < tiles) == list(range(tiles))


@pytest.mark.parametrize(("name", "largest"), CASES)
def test_shared_memory_holds_what_the_kernel_puts_there(name: str, largest: int) -> None:
    """The areas one after the other as the kernel lays them out, and every key in one warp's rounds."""
    grouped, case = grouped_of(name, largest), EXPERTS[name]
    tokens, d, prefix = case.config.action_horizon, case.config.expert.head_dim, case.prefix_tokens
    mt, held, pitch = -(-tokens // 16), held_tiles(tokens), d + 8
    together = min(grouped.units, 2 if mt == 2 else 4)
    sums = WARPS * together * 2 * held * 4 * 128
    parts = WARPS * 16 * pitch * 4
    room = max(grouped.units * STAGE_BYTES, (grouped.units - 1) // together * together * STAGE_BYTES + sums, parts)
    product = room + grouped.units * 8 + 4 * 16 * (WARPS * held + mt)
    areas = -(-product // 16) * 16
    keys = -(-prefix // 16) * 16 + -(-tokens // 16) * 16
    areas += 2 * keys * pitch * 2 + grouped.tiles * 16 * pitch * 2
    areas += grouped.units * tokens * 32
    assert areas % 16 == 0  # statistics, which lie here, and what is sent from before them, are of 8 and 16 bytes
    assert grouped.shared == areas + WARPS * 16 * 8 + 8 <= H200.shared_per_block
    assert grouped.rounds * WARPS * 16 >= keys > (grouped.rounds - 1) * WARPS * 16
    assert grouped.shared < 227 * 1024


def test_a_warp_s_parts_lie_as_the_constants_say() -> None:
    """What the test above repeats is the source's."""
    flat = re.sub(r"\s+", " ", SOURCE)
    assert "PARTS = WARPS * 16 * PITCH * 4" in flat and "#define PITCH (D + 8)" in flat
    assert "PRODUCT = Room<UNITS_EACH, PARTS>::BYTES + UNITS_EACH * 8 + 4 * 16 * (WARPS * HELD_TILES + MT)" in flat


@pytest.mark.parametrize(
    ("changes", "batch", "prefix", "why"),
    [
        ({}, 2, 177, "it is for one sequence, not 2"),
        ({"head_dim": 256}, 1, 177, "it is not for heads of 256"),
        ({}, 1, 700, r"its keys need \d+ bytes of shared memory a block, .* has 232448"),
        ({"heads": 64, "kv_heads": 1}, 1, 177, r"its keys need \d+ bytes"),
        ({"tokens": 10, "head_dim": 16}, 1, 1100, "its warps hold 1024 keys, not 1120"),
    ],
)
def test_what_it_is_not_for(changes: dict[str, int], batch: int, prefix: int, why: str) -> None:
    sizes = dataclasses.replace(SMOLVLA, **changes)  # type: ignore[arg-type]
    found = Grouped.of(sizes, batch, prefix, H200, MAX_CLUSTER)
    assert isinstance(found, str) and re.match(why, found), found


def test_attend_is_not_for_actions_in_order() -> None:
    like_pi0 = dataclasses.replace(SMOLVLA, heads=8, kv_heads=1, head_dim=256)
    for causal, self_every in ((True, 1), (False, 2), (False, 0)):
        sizes = dataclasses.replace(like_pi0, causal=causal, self_every=self_every)
        assert schedule.Attend.of(sizes, 1, 177, H200) == "it is for layers that attend to all of the suffix"


@pytest.mark.parametrize(("room", "ranks"), [({}, 10), ({10: 0}, 8)])
def test_the_device_may_hold_small_clusters_only(
    room: dict[int, int], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.streamed_support.ROOM", room)
    monkeypatch.setattr(nvrtc, "load_module", RecordedModule)
    planned, module = launch.planned(H200, SMOLVLA, 1, 177, torch.device("cpu"))
    assert isinstance(module, RecordedModule) and module.source == planned.source
    assert planned.clusters["grouped"] == ranks == module.defines["GROUP_RANKS"]
    assert not ROOM


@pytest.mark.parametrize("name", ["10 actions", "full", "all cross", "three sequences"])
def test_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer that crosses, q/k/v apart has the blocks of queries alone."""
    monkeypatch.setattr(nvrtc, "load_module", RecordedModule)
    loops = Loops(EXPERTS.get(name, EXPERTS["16 actions"]), beyond=0.0)
    case, config = loops.case, loops.case.config
    loop = loops.streamed(H200, "cpu")
    loops.moved(loop, loops.placed("cpu"))
    module, e = loop.module, config.expert
    assert isinstance(module, RecordedModule)
    of_layer = [
        [("grouped", None)] if loop.schedule.grouped else
        [("qkv", (e.heads + (0 if config.crosses(n) else 2 * e.kv_heads)) * e.head_dim // 16), ("attention", None)]
        for n in range(e.depth)
    ]  # fmt: skip
    step = ["between", "mix", *(k for layer in of_layer for k in (*(n for n, _ in layer), "output", "gate_up", "down"))]
    assert [one[0] for one in module.launches] == [*step * case.steps, "between"]
    assert loop.kernels_a_step == len(step)
    blocks = [one[1] for one in module.launches if one[0] == "qkv"]
    assert blocks == [count for layer in of_layer for kernel, count in layer if kernel == "qkv"] * case.steps
    d = module.defines
    assert (d["W"], d["NORMED"], d["CAUSAL"], d["ACTIVATION"], d["ADAPTIVE"]) == (
        loop.sizes.width,
        e.width,
        1,
        Activation.SWIGLU.code,
        0,
    )
    assert (d["SELF_EVERY"], d["T"], d["HZ"]) == (config.self_every, config.action_horizon, config.action_horizon)


def test_what_a_model_lacks_of_the_width_is_zero() -> None:
    """Packed and unpacked again, products after a norm are the layers' own, and zero beyond; so are the constants."""
    loops = Loops(EXPERTS["16 actions"])
    with torch.inference_mode():
        own = SmolVlaExpertWeights.of(loops.model("cpu", torch.bfloat16), "bf16")
        wide = SmolVlaExpertWeights.of(loops.model("cpu", torch.bfloat16), "bf16", streamed=True)
        tables, padded = (steps_of(loops.model("cpu", torch.float32), 3, streamed=s) for s in (False, True))
    assert wide.packed is not None and not wide.layers and own.packed is None
    e, sizes = loops.case.config.expert, sizes_of(loops.case.config)
    beyond, rows = sizes.width - e.width, (e.heads + 2 * e.kv_heads) * e.head_dim
    assert beyond == 48
    for layer, (qkv, gate_up) in zip(own.layers, wide.packed.normed_products(), strict=True):
        expected = F.pad(layer.qkv.weight, (0, beyond, 0, rows - len(layer.qkv.weight)))
        assert torch.equal(qkv.weight, expected)
        assert torch.equal(gate_up.weight, F.pad(layer.gate_up.weight, (0, beyond)))
    assert torch.equal(wide.mix.weight, F.pad(own.mix.weight, (0, beyond, 0, beyond)))
    pairs = ((own.w_out, wide.w_out), (tables.b_in, padded.b_in), (tables.w_in, padded.w_in),
             (tables.final_scale, padded.final_scale))  # fmt: skip
    for mine, with_zeros in pairs:
        assert torch.equal(with_zeros, F.pad(mine, (0, beyond)))
