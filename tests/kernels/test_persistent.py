"""The persistent kernel of the denoise loop in an emulator on the CPU: as near to float32 as the loop of fused ops in
BF16, the same bits in any order of warps and blocks; its phases against a torch reference; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.agreement import assert_as_near, rms
from tests.support.cuda_emulator import EmulatedModule, EmulationError
from tests.support.gpus import A100, GPUS, H200, ORIN, RTX_4090
from tests.support.runtimes import CPU
from tests.support.streamed_support import LOOPS, NAN, LoopCase, Loops, streamable
from vla_accel.errors import EngineError
from vla_accel.families.pi0.native_loop import expert_spec
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.persistent import NotResident, PersistentLoop, Plan, why_not
from vla_accel.kernels.persistent.plan import MOST_STAGES, Tuning
from vla_accel.kernels.persistent.reference import Reference, columns_of
from vla_accel.nn.loop import persistent_loop
from vla_accel.runtime import Runtime

DEMO = replace(LOOPS["demo"], steps=2)
PI0 = LoopCase(streamable("pi0", width=128, mlp=256, heads=2, head_dim=128, horizon=9), prefix_tokens=70, steps=2)
# The case, and the blocks of the GPU: fewer and more than a product has tiles.
CASES = {
    "demo": (DEMO, 5),
    "pi0": (PI0, 4),
    "pinned": (replace(DEMO, trained=True), 3),
    "pi0 pinned": (replace(PI0, trained=True, steps=1), 3),
    "uneven steps": (replace(LOOPS["narrow"], steps=2, setting="cubic"), 3),
    "three sequences": (
        LoopCase(streamable("pi05", width=128, mlp=512, heads=4, horizon=4), batch=3, prefix_tokens=130, steps=1), 7,
    ),
    "one block": (
        LoopCase(streamable("pi05", width=320, mlp=416, heads=4, kv_heads=2, head_dim=128, depth=1, horizon=15),
                 prefix_tokens=130, steps=1), 1,
    ),
    "heads of 256": (
        LoopCase(streamable("pi05", width=512, mlp=4352, heads=2, head_dim=256, depth=1, horizon=16), prefix_tokens=65,
                 steps=1), 17,
    ),
    "narrow": (replace(LOOPS["narrow"], steps=2), 3),
}  # fmt: skip


def gpu_of(blocks: int, shared: int = RTX_4090.shared_per_block) -> Gpu:
    return replace(RTX_4090, multiprocessors=blocks, shared_per_block=shared)


class EmulatedLoop:
    """A persistent loop whose kernel runs in the emulator, and may access its own tensors and a call's alone. `change`
    edits the source first."""

    def __init__(
        self, loops: Loops, gpu: Gpu, folder: Path, change: Callable[[str], str] = lambda source: source
    ) -> None:
        def load(source: str, *rest: Any) -> EmulatedModule:
            return EmulatedModule(change(source), *rest, folder=folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrtc, "load_module", load)
            self.loop: PersistentLoop = loops.persistent(gpu)
        assert isinstance(self.loop.module, EmulatedModule)
        self.module = self.loop.module

    def run(self, inputs: dict[str, Tensor], state: Tensor | None, actions: Tensor) -> None:
        own = (*self.loop.buffers.values(), *self.loop.constants.values(), *self.loop.weights)
        self.module.allow(*(t for t in (*own, *inputs.values(), state, actions) if t is not None))
        self.loop.run(inputs, state, actions)


def assert_near(loops: Loops, got: Tensor) -> None:
    exact = loops.moved(loops.fused("fp32"), loops.placed("cpu", torch.float32, beyond=0.0))
    assert_as_near(got, loops.moved(loops.fused("bf16"), loops.placed(beyond=0.0)), exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_loop_is_as_near_as_fused_ops_and_repeats_its_bits(name: str, emulated: Path) -> None:
    case, blocks = CASES[name]
    loops = Loops(case)
    loop = EmulatedLoop(loops, gpu_of(blocks), emulated)
    got = loops.moved(loop, loops.placed(beyond=NAN))
    assert_near(loops, got)
    assert not got[loops.inputs["weights"] > 0].any() or not case.trained
    # In another order of warps and blocks, with other numbers behind the prefix, and with the counters of the last run.
    assert torch.equal(loops.moved(loop, loops.placed(beyond=float("inf"))), got)
    assert loop.module.launches == ["denoise"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "shared"), [(1, H200.shared_per_block), (11, RTX_4090.shared_per_block)])
def test_the_result_does_not_depend_on_the_gpu(blocks: int, shared: int, emulated: Path) -> None:
    """A GPU's multiprocessors and its shared memory decide who computes what, and no sum."""
    loops = Loops(replace(DEMO, steps=1))
    one, other = (EmulatedLoop(loops, gpu, emulated) for gpu in (gpu_of(5), gpu_of(blocks, shared)))
    assert torch.equal(loops.moved(one, loops.placed()), loops.moved(other, loops.placed()))


@pytest.mark.parametrize("name", ["demo", "pi0"])
def test_every_phase_is_that_of_the_reference(name: str, emulated: Path) -> None:
    case, blocks = CASES[name]
    loops = Loops(replace(case, steps=1))
    loop = EmulatedLoop(loops, gpu_of(blocks), emulated)
    weights, _ = loops.weights("bf16")
    reference = Reference(loop.loop, list(weights.layers), None if weights.mix is None else weights.mix.weight)
    got, want = (loops.moved(one, loops.placed(beyond=0.0)) for one in (loop, reference))
    assert rms(got - want) < 0.01 * rms(want)
    assert reference.found.keys() == {"x", "q", "k", "v", "context", "active"}
    for buffer, rows in reference.found.items():
        found = loop.loop.buffers[buffer].float()
        found = columns_of(found, rows.shape[1]) if rows.ndim == 2 else found
        # BF16 has eight bits, and a rounding of the first layer goes through the second one.
        assert rms(found - rows) < 0.03 * rms(rows), buffer


