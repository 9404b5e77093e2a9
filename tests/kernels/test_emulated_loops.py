"""The streamed kernels of all loops in an emulator on the CPU: as near to float32 as the loop of fused ops in BF16; the
same bits in any order of warps, whatever lies behind a prefix's length; and the same kernels with mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.agreement import assert_as_near
from tests.support.cuda_emulator import EmulatedModule, EmulationError
from tests.support.streamed_support import EXPERTS, LOOPS, NAN, LoopCase, Loops, smolvla_case, streamable
from vla_accel.kernels import nvrtc
from vla_accel.kernels.loop import StreamedLoop

# `attend` is for heads of 128 or more: one to four tiles of rows, with a state's token and without.
ATTEND = {"width": 128, "mlp": 256, "heads": 2, "head_dim": 128, "depth": 1}
TWO_LAYERS = ATTEND | {"depth": 2}  # What π0's state token sees, actions see a layer later.
CASES = {
    "pi05 10": LoopCase(streamable("pi05", **ATTEND), steps=2, setting="cubic"),
    "pi05 17": LoopCase(streamable("pi05", **ATTEND, horizon=17), steps=1),
    "pi05 50": LoopCase(streamable("pi05", **ATTEND, horizon=50), prefix_tokens=41, steps=2),
    "pi0 9": LoopCase(streamable("pi0", **TWO_LAYERS, horizon=9), prefix_tokens=8, steps=1),
    "pi0 16": LoopCase(streamable("pi0", **ATTEND, horizon=16), prefix_tokens=130, steps=1),
    "pi0 33": LoopCase(streamable("pi0", **ATTEND, horizon=33), prefix_tokens=41, steps=1),
    "pi0 50": LoopCase(streamable("pi0", **TWO_LAYERS, horizon=50), steps=1),
    # Gate and up load so many rows of such a width in batches.
    "pi05 50 in batches": LoopCase(streamable("pi05", **ATTEND | {"width": 1024}, horizon=50), 1, 41, 1),
    "pi0 50 in batches": LoopCase(streamable("pi0", **ATTEND | {"width": 1024}, horizon=50), steps=1),
    # Small heads, several sequences, four parts of K, products of two chunks.
    **{name: replace(LOOPS[name], steps=2) for name in ("demo", "demo x 4", "narrow")},
    "grouped": replace(LOOPS["grouped"], steps=1),
    "two chunks": LoopCase(streamable("pi05", width=64, mlp=8192, heads=4, depth=1), prefix_tokens=31, steps=1),
    "two tiles of keys a block": LoopCase(
        streamable("pi05", width=64, mlp=128, heads=4, depth=1, horizon=5), batch=2, prefix_tokens=646, steps=1
    ),
    **{f"smolvla {name}": case for name, case in EXPERTS.items() if not name.startswith("full")},
    "smolvla two tiles of rows a block": smolvla_case(40, 33, steps=1, heads=8, kv_heads=1, horizon=50),
}


class EmulatedLoop:
    """A streamed loop whose kernels run in the emulator, and may access its own tensors and a call's alone.

    Args:
        folder: Holds compiled kernels.
        change: Edits their source first.
    """

    def __init__(self, loops: Loops, folder: Path, change: Callable[[str], str] = lambda source: source) -> None:
        def load(source: str, *rest: Any, **options: Any) -> EmulatedModule:
            return EmulatedModule(change(source), *rest, folder=folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrtc, "load_module", load)
            self.loop: StreamedLoop = loops.streamed()
        assert isinstance(self.loop.module, EmulatedModule)
        self.module = self.loop.module

    def run(self, inputs: dict[str, Tensor], state: Tensor | None, actions: Tensor) -> None:
        loop = self.loop
        own = (*loop._buffers.values(), *loop._constants.values(), loop.values_t)
        self.module.allow(*(t for t in (*own, *inputs.values(), state, actions) if t is not None))
        loop.run(inputs, state, actions)


def assert_near(loops: Loops, got: Tensor) -> None:
    exact = loops.moved(loops.fused("fp32"), loops.placed("cpu", torch.float32, beyond=0.0))
    plain = loops.moved(loops.fused("bf16"), loops.placed(beyond=0.0))
    assert_as_near(got, plain, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_loop_is_as_near_as_fused_ops(name: str, emulated: Path) -> None:
    loops = Loops(CASES[name])
    loop = EmulatedLoop(loops, emulated)
    got = loops.moved(loop, loops.placed(beyond=NAN))
    assert_near(loops, got)
    # In another order of warps, too.
    assert torch.equal(loops.moved(loop, loops.placed(beyond=float("inf"))), got)
    assert set(loop.module.launches) == set(loop.loop.schedule.blocks)
    assert loop.loop.schedule.macros["BATCHED_ROWS"] == ("in batches" in name)


# What a line of the source becomes, and the error; without one, the actions are wrong.
MISTAKES = {
    "no barrier": ("    __syncthreads();\n    put_sums<N>", "    put_sums<N>", "with no barrier between"),
    "no wait for the copy": ("  attention.kv_arrived.wait();\n", "", "which its copy engine wrote with no barrier"),
    "another phase": ("attention.kv_arrived.wait();", "mbarrier_wait(attention.kv_arrived.address, 1);",
                      "copy engine|wait for ever"),
    "too many bytes": ("cached * HEAD_DIM * 4)", "cached * HEAD_DIM * 4 + 16)",
                       "256 at mbarrier_wait|for ever: .* at mbarrier_wait"),
    "too few bytes": ("cached * HEAD_DIM * 4)", "cached * HEAD_DIM * 4 - 16)", "wait for ever: .* at mbarrier_wait"),
    "blocks that may not have started": (
        "cluster_wait();  // The other blocks have started, so their memory may be written.\n  attention", "attention",
        "nothing says yet that block . of the cluster has started",
    ),
    "an early read": ("const float held = hold(column);", "const float held = hold(column) + 0.f * late(0, column);",
                      "reads, before griddepcontrol.wait, byte"),
    "a tile too far": ("k + (at.lane >> 4) * 8) * 2);", "k + 8 + (at.lane >> 4) * 8) * 2);", ""),
    "a row too far": ("const int row = min(first + tile * 16 + half * 8 + g, ROWS - 1);",
                      "const int row = first + tile * 16 + half * 8 + g + 32;", "outside of every tensor"),
    "keys behind the length": ("first + key < length", "first + key <= length", ""),
    "a column's neighbour": ("const int column = (product.first + product.rank) * 8 + (threadIdx.x & 3) * 2",
                             "const int column = (product.first + product.rank) * 8 + (threadIdx.x & 3) * 2 ^ 1", ""),
    "an area too early": ("(u16*)(shared_memory + work.own_queries)", "(u16*)(shared_memory + work.own_queries - 64)",
                          "with no barrier between"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, emulated: Path) -> None:
    text, becomes, error = MISTAKES[name]
    loops = Loops(replace(CASES["pi05 10"], steps=1))

    def change(source: str) -> str:
        assert text in source
        return source.replace(text, becomes)

    loop = EmulatedLoop(loops, emulated, change)
    if error:
        with pytest.raises(EmulationError, match=error):
            loops.moved(loop, loops.placed(beyond=NAN))
        return
    got = loops.moved(loop, loops.placed(beyond=NAN))
    with pytest.raises(AssertionError):
        assert_near(loops, got)
