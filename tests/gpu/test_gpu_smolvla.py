"""SmolVLA on a GPU: native beside eager at small size, and at the published one with random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.agreement import assert_as_near
from tests.support.runtimes import steered
from tests.support.smolvla_loops import EXPERTS, Loops
from tests.support.tiny_smolvla import observation, write_lerobot
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config
from vla_accel.families.smolvla.family import SMOLVLA
from vla_accel.families.smolvla.native_loop import expert_spec
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import StreamedLoop, schedule, why_not
from vla_accel.measure.parity import compare
from vla_accel.measure.random_policy import random_observations, random_policy

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def settings(precision: str, engine: str, **parts: str) -> PolicyConfig:
    """`parts`: precision of the engine of a component."""
    spec = EngineSpec(engine)  # type: ignore[arg-type]
    specs = {n: replace(spec, precision=parts.get(n, "auto")) for n in SMOLVLA.parts}  # type: ignore[arg-type]
    return load_config({"num_steps": 10, "precision": precision, "device": "cuda"}).with_specs(specs)


@pytest.mark.parametrize("libero", [False, True])
def test_native_is_as_near_as_eager(libero: bool, tmp_path: Path) -> None:
    """Batches of several lengths in one graph, guided and not, in BF16."""
    write_lerobot(tmp_path, libero=libero)
    given = [observation(i, libero=libero, prompt=p) for i, p in enumerate(("pick up the bowl", "pick it", "place it"))]
    noise = np.random.default_rng(2).standard_normal((3, 5, 9)).astype(np.float32)
    chunk = np.full((4, 7 if libero else 6), 0.3)
    for more in ({}, {"prev_chunks": [chunk, None, chunk[:2]], "inference_delays": [2, None, 1]}):
        answers = []
        for precision, engine in (("bf16", "native"), ("bf16", "eager"), ("fp32", "eager")):
            policy = OptimizedPolicy.from_pretrained(tmp_path, settings(precision, engine))
            made = [r["actions"] for r in policy.infer_batch(given, noise=noise, **more)]
            answers.append(torch.from_numpy(np.stack(made)))
            assert {e["used"] for e in policy.ledger.as_list() if e["component"] != "call"} == {engine}
        assert_as_near(*answers)


def test_fp32_native_is_eager(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    noise = np.random.default_rng(2).standard_normal((5, 9)).astype(np.float32)
    ours, theirs = (
        OptimizedPolicy.from_pretrained(tmp_path, settings("fp32", engine)).infer(observation(), noise=noise)["actions"]
        for engine in ("native", "eager")
    )
    # TF32 products keep ten bits of a mantissa.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-3)


@pytest.mark.parametrize(
    "low", [{}, {"kv_cache": "fp8"}, {"vision": "fp8", "kv_cache": "fp8"}, {"denoise": "int8"}], ids=str
)
def test_published_size(low: dict[str, str]) -> None:
    """Random weights: native against FP32 eager, as near as eager BF16 is; FP8 and INT8 within `parity`'s limits."""
    config = settings("bf16", "native", **low)
    policy, exact = random_policy(SMOLVLA, config, with_reference=True)
    assert exact is not None
    given = random_observations(policy, 4)
    report = compare(policy, exact, given, name="native")
    streamed = torch.cuda.get_device_capability() == (9, 0) and "denoise" not in low
    assert policy.ledger.entries["denoise"].detail.startswith("streamed CUDA kernels" if streamed else "fused ops")
    assert {e["used"] for e in policy.ledger.as_list()} == {"native", "cuda_graph"}
    if low:
        assert report.passed, report.reasons
        return
    plain, _ = random_policy(SMOLVLA, settings("bf16", "eager"))
    eager = compare(plain, exact, given, name="eager")
    assert 1 - report.actions.cosine <= 4 * (1 - eager.actions.cosine)


# -- the streamed loop ------------------------------------------------------------------------------------------------


def hopper() -> Gpu:
    gpu = Gpu.of(torch.device(DEVICE))
    assert gpu is not None
    why = why_not(gpu, expert_spec(EXPERTS["full"].config), 1, "bf16")
    if why is not None:
        assert why.startswith("it needs compute capability 9.0")
        pytest.skip(f"NOT RUN: {why}")
    return gpu


def as_near_as_fused(loops: Loops, loop: StreamedLoop) -> None:
    """The streamed loop is as near to float32 as that of fused ops in the same precision, and does not change its mind,
    whatever is behind the lengths."""
    with steered("reference"):
        exact = loops.moved(loops.fused("fp32", "cpu"), loops.placed("cpu", torch.float32, beyond=0.0))
    plain = loops.moved(loops.fused("bf16", DEVICE), loops.placed(DEVICE, beyond=0.0))
    got = loops.moved(loop, loops.placed(DEVICE))
    assert_as_near(got, plain, exact)
    for beyond in (0.0, float("inf"), float("nan")):
        assert torch.equal(loops.moved(loop, loops.placed(DEVICE, beyond=beyond)), got)


@pytest.mark.parametrize("name", EXPERTS)
def test_the_streamed_loop_is_as_near_as_the_fused(name: str) -> None:
    gpu, loops = hopper(), Loops(EXPERTS[name])
    loop = loops.streamed(gpu, DEVICE)
    assert (loop.schedule.fused is None) == (len(loops.case.lengths) > 1 or "large heads" in name)
    as_near_as_fused(loops, loop)


@pytest.mark.parametrize("name", ["16 actions", "three sequences", "full"])
def test_no_kernel_reads_ahead_of_its_predecessor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nvrtc.MACROS, "INJECT_DELAY", 20)
    gpu, loops = hopper(), Loops(EXPERTS[name])
    as_near_as_fused(loops, loops.streamed(gpu, DEVICE))


@pytest.mark.parametrize(("kernel", "cluster"), [("grouped", 8), ("attention", 8)])
def test_a_device_of_fewer_places(kernel: str, cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small clusters, and where no warp holds the keys, which makes two kernels of q/k/v and attention."""
    gpu, loops = hopper(), Loops(EXPERTS["full"])
    if kernel == "grouped":
        monkeypatch.setattr(nvrtc.Module, "clusters_at_once", lambda *_: 0)
    else:
        monkeypatch.setattr(schedule, "MOST_ROUNDS", 0)
    loop = loops.streamed(gpu, DEVICE)
    assert loop.schedule.clusters[kernel] == cluster
    as_near_as_fused(loops, loop)
