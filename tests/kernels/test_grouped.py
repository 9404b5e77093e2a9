"""SmolVLA's sizes in the streamed loop, and `kernels/loop/grouped.cu`, without a GPU: the plan and the launches."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.gpus import H200
from tests.support.streamed_support import EXPERTS, ROOM, SMOLVLA_FULL, Loops, RecordedModule, expert_of
from vla_accel.families.smolvla.native_loop import expert_spec, expert_weights, steps_of
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.loop import launch, why_not
from vla_accel.kernels.loop.schedule import MAX_CLUSTER, WARPS, Fused, Schedule, attend, grouped

SMOLVLA = expert_spec(expert_of(**SMOLVLA_FULL, depth=16))
CASES = [
    (name, largest) for name, case in EXPERTS.items() if len(case.lengths) == 1 and "large" not in name
    for largest in (MAX_CLUSTER, 8)
]  # fmt: skip


def test_the_published_size_has_the_plan_that_was_tuned() -> None:
    """A block for each tile of rows, two units of weights a block, and shared memory left for `down`."""
    found = Schedule.of(SMOLVLA, 1, 177, H200)
    assert why_not(H200, SMOLVLA, 1, "bf16") is None and (SMOLVLA.width, SMOLVLA.model_width) == (768, 720)
    fused = found.fused
    assert fused is not None and found.apart is None
    assert (fused.kernel, fused.cluster, fused.units, fused.rounds, fused.blocks) == ("grouped", 10, 2, 2, 50)
    assert fused.shared + found.shared["down"] + 2048 <= H200.shared_per_multiprocessor
    assert "attention" not in found.blocks and {"grouped", "mix"} <= found.blocks.keys()


@pytest.mark.parametrize(("name", "largest"), CASES)
def test_blocks_share_all_units_tiles_and_keys(name: str, largest: int) -> None:
    case, e = EXPERTS[name], EXPERTS[name].config.expert
    fused = grouped(expert_spec(case.config), 1, case.prefix_tokens, H200, largest)
    assert isinstance(fused, Fused) and fused.cluster <= largest
    group, tokens = e.heads // e.kv_heads, case.config.action_horizon
    assert fused.units * fused.cluster >= (group + 2) * e.head_dim // 16 > (fused.units - 1) * fused.cluster
    assert fused.macros["TILES_EACH"] * fused.cluster * 16 >= tokens * group
    keys = -(-case.prefix_tokens // 16) * 16 + -(-tokens // 16) * 16
    assert fused.rounds * WARPS * 16 >= keys > (fused.rounds - 1) * WARPS * 16
    work: Any = fused.work
    assert work.values - work.keys >= keys * (e.head_dim + 8) * 2 <= work.queries - work.values
    assert work.barrier + 8 == fused.shared <= H200.shared_per_block


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
def test_grouped_explains_what_it_cannot_run(changes: dict[str, int], batch: int, prefix: int, why: str) -> None:
    spec = dataclasses.replace(SMOLVLA, **changes)  # type: ignore[arg-type]
    found = grouped(spec, batch, prefix, H200, MAX_CLUSTER)
    assert isinstance(found, str) and re.match(why, found), found


def test_attend_is_not_for_causal_or_crossing_layers() -> None:
    like_pi0 = dataclasses.replace(SMOLVLA, heads=8, kv_heads=1, head_dim=256)
    for causal, self_every in ((True, 1), (False, 2), (False, 0)):
        spec = dataclasses.replace(like_pi0, causal=causal, self_every=self_every)
        assert attend(spec, 1, 177, H200) == "it is for layers that attend to all of the suffix"


@pytest.mark.parametrize(("held", "ranks"), [({}, 10), ({10: 0}, 8)])
def test_a_device_that_holds_small_clusters_gets_them(
    held: dict[int, int], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.streamed_support.ROOM", held)
    monkeypatch.setattr(nvrtc, "load_module", RecordedModule)
    planned, module = launch.planned(H200, SMOLVLA, 1, 177, torch.device("cpu"))
    assert isinstance(module, RecordedModule) and module.source == planned.source
    assert planned.clusters["grouped"] == ranks == module.defines["GROUP_RANKS"]
    assert not ROOM


@pytest.mark.parametrize("name", ["16 actions", "full", "all cross", "three sequences"])
def test_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer that attends to the prefix only, `qkv` has only the blocks of queries."""
    monkeypatch.setattr(nvrtc, "load_module", RecordedModule)
    loops = Loops(EXPERTS[name], beyond=0.0)
    case, config = loops.case, loops.case.config
    loop = loops.streamed(H200, "cpu")
    loops.moved(loop, loops.placed("cpu"))
    module, e = loop.module, config.expert
    assert isinstance(module, RecordedModule)
    of_layer = [
        [("grouped", None)] if loop.schedule.fused else
        [("qkv", (e.heads + (0 if config.crosses(n) else 2 * e.kv_heads)) * e.head_dim // 16), ("attention", None)]
        for n in range(e.depth)
    ]  # fmt: skip
    step = ["between", "mix", *(k for layer in of_layer for k in (*(n for n, _ in layer), "output", "gate_up", "down"))]
    assert [one[0] for one in module.launches] == [*step * case.steps, "between"]
    assert loop.kernels_a_step == len(step)
    blocks = [one[1] for one in module.launches if one[0] == "qkv"]
    assert blocks == [count for layer in of_layer for kernel, count in layer if kernel == "qkv"] * case.steps
    d = module.defines
    assert (d["WIDTH"], d["MODEL_WIDTH"], d["CAUSAL"], d["ADAPTIVE"]) == (loop.spec.width, e.width, 1, 0)
    assert (d["ACTIVATION"], d["SELF_EVERY"]) == (Activation.SWIGLU.code, config.self_every)
    assert d["TOKENS"] == d["HORIZON"] == config.action_horizon


def test_missing_columns_of_the_width_are_zero() -> None:
    """Packed and unpacked again, products after a norm are the layers' own, and zero beyond; so are the constants."""
    loops = Loops(EXPERTS["16 actions"])
    with torch.inference_mode():
        own = expert_weights(loops.model("cpu", torch.bfloat16), "bf16")
        wide = expert_weights(loops.model("cpu", torch.bfloat16), "bf16", streamed=True)
        exact = loops.model("cpu", torch.float32)
        tables, padded = (steps_of(exact, loops.case.schedule, streamed=s) for s in (False, True))
    assert wide.packed is not None and not wide.layers and own.packed is None
    e, spec = loops.case.config.expert, expert_spec(loops.case.config)
    beyond, rows = spec.width - e.width, (e.heads + 2 * e.kv_heads) * e.head_dim
    assert beyond == 48
    for layer, (qkv, gate_up) in zip(own.layers, wide.packed.normed_products(), strict=True):
        assert torch.equal(qkv.weight, F.pad(layer.qkv.weight, (0, beyond, 0, rows - len(layer.qkv.weight))))
        assert torch.equal(gate_up.weight, F.pad(layer.up.weight, (0, beyond)))
    assert own.mix is not None and wide.mix is not None
    assert torch.equal(wide.mix.weight, F.pad(own.mix.weight, (0, beyond, 0, beyond)))
    pairs = ((own.w_out, wide.w_out), (tables.b_in, padded.b_in), (tables.w_in, padded.w_in),
             (tables.final_scale, padded.final_scale))  # fmt: skip
    for mine, with_zeros in pairs:
        assert torch.equal(with_zeros, F.pad(mine, (0, beyond)))
