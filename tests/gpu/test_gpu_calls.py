"""What may go wrong between calls on a GPU: other shapes, poisoned buffers, captures that fail, threads."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.support.gpu_policies import (
    BF16_COSINE,
    DEVICE,
    EAGER,
    NATIVE,
    PROMPTS,
    SMALL,
    actions_of,
    cosines,
    feed_of,
    load,
    noise_for,
    on_gpu,
    padded,
    pipelines_of,
    poison,
    run,
    used,
)
from tests.support.tiny import tiny_observation
from vla_accel.component import OVERLAP
from vla_accel.config import NativeOptions
from vla_accel.errors import EngineError, ObservationError
from vla_accel.families.pi0.network import Pi0
from vla_accel.nn.loop import LoopProgram
from vla_accel.nn.random_weights import random_model
from vla_accel.pictures import ChannelScale, PixelValues
from vla_accel.transforms.images import resize

pytestmark = pytest.mark.gpu

VIEWS = ("observation/image", "observation/wrist_image")


@pytest.mark.parametrize("kind", ["pi05", "pi0"])
def test_shapes_may_change_between_calls(kind: str) -> None:
    model = random_model(Pi0, SMALL[kind])
    eager = pipelines_of(random_model(Pi0, SMALL[kind]).to(DEVICE), EAGER)
    native = pipelines_of(on_gpu(model), NATIVE)
    # Views, prompt length, steps and batch, one after the other and back.
    shapes = [
        padded(1, 2, 32, 3), padded(1, 1, 32, 3), padded(1, 3, 32, 3), padded(1, 2, 64, 3),
        padded(1, 2, 32, 1), padded(1, 2, 32, 10), padded(2, 2, 32, 3), padded(5, 2, 32, 3),
        padded(8, 1, 32, 2),
    ]  # fmt: skip
    order = [*shapes, *reversed(shapes), *shapes[::2]]
    for seed, shape in enumerate(order):
        feed = feed_of(model, shape, seed)
        found = cosines(run(native, shape, feed), run(eager, shape, feed))
        assert found.min() >= BF16_COSINE, (shape, found)
    assert len(native) == len(shapes)


def test_prompt_lengths_share_a_graph(folder: Path) -> None:
    native, eager = load(folder), load(folder, EAGER)
    noise = noise_for(native, 1)
    kept = len(native.pipelines)
    for prompt in (*PROMPTS, "bowl", *PROMPTS):
        found = cosines(*(actions_of(p, [tiny_observation(0, prompt)], noise) for p in (native, eager)))
        assert found.min() >= BF16_COSINE, prompt
    assert len(native.pipelines) <= kept + 1


def test_two_policies_in_one_process(folders: dict[str, Path]) -> None:
    alone: dict[str, list[np.ndarray]] = {}
    observations = [tiny_observation(seed, PROMPTS[seed % 3]) for seed in range(6)]
    policies = {}
    for kind in ("pi05", "pi0"):
        policy = policies[kind] = load(folders[kind])
        noise = noise_for(policy, 1)[0]
        alone[kind] = [policy.infer(o, noise=noise)["actions"] for o in observations]
    for i, observation in enumerate(observations):
        for kind, policy in policies.items():
            noise = noise_for(policy, 1)[0]
            np.testing.assert_array_equal(policy.infer(observation, noise=noise)["actions"], alone[kind][i])


@pytest.mark.parametrize("name", SMALL)
def test_stale_buffers_do_not_leak_into_a_call(name: str, folders: dict[str, Path]) -> None:
    native = load(folders[name])
    observations, noise = [tiny_observation(i, PROMPTS[i]) for i in range(2)], noise_for(native, 2)
    want = [r["actions"] for r in native.infer_batch(observations, noise=noise)]
    poison(native)
    for _ in range(2):
        got = [r["actions"] for r in native.infer_batch(observations, noise=noise)]
        np.testing.assert_array_equal(got, want)


def _no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")


def test_out_of_memory_during_capture_falls_back_loudly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured = load(folder)
    observation, noise = tiny_observation(0), noise_for(captured, 1)[0]
    want = captured.infer(observation, noise=noise)["actions"]
    monkeypatch.setattr(torch.cuda, "graph", _no_memory)
    with caplog.at_level(logging.WARNING, logger="vla_accel"):
        fallen = load(folder)
    entry = fallen.ledger.entries["call"]
    assert (entry.requested, entry.used) == ("cuda_graph", "stream") and "out of memory" in entry.reason
    assert [r.getMessage() for r in caplog.records if "cuda_graph" in r.getMessage()]
    result = fallen.infer(observation, noise=noise)
    assert cosines(result["actions"][None], want[None]).min() > 0.99999
    assert all(result["policy_timing"][f"{name}_ms"] > 0 for name in ("vision", "kv_cache", "denoise"))
    with pytest.raises(
        EngineError, match="strict mode: call: requested engine cuda_graph, using stream: out of memory"
    ):
        load(folder, replace(NATIVE, strict=True))
    monkeypatch.undo()
    assert used(load(folder))["call"] == "cuda_graph"


def test_the_gpu_resizes_images_as_the_host_does(folder: Path) -> None:
    """Sizes change from call to call, one of them is the model's; each set of sizes has a shape of its own."""
    policy, rng = load(folder), np.random.default_rng(0)
    own, small, large = (28, 28), (48, 64), (90, 120)
    calls = ((small, own), (small, own), (small, own), ((60, 40), small), (own, own), (own, small), (small, own),
             (large, small), (small, own), (small, own), (small, own), (large, small), (large, small))  # fmt: skip
    for seed, sizes in enumerate(calls):
        given = tiny_observation(seed) | {
            key: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for key, size in zip(VIEWS, sizes, strict=True)
        }
        fitted = given | {key: resize(given[key], 28, "antialias") for key in VIEWS}
        noise = noise_for(policy, 1, seed)[0]
        got, want = (policy.infer(one, noise=noise)["actions"] for one in (given, fitted))
        np.testing.assert_array_equal(got, want)
    cameras = [p.shape.cameras for p, _ in policy.pipelines._kept.values()]
    assert len({c for c in cameras if c is not None}) == 4


