"""Native policies on a GPU against eager float32, guided and not, and what their timings say. Written for an H200: FP8
and the streamed loop need a Hopper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.agreement import assert_as_near, assert_mostly_as_near
from tests.support.gpu_policies import (
    BF16_COSINE,
    DEVICE,
    EAGER,
    NAN,
    NATIVE,
    PARTS,
    PROMPTS,
    SMALL,
    actions_of,
    cosines,
    demo_observation,
    load,
    noise_for,
    poison,
    save,
    used,
)
from tests.support.tiny import TOKENIZER, tiny_config, tiny_observation
from vla_accel import EngineSpec, OptimizedPolicy
from vla_accel.config import RtcConfig
from vla_accel.engines.native import NativeEngine
from vla_accel.errors import EngineError
from vla_accel.measure import overlap

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("batch", [1, 3])
def test_native_agrees_with_eager_float32(name: str, batch: int, folders: dict[str, Path]) -> None:
    native, eager = load(folders[name]), load(folders[name], EAGER)
    for seed in range(4):
        observations = [tiny_observation(10 * seed + i, PROMPTS[(seed + i) % 3]) for i in range(batch)]
        noise = noise_for(native, batch, seed)
        found = cosines(actions_of(native, observations, noise), actions_of(eager, observations, noise))
        assert found.min() >= BF16_COSINE, found
    expected = {"vision": "native", "kv_cache": "native", "denoise": "native"}
    assert used(native) == expected | ({"call": "cuda_graph"} if DEVICE == "cuda" else {})
    if DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        assert ("streamed" in native.ledger.entries["denoise"].detail.split("(")[0]) == ("awkward" not in name)


@pytest.mark.parametrize("kind", ["pi05", "pi0"])
def test_the_oddest_sizes_work(kind: Any, tmp_path: Path) -> None:
    """Heads of six, widths of 12, 18 and 14: nothing is a multiple of anything."""
    config = tiny_config(kind, vocab_size=TOKENIZER.vocab_size)
    save(config, tmp_path)
    low = replace(EAGER, precision="bf16")
    native, plain, exact = load(tmp_path), load(tmp_path, low), load(tmp_path, EAGER)
    observations, noise = [tiny_observation(i, PROMPTS[i]) for i in range(2)], noise_for(native, 2)
    got, low_eager, want = (torch.from_numpy(actions_of(p, observations, noise)) for p in (native, plain, exact))
    assert_as_near(got, low_eager, want)


def test_the_demo_agrees_with_eager_float32(demo: OptimizedPolicy) -> None:
    exact, plain = load("demo", EAGER), load("demo", replace(EAGER, precision="bf16"))
    observations, noise = [demo_observation(demo, seed) for seed in range(8)], noise_for(demo, 8)
    one_by_one = np.concatenate([actions_of(demo, [o], n[None]) for o, n in zip(observations, noise, strict=True)])
    want, low = (torch.from_numpy(actions_of(policy, observations, noise)) for policy in (exact, plain))
    for got in (one_by_one, actions_of(demo, observations, noise)):
        assert_mostly_as_near(torch.from_numpy(got), low, want)
    if DEVICE == "cuda":
        assert used(demo)["call"] == "cuda_graph"


def test_noise_of_the_device_is_seeded(folder: Path) -> None:
    policy = load(folder)
    first = [policy.infer(tiny_observation(0))["actions"] for _ in range(2)]
    policy.reset()
    again = [policy.infer(tiny_observation(0))["actions"] for _ in range(2)]
    assert not np.allclose(first[0], first[1])
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("name", SMALL)
def test_guided_and_plain_calls_share_a_graph(name: str, folders: dict[str, Path]) -> None:
    native, eager = load(folders[name]), load(folders[name], EAGER)
    observations, noise = [tiny_observation(i, PROMPTS[i]) for i in range(2)], noise_for(native, 2)
    horizon = native.model.config.action_horizon
    previous = np.random.default_rng(1).uniform(-1, 2, (horizon - 2, 7))
    options = [
        {"prev_chunks": [None, previous], "inference_delays": [None, 3]},
        {"prev_chunks": [previous[1:], previous[:1]], "inference_delays": [1, 0]},
    ]
    plain, exact = (actions_of(p, observations, noise) for p in (native, eager))
    graphs = [p.captured for p, _ in native.pipelines._kept.values()]
    assert all(graph is not None for graph in graphs)
    first = [actions_of(native, observations, noise, **o) for o in options]
    for got, one in zip(first, options, strict=True):
        want = actions_of(eager, observations, noise, **one)
        assert cosines(got, want).min() >= BF16_COSINE
        for row, chunk in enumerate(one["prev_chunks"]):
            if chunk is None:
                np.testing.assert_array_equal(got[row], plain[row])
            else:
                # What guidance adds, without what both have anyway.
                assert cosines((got - plain)[row : row + 1], (want - exact)[row : row + 1]).min() >= 0.995
    poison(native)
    for i in (1, 0):
        np.testing.assert_array_equal(actions_of(native, observations, noise, **options[i]), first[i])
    np.testing.assert_array_equal(actions_of(native, observations, noise), plain)
    now = [p.captured for p, _ in native.pipelines._kept.values()]
    assert len(now) == len(graphs) and all(a is b for a, b in zip(now, graphs, strict=True)), "captured again"


@pytest.mark.parametrize("name", SMALL)
def test_guidance_of_zero_changes_no_bit(name: str, folders: dict[str, Path]) -> None:
    native = load(folders[name], replace(NATIVE, rtc=RtcConfig("zeros")))
    observation, noise = tiny_observation(0, PROMPTS[0]), noise_for(native, 1)[0]
    plain = native.infer(observation, noise=noise)["actions"]
    previous = np.random.default_rng(1).uniform(-50, 50, (4, 7))
    guided = native.infer(observation, noise=noise, prev_chunk=previous, inference_delay=0)["actions"]
    np.testing.assert_array_equal(guided, plain)
    moved = native.infer(observation, noise=noise, prev_chunk=previous, inference_delay=1)["actions"]
    assert np.abs(moved - plain).max() > 1e-2


def test_one_step_reproduces_the_previous_chunk(folder: Path) -> None:
    native = load(folder, replace(NATIVE, num_steps=1, rtc=RtcConfig("ones")))
    previous = np.random.default_rng(1).uniform(-1, 2, (5, 7))
    got = native.infer(tiny_observation(0), prev_chunk=previous, inference_delay=2)["actions"]
    np.testing.assert_allclose(got[:5], previous, rtol=0, atol=1e-4)


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("name", ["action_out_proj.weight", "expert.layers.0.down_proj.weight", "projector.weight"])
def test_non_finite_weights_raise(value: float, name: str, folders: dict[str, Path]) -> None:
    source = load(folders["pi05"], NATIVE.with_specs(dict.fromkeys(PARTS, EngineSpec("eager"))))
    dict(source.model.named_parameters())[name].data[0, 0] = value
    broken = OptimizedPolicy(source.checkpoint, NATIVE)
    for _ in range(2):
        with pytest.raises(EngineError, match="expected finite values"):
            broken.infer(tiny_observation(0))
    assert np.isfinite(load(folders["pi05"]).infer(tiny_observation(0))["actions"]).all()


def test_the_breakdown_adds_up(demo: OptimizedPolicy) -> None:
    """Arithmetic, not timing: what a call spends in no section belongs to `transfer`, however busy the machine is."""
    demo.latency.clear()
    for seed in range(8):
        demo.infer(demo_observation(demo, seed))
    parts = demo.latency_report()["components"]
    total = parts.pop("total")["mean_ms"]
    assert set(parts) == {"preprocess", *PARTS, "transfer", "postprocess"}
    assert all(part["mean_ms"] > 0 for part in parts.values())
    assert sum(part["mean_ms"] for part in parts.values()) == pytest.approx(total, rel=1e-9)
    assert len(demo.latency.samples) == 8
    for sample in demo.latency.samples:
        assert sum(sample.sections.values()) == pytest.approx(sample.total_ms, rel=1e-9)


def test_the_kernels_of_a_call_are_those_of_its_graph(demo: OptimizedPolicy) -> None:
    """Whatever they take: their times add up, and on a Hopper some begin before others end."""
    observation = demo.processor.example()
    found = overlap.recorded(lambda: demo.infer(observation))
    assert demo.pipelines.newest.captured is not None
    names, total = [one["name"] for one in found["kernels"]], sum(one["count"] for one in found["kernels"])
    assert not [name for name in names if name.startswith(("cuda", "cuLaunch", "Activity Buffer"))]
    assert found["launched"] == total > 10 * len(PARTS)
    assert found["span_us"] == pytest.approx(found["busy_us"] + found["idle_us"])
    assert found["sum_us"] == pytest.approx(found["busy_us"] + found["overlapped_us"])
    if torch.cuda.get_device_capability() >= (9, 0):
        assert found["overlapped_us"] > 0


@pytest.mark.parametrize("part", PARTS)
def test_the_events_inside_the_graph_time_what_they_enclose(
    part: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part waits for half a second of the GPU's clock, a thousand times what the others need."""
    run = NativeEngine.run

    def slowly(engine: NativeEngine) -> None:
        run(engine)
        if engine.component.name == part:
            torch.cuda._sleep(10**9)  # cycles, of which no GPU has 2.5 in a nanosecond

    monkeypatch.setattr(NativeEngine, "run", slowly)
    policy = load(folders["pi05"])
    for _ in range(2):
        policy.infer(tiny_observation(0))
    sections = policy.latency.samples[-1].sections
    assert sections[part] > 400 and max(sections, key=sections.__getitem__) == part
