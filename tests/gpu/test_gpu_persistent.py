"""The persistent denoise loop on a GPU against the loops of fused ops, with masks, guidance, pinned actions and uneven
steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.test_persistent import CASES as EMULATED
from tests.support.agreement import assert_as_near, rms
from tests.support.gpu_policies import DEVICE, NAN
from tests.support.runtimes import steered
from tests.support.streamed_support import LOOPS, LoopCase, Loops
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.persistent import PersistentLoop, why_not
from vla_accel.kernels.persistent.reference import Reference, columns_of
from vla_accel.nn.loop import LoopProgram

pytestmark = pytest.mark.gpu
FULL = replace(LOOPS["full"], steps=2)
CASES = {
    **{name: case for name, (case, _) in EMULATED.items()}, "full": FULL, "full pinned": replace(FULL, trained=True),
    "full uneven steps": replace(FULL, steps=3, setting="cubic"),
}  # fmt: skip


def gpus() -> dict[str, Gpu]:
    """The GPU with its own shared memory, and with that of a smaller one."""
    gpu = Gpu.of(torch.device(DEVICE))
    assert gpu is not None
    return {"own": gpu, "portable": gpu.portable}


def check(case: LoopCase, gpu: Gpu) -> None:
    """As near to FP32 as fused ops in BF16, and the same bits whatever lies beyond the valid keys."""
    loops = Loops(case)
    assert why_not(gpu, loops.spec, case.batch, "bf16") is None
    loop = loops.persistent(gpu, DEVICE)
    with steered("reference"):
        exact = loops.moved(loops.fused("fp32"), loops.placed("cpu", torch.float32, beyond=0.0))
        plain = loops.moved(loops.fused("bf16"), loops.placed("cpu", beyond=0.0))
    got = loops.moved(loop, loops.placed(DEVICE, beyond=NAN))
    assert_as_near(got, plain, exact)
    for beyond in (0.0, float("inf"), NAN):
        assert torch.equal(loops.moved(loop, loops.placed(DEVICE, beyond=beyond)), got)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shared", ["own", "portable"])
def test_the_loop_is_as_near_as_fused_ops_and_repeats_its_bits(name: str, shared: str) -> None:
    check(CASES[name], gpus()[shared])


def test_every_phase_is_that_of_the_reference() -> None:
    loops = Loops(replace(FULL, steps=1))
    loop = loops.persistent(gpus()["own"], DEVICE)
    weights, _ = loops.weights("bf16", DEVICE)
    reference = Reference(loop, list(weights.layers), None)
    got, want = (loops.moved(one, loops.placed(DEVICE, beyond=0.0)) for one in (loop, reference))
    assert rms(got - want) < 0.01 * rms(want)
    for buffer, rows in reference.found.items():
        found: Tensor = loop.buffers[buffer].float()
        found = columns_of(found, rows.shape[1]) if rows.ndim == 2 else found
        assert rms(found - rows) < 0.03 * rms(rows), buffer


def test_a_graph_replays_it() -> None:
    loops = Loops(FULL)
    loop, inputs, actions = loops.persistent(gpus()["own"], DEVICE), loops.placed(DEVICE), loops.noise.to(DEVICE)
    want = loops.moved(loop, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.run(inputs, None, actions)
    for _ in range(20):
        actions.copy_(loops.noise)
        graph.replay()
        assert torch.equal(actions.cpu() - loops.noise, want)


def test_two_loops_run_at_the_same_time() -> None:
    """Each needs all multiprocessors: neither may hold some of them while it waits for the others."""
    loops, gpu = Loops(FULL), gpus()["own"]
    inputs, two = loops.placed(DEVICE), [loops.persistent(gpu, DEVICE) for _ in range(2)]
    want = loops.moved(two[0], inputs)
    streams = [torch.cuda.Stream() for _ in two]
    actions = [[loops.noise.to(DEVICE) for _ in range(20)] for _ in two]
    torch.cuda.synchronize()
    for pair in zip(*actions, strict=True):
        for loop, stream, moved in zip(two, streams, pair, strict=True):
            with torch.cuda.stream(stream):
                loop.run(inputs, None, moved)
    torch.cuda.synchronize()
    for moved in (one for each in actions for one in each):
        assert torch.equal(moved.cpu() - loops.noise, want)


def test_a_program_of_few_rows_takes_it() -> None:
    loops = Loops(LOOPS["demo"])
    weights, tables = loops.weights("bf16", DEVICE)
    program = LoopProgram(weights, loops.spec, tables, 1, loops.case.prefix_tokens, "of this test")
    assert isinstance(program.loop, PersistentLoop)
    assert program.detail == "one persistent CUDA kernel, torch.bfloat16 (no streamed kernels: of this test)"
