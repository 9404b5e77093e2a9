"""The streamed loop on a Hopper against Triton's, with NaN in every place, and a wait that is never answered."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.gpu_policies import BF16_COSINE, DEVICE, NAN, cosines, on_gpu
from tests.support.streamed_support import LOOPS, loop_of, loops_inputs, run_loop
from vla_accel.families.pi0.native_loop import expert_spec, expert_weights
from vla_accel.families.pi0.network import Pi0
from vla_accel.families.pi0.step_tables import step_tables
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import why_not
from vla_accel.nn.loop import SuffixLoop
from vla_accel.nn.random_weights import random_model

pytestmark = pytest.mark.gpu


BATCHED = {
    f"{name} x {batch}": replace(LOOPS[name], batch=batch) for name in ("demo", "grouped") for batch in (2, 3, 4)
} | {"full x 4": replace(LOOPS["full"], batch=4)}


@pytest.mark.parametrize("name", LOOPS | BATCHED)
def test_the_streamed_loop_agrees_with_the_triton_loop(name: str) -> None:
    case = (LOOPS | BATCHED)[name]
    config, device = case.config, torch.device(DEVICE)
    why = why_not(Gpu.of(device), expert_spec(config), case.batch, "bf16")
    if why is not None:
        assert why.startswith("it needs compute capability 9.0")
        pytest.skip(f"NOT RUN: {why}")
    model = random_model(Pi0, config)
    inputs, state, noise = loops_inputs(case)
    sizes = (case.batch, case.prefix_tokens)
    with torch.inference_mode():
        exact = expert_weights(model, "fp32")
        tables = step_tables(model, exact.normed_products(), case.steps)
        reference = SuffixLoop(exact, expert_spec(config), tables, *sizes)
        want = run_loop(
            reference, {n: v.float() if n != "lengths" else v for n, v in inputs.items()}, state, noise, "cpu"
        )
        weights = expert_weights(on_gpu(model), "bf16")
        tables = step_tables(model, weights.normed_products(), case.steps)
        layered = SuffixLoop(weights, expert_spec(config), tables, *sizes)
        streamed = loop_of(case, expert_weights(model, "bf16", streamed=True), tables)
    triton_actions = run_loop(layered, inputs, state, noise, DEVICE)
    first = run_loop(streamed, inputs, state, noise, DEVICE)
    assert np.isfinite(first).all()
    # Without what both start from, which would flatter the cosine.
    start = noise.numpy()
    of_triton = cosines(triton_actions - start, want - start).min()
    assert of_triton >= BF16_COSINE
    assert cosines(first - start, want - start).min() >= BF16_COSINE
    assert cosines(first - start, triton_actions - start).min() >= BF16_COSINE
    # Buffers hold the last run's values now.
    for _ in range(3):
        np.testing.assert_array_equal(run_loop(streamed, inputs, state, noise, DEVICE), first)


@pytest.mark.parametrize("name", LOOPS | BATCHED)
def test_nan_behind_the_length_changes_no_bit(name: str) -> None:
    """Another engine may have made the prefix, whose padding then holds anything."""
    case = (LOOPS | BATCHED)[name]
    if why_not(Gpu.of(torch.device(DEVICE)), expert_spec(case.config), case.batch, "bf16"):
        pytest.skip("NOT RUN: needs compute capability 9.0")
    inputs, state, noise = loops_inputs(case)
    inputs["lengths"] = (inputs["lengths"] - 13).clamp(min=1)
    beyond = (torch.arange(case.prefix_tokens) >= inputs["lengths"][:, None])[None, :, :, None, None]
    model = on_gpu(random_model(Pi0, case.config))
    with torch.inference_mode():
        weights = expert_weights(model, "bf16", streamed=True)
        tables = step_tables(model, weights.normed_products(), case.steps)
        loop = loop_of(case, weights, tables)

    def run_with(value: float) -> np.ndarray:
        filled = {name: inputs[name].masked_fill(beyond, value) for name in ("keys", "values")}
        return run_loop(loop, inputs | filled, state, noise, DEVICE)

    want = run_with(0.0)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(run_with(NAN), want)
    np.testing.assert_array_equal(run_with(float("inf")), want)


@pytest.mark.parametrize("name", ["full", "full fifty rows"])
def test_nan_in_the_noise_ends_and_leaves_nothing(name: str) -> None:
    """Blocks read the suffix's keys and values until they are there, and NaN of either sign is there, too."""
    case = LOOPS[name]
    if why_not(Gpu.of(torch.device(DEVICE)), expert_spec(case.config), case.batch, "bf16"):
        pytest.skip("NOT RUN: needs compute capability 9.0")
    inputs, state, noise = loops_inputs(case)
    inputs["weights"].zero_()
    model = on_gpu(random_model(Pi0, case.config))
    with torch.inference_mode():
        weights = expert_weights(model, "bf16", streamed=True)
        loop = loop_of(case, weights, step_tables(model, weights.normed_products(), case.steps))
    want = run_loop(loop, inputs, state, noise, DEVICE)
    for nan in (NAN, -NAN):
        assert np.isnan(run_loop(loop, inputs, state, torch.full_like(noise, nan), DEVICE)).all()
        np.testing.assert_array_equal(run_loop(loop, inputs, state, noise, DEVICE), want)


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
    """Rubbish beyond the length changes nothing, a key before it does."""
    case = BATCHED["demo x 2"]
    model = on_gpu(random_model(Pi0, case.config))
    inputs, state, noise = loops_inputs(case)
    with torch.inference_mode():
        weights = expert_weights(model, "bf16", streamed=True)
        tables = step_tables(model, weights.normed_products(), case.steps)
        loop = loop_of(case, weights, tables)
    first = run_loop(loop, inputs, state, noise, DEVICE)
    length = int(inputs["lengths"][1])
    for place, same in ((length, True), (length - 1, False)):
        changed = {name: value.clone() for name, value in inputs.items()}
        changed["keys"][:, 1, place] = 5.0
        changed["values"][:, 1, place] = 5.0
        got = run_loop(loop, changed, state, noise, DEVICE)
        np.testing.assert_array_equal(got[0], first[0])
        assert np.array_equal(got[1], first[1]) == same