def test_pixel_maps_follow_the_cameras_of_each_call(folder: Path) -> None:
    """Bars as lerobot 0.4 has them, and a camera whose channels are scaled."""
    scaled = ChannelScale((90.0, 120.0, 150.0), (3.0, 2.0, 4.0))
    pixels = PixelValues(outside=-255.0, clipped=(-255.0, 255.0), cameras=(ChannelScale(), scaled))
    native, eager, rng = load(folder), load(folder, EAGER), np.random.default_rng(0)
    usual = load(folder)
    for policy in (native, eager):
        policy.processor = replace(policy.processor, pixels=pixels)
    kept = len(native.pipelines)
    for seed, size in enumerate(((48, 64), (48, 64), (64, 30), (28, 28), (48, 64), (90, 120))):
        given = tiny_observation(seed) | {key: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for key in VIEWS}
        noise = noise_for(native, 1, seed)
        answers = [actions_of(policy, [given], noise) for policy in (native, eager, usual)]
        assert cosines(answers[0], answers[1]).min() >= BF16_COSINE, size
        assert cosines(answers[0], answers[2]).max() < BF16_COSINE, "the maps change the answer"
    assert len(native.pipelines) == kept + 4 and used(native)["call"] == "cuda_graph"


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_first_step_that_overlaps_the_prefix_changes_no_bit(
    kernels: Literal["auto", "triton"], graph: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do calls in a row, whose steps would meet the next call's prefix."""
    config = replace(NATIVE, cuda_graph=graph, num_steps=2, native=NativeOptions(kernels=kernels))
    overlapping = load(folder, config)
    monkeypatch.setattr(LoopProgram, "follow", lambda *_: "")
    behind = load(folder, config)
    said = overlapping.ledger.entries["denoise"].detail
    assert (OVERLAP in said) == ("apart" not in said)
    assert OVERLAP not in behind.ledger.entries["denoise"].detail
    for seed in range(20):
        observation, noise = tiny_observation(seed, PROMPTS[seed % 3]), noise_for(overlapping, 1, seed)[0]
        a, b = (p.infer(observation, noise=noise)["actions"] for p in (overlapping, behind))
        np.testing.assert_array_equal(a, b)


def test_threads_get_the_serial_results(folder: Path) -> None:
    policy = load(folder)
    jobs = [(tiny_observation(i, PROMPTS[i % 3]), noise_for(policy, 1, i)[0]) for i in range(24)]
    want = [policy.infer(o, noise=n)["actions"] for o, n in jobs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            got = list(pool.map(lambda job: policy.infer(job[0], noise=job[1])["actions"], jobs))
            np.testing.assert_array_equal(got, want)


def test_threads_may_capture_while_others_run(folders: dict[str, Path]) -> None:
    """One policy runs its graph, the other captures new shapes."""
    running, capturing = load(folders["pi05"]), load(folders["pi0"])
    observation, noise = tiny_observation(0), noise_for(running, 1)[0]
    want = running.infer(observation, noise=noise)["actions"]
    with ThreadPoolExecutor(2) as pool:

        def capture() -> list[np.ndarray]:
            return [
                np.stack([r["actions"] for r in capturing.infer_batch([tiny_observation(i) for i in range(n)])])
                for n in range(2, 7)
            ]  # fmt: skip

        busy = pool.submit(capture)
        for _ in range(200):
            np.testing.assert_array_equal(running.infer(observation, noise=noise)["actions"], want)
        assert all(np.isfinite(a).all() for a in busy.result())


def test_vision_begins_early_and_calls_between_leave_nothing(folder: Path) -> None:
    """Calls that are refused after vision started, and calls of other shapes; the same bits as a policy without graphs,
    whose vision never starts early."""
    policy, plain = load(folder), load(folder, replace(NATIVE, cuda_graph=False))
    assert used(policy)["call"] == "cuda_graph" and "call" not in used(plain)
    noise = noise_for(policy, 1)[0]
    for seed in range(40):
        given = tiny_observation(seed, PROMPTS[seed % 3])
        if seed % 4 == 1:
            with pytest.raises(ObservationError, match="state"):
                policy.infer(given | {"observation/state": np.full(8, 1e300)}, noise=noise)
        if seed % 8 == 2:
            policy.infer_batch([given, given])
        got, want = (p.infer(given, noise=noise) for p in (policy, plain))
        np.testing.assert_array_equal(got["actions"], want["actions"])
        assert min(got["policy_timing"].values()) >= 0