# What a line of the source becomes, and the error; without one, the actions are wrong.
MISTAKES = {
    "a stage is not awaited": ("mbarrier_wait(full(at), parity ^ wraps);", "", "with no barrier between"),
    "a stage is overwritten": ("mbarrier_wait(empty(slot), parity ^ 1);", "", "with no barrier between|all of 32"),
    "a stage is not released": ("if (lane < stages) mbarrier_arrive", "if (lane < stages - 1) mbarrier_arrive",
                                "wait for ever"),
    "sums are read early": ("    consumers_sync();\n    Quad quad", "    Quad quad", "with no barrier between"),
    "an arrival is missing": ("    me.parts.arrive();\n", "", "wait for ever: .*wait_count"),
    "an arrival is counted twice": ("  me.hidden.expect(", "  me.hidden.expect(1 + ", "wait for ever: .*wait_count"),
    "queries do not wait": ("me.heads.wait();", "consumers_sync();", ""),
    "keys behind the length": ("values + from, item.first, length", "values + from, item.first, c.prefix_tokens", ""),
    "another position": ("angle = position *", "angle = (position - 1) *", ""),
    "an older stream": ("own[0] + held.gate_a.x", "held.gate_a.x", ""),
    "the scale of another layer": ("layer + mlp, !mlp", "layer, !mlp", ""),
    "sums of other tiles": ("tile < TILES ? squares", "tile < TILES - 1 ? squares", ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, emulated: Path) -> None:
    text, becomes, error = MISTAKES[name]
    loops = Loops(replace(DEMO, steps=1))

    def change(source: str) -> str:
        assert text in source
        return source.replace(text, becomes)

    loop = EmulatedLoop(loops, gpu_of(5), emulated, change)
    if error:
        with pytest.raises(EmulationError, match=error):
            loops.moved(loop, loops.placed(beyond=NAN))
        return
    with pytest.raises(AssertionError):
        assert_near(loops, loops.moved(loop, loops.placed(beyond=NAN)))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (LOOPS["full"], ""), (DEMO, ""), (PI0, ""), (LOOPS["demo x 4"], "4 x 10 suffix rows are more than 16"),
        (LOOPS["full fifty rows"], "1 x 50 suffix rows are more than 16"),
        (LoopCase(streamable("pi05", width=136, mlp=512, heads=4)), "tiles"),
        (LoopCase(streamable("pi05", width=128, mlp=512, heads=4, head_dim=96)), "tiles"),
    ],
)  # fmt: skip
def test_what_it_does_not_run_is_explained(case: LoopCase, why: str) -> None:
    spec = expert_spec(case.config)
    for gpu in GPUS.values():
        found = why_not(gpu, spec, case.batch, "bf16")
        if gpu.capability < (8, 0):
            assert found == f"it needs compute capability 8.0, {gpu.name} has {gpu.version}"
        else:
            assert (found is None) == (why == "") and why in (found or "")
    assert why_not(H200, spec, case.batch, "int8") == "it needs BF16 weights, got INT8"
    assert why_not(None, spec, case.batch, "bf16") == "there is no GPU"


def test_a_gpu_with_little_shared_memory_is_refused() -> None:
    small = replace(RTX_4090, shared_per_block=48 << 10)
    reason = "its ring needs 3 stages, 49152 bytes of shared memory hold 1"
    assert why_not(small, expert_spec(LOOPS["full"].config), 1, "bf16") == reason


def test_triton_s_kernels_only_exclude_it() -> None:
    """Nothing of CUDA C++ is compiled, and the ledger says why."""
    loops = Loops(DEMO)
    weights, tables = loops.weights("bf16")
    for runtime in (Runtime(CPU, H200, "cuda").triton, Runtime(CPU, A100, "cuda").triton):
        with runtime.open():
            found = persistent_loop(weights, loops.spec, tables, 1, DEMO.prefix_tokens)
        assert found == "Triton's kernels only"


def test_causal_experts_are_refused() -> None:
    spec = replace(expert_spec(DEMO.config), causal=True)
    assert "attend to the whole suffix" in str(why_not(H200, spec, 1, "bf16"))


def test_a_device_that_does_not_hold_all_blocks_is_refused(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedModule, "blocks_at_once", lambda *_: 4)
    with pytest.raises(NotResident, match="its 5 blocks must run at once, the device holds 4"):
        EmulatedLoop(Loops(DEMO), gpu_of(5), emulated)


@pytest.mark.parametrize(("gpu", "stages"), [(H200, MOST_STAGES), (A100, 8), (RTX_4090, 4), (ORIN, 8)], ids=str)
def test_the_ring_takes_the_shared_memory_that_is_left(gpu: Gpu, stages: int) -> None:
    plan = Plan(expert_spec(LOOPS["full"].config), 1, 10, False, gpu)
    assert plan.stages == stages and plan.shared <= gpu.shared_per_block


@pytest.mark.parametrize(
    "knobs", [{"stage_units": 2}, {"stage_units": 6, "loaded": 6}, {"stage_units": 8, "loaded": 4}]
)
def test_stages_that_the_kernel_would_read_wrongly_are_refused(knobs: dict[str, int]) -> None:
    with pytest.raises(EngineError, match="expected stages of 4 or 8 units"):
        Tuning(**knobs)  # type: ignore[arg-type]
