"""The streamed kernels of SmolVLA's loop, run as they are in an emulator on the CPU, against the loop of fused ops: as
near to float32 as that loop is in BF16; the same bits in any order of warps, whatever lies behind
a prefix's length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.agreement import assert_as_near
from tests.support.emulated_loops import EmulatedLoop
from tests.support.gpus import H200
from tests.support.smolvla_loops import EXPERTS, ExpertCase, Loops, expert_of

CASES = {
    **{name: case for name, case in EXPERTS.items() if not name.startswith("full")},
    "two tiles of rows a block": ExpertCase(expert_of(heads=8, kv_heads=1, horizon=50), 40, (33,), steps=1),
}
QUICK = ("17 actions", "three sequences")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_the_loop_is_as_near_as_fused_ops(name: str, emulated: Path) -> None:
    loops = Loops(CASES[name])
    exact = loops.moved(loops.fused("fp32", "cpu"), loops.placed("cpu", torch.float32, beyond=0.0))
    plain = loops.moved(loops.fused("bf16", "cpu"), loops.placed("cpu", beyond=0.0))
    loop = EmulatedLoop(lambda: loops.streamed(H200, "cpu"), emulated)
    got = loops.moved(loop, loops.placed("cpu", beyond=float("nan")))
    assert_as_near(got, plain, exact)
    # In another order of warps, too.
    assert torch.equal(loops.moved(loop, loops.placed("cpu", beyond=float("inf"))), got)
    assert set(loop.module.launches) == set(loop.loop.schedule.blocks)
