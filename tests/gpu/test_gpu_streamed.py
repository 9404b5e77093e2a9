"""The streamed loops of all families on a Hopper against the loops of fused ops, and a wait that no block answers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.support.agreement import assert_as_near
from tests.support.gpu_policies import BF16_COSINE, DEVICE, NAN, cosines
from tests.support.runtimes import steered
from tests.support.streamed_support import EXPERTS, LOOPS, Loops
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import StreamedLoop, schedule, why_not

pytestmark = pytest.mark.gpu

BATCHED = {
    f"{name} x {batch}": replace(LOOPS[name], batch=batch) for name in ("demo", "grouped") for batch in (2, 3, 4)
} | {"full x 4": replace(LOOPS["full"], batch=4)}
SMOLVLA = {f"smolvla {name}": case for name, case in EXPERTS.items()}
CASES = {**LOOPS, **BATCHED, **SMOLVLA}


def hopper(loops: Loops) -> Gpu:
    gpu = Gpu.of(torch.device(DEVICE))
    assert gpu is not None
    why = why_not(gpu, loops.spec, loops.case.batch, "bf16")
    if why is not None:
        assert why.startswith("it needs compute capability 9.0")
        pytest.skip(f"NOT RUN: {why}")
    return gpu


def check(loops: Loops, loop: StreamedLoop) -> None:
    """The streamed loop is as near to float32 as the loop of fused ops, and repeats its bits, whatever lies behind the
    lengths."""
    with steered("reference"):
        exact = loops.moved(loops.fused("fp32"), loops.placed("cpu", torch.float32, beyond=0.0))
    plain = loops.moved(loops.fused("bf16", DEVICE), loops.placed(DEVICE, beyond=0.0))
    got = loops.moved(loop, loops.placed(DEVICE))
    if loops.case in EXPERTS.values():
        assert_as_near(got, plain, exact)
    else:
        for one, other in ((plain, exact), (got, exact), (got, plain)):
            assert cosines(one.numpy(), other.numpy()).min() >= BF16_COSINE
    for beyond in (0.0, float("inf"), NAN):
        assert torch.equal(loops.moved(loop, loops.placed(DEVICE, beyond=beyond)), got)


@pytest.mark.parametrize("name", CASES)
def test_the_streamed_loop_is_as_near_as_the_fused(name: str) -> None:
    loops = Loops(CASES[name])
    loop = loops.streamed(hopper(loops), DEVICE)
    if name in SMOLVLA:
        assert (loop.schedule.fused is None) == (loops.case.batch > 1 or "large heads" in name)
    check(loops, loop)


@pytest.mark.parametrize("name", ["smolvla 16 actions", "smolvla three sequences", "smolvla full"])
def test_no_kernel_reads_ahead_of_its_predecessor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nvrtc.MACROS, "INJECT_DELAY", 20)
    loops = Loops(CASES[name])
    check(loops, loops.streamed(hopper(loops), DEVICE))


@pytest.mark.parametrize("kernel", ["grouped", "attention"])
def test_a_device_that_holds_fewer_clusters(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small clusters, and where no warp holds the keys, so that two kernels compute q/k/v and attention."""
    loops = Loops(EXPERTS["full"])
    gpu = hopper(loops)
    if kernel == "grouped":
        monkeypatch.setattr(nvrtc.Module, "clusters_at_once", lambda *_: 0)
    else:
        monkeypatch.setattr(schedule, "MOST_ROUNDS", 0)
    loop = loops.streamed(gpu, DEVICE)
    assert loop.schedule.clusters[kernel] == 8
    check(loops, loop)


@pytest.mark.parametrize("name", ["full", "full fifty rows"])
def test_nan_in_the_noise_ends_and_leaves_nothing(name: str) -> None:
    """Blocks poll the suffix's keys and values, and NaN of either sign is a value that has arrived."""
    loops = Loops(LOOPS[name])
    loops.inputs["weights"].zero_()
    loop, inputs, noise = loops.streamed(hopper(loops), DEVICE), loops.placed(DEVICE), loops.noise
    want = loops.moved(loop, inputs)
    for nan in (NAN, -NAN):
        loops.noise = torch.full_like(noise, nan)
        assert loops.moved(loop, inputs).isnan().all()
        loops.noise = noise
        assert torch.equal(loops.moved(loop, inputs), want)


def test_a_wait_that_is_never_answered_ends() -> None:
    """In a process of its own, whose CUDA context is lost with the trap."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("NOT RUN: needs compute capability 9.0")
    code = """
import ctypes, torch
from vla_accel.kernels import nvrtc as runtime
kernel = '''extern "C" __global__ void f() {
  __shared__ u64 barrier;
  mbarrier_init(smem_of(&barrier), 1);
  mbarrier_wait(smem_of(&barrier), 0);
}'''
device = torch.device("cuda", 0)
module = runtime.load_module(runtime.source_of({"WAIT_TICKS": 1}) + kernel, {"f": 0}, "sm_90a", device)
module.launch("f", 1, 1, ())
runtime.synchronize(device)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "EngineError: cuda:0: a kernel stopped itself" in done.stderr, done.stderr


def test_the_streamed_loop_sees_each_row_s_length() -> None:
    """A key behind the length changes nothing, one before it does."""
    loops = Loops(BATCHED["demo x 2"])
    loop, inputs = loops.streamed(hopper(loops), DEVICE), loops.placed(DEVICE)
    first = loops.moved(loop, inputs)
    length = int(inputs["lengths"][1])
    for position, same in ((length, True), (length - 1, False)):
        changed = {name: value.clone() for name, value in inputs.items()}
        changed["keys"][:, 1, position] = changed["values"][:, 1, position] = 5.0
        got = loops.moved(loop, changed)
        assert torch.equal(got[0], first[0]) and torch.equal(got[1], first[1]) == same
