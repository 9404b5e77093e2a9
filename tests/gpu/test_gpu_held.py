"""What policies hold of a GPU's memory: over many calls, after shapes are dropped, by precision; weights once."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpu_policies import (
    EAGER,
    NATIVE,
    PROMPTS,
    SMALL,
    actions_of,
    cosines,
    demo_observation,
    feed_of,
    load,
    noise_for,
    on_gpu,
    padded,
    pipelines_of,
    prepared_bytes,
    run,
)
from tests.support.scales import scales_of_any
from tests.support.streamed_support import streamable
from tests.support.tiny import tiny_observation
from vla_accel import EngineSpec, OptimizedPolicy
from vla_accel.config import EnginePrecision
from vla_accel.families.pi0.native import Pi0Store
from vla_accel.families.pi0.native_loop import why_not_streamed
from vla_accel.families.pi0.network import Pi0
from vla_accel.nn.native_prefix import PrefixWeights
from vla_accel.nn.random_weights import random_model

pytestmark = pytest.mark.gpu


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


SHAPES = 8
"""Of `_changing`: one to four observations, in two buckets of prompts."""


def _repeated(policy: OptimizedPolicy) -> Iterator[Callable[[], object]]:
    for observation in itertools.cycle([demo_observation(policy, seed) for seed in range(16)]):
        yield functools.partial(policy.infer, observation)


def _changing(policy: OptimizedPolicy) -> Iterator[Callable[[], object]]:
    """Calls without end, each of another shape than the one before: one to four observations, prompts of two lengths;
    every other one is guided."""
    short, long = PROMPTS[2], " ".join(["place it"] * 20)
    seen = {p: [{**demo_observation(policy, seed), "prompt": p} for seed in range(4)] for p in (short, long)}
    chunk = policy.infer(seen[short][0])["actions"]
    for guided, batch, prompt in itertools.cycle(itertools.product((False, True), (1, 2, 3, 4), (short, long))):
        given: dict[str, Any] = {"prev_chunks": [chunk] * batch, "inference_delays": [2] * batch} if guided else {}
        yield functools.partial(policy.infer_batch, seen[prompt][:batch], **given)


@pytest.mark.slow
@pytest.mark.parametrize("calls_of", [_repeated, _changing])
def test_ten_thousand_calls_take_no_more_memory(
    calls_of: Callable[[OptimizedPolicy], Iterator[Callable[[], object]]], folders: dict[str, Path]
) -> None:
    policy = load("demo" if calls_of is _repeated else folders["pi0"])
    calls = calls_of(policy)

    def held(count: int) -> tuple[int, int, int]:
        for call in itertools.islice(calls, count):
            call()
        assert calls_of is _repeated or len(policy.pipelines) == SHAPES, "all of them are kept"
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), _resident()

    (allocated, reserved, resident), after = held(200), held(10_000)
    assert after[0] <= allocated and after[1] <= reserved
    # The latency log holds 10,000 samples of a few hundred bytes.
    assert after[2] - resident < 64 * 2**20


def _held() -> int:
    """What torch holds of the GPU for this process, pools of graphs too, once it keeps nothing unused."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_eviction_frees_device_memory() -> None:
    model = on_gpu(random_model(Pi0, SMALL["pi05"]))
    shapes = [padded(batch, views, 32, 2) for batch in (1, 4) for views in (1, 2, 3)]
    feeds = {shape: feed_of(model, shape, seed) for seed, shape in enumerate(shapes)}
    gc.collect()
    before = torch.cuda.memory_allocated()
    roomy = pipelines_of(model, NATIVE)
    want = {shape: run(roomy, shape, feeds[shape]) for shape in shapes}
    assert len(roomy) == len(shapes) and roomy.bytes > 0
    budget = max(size for _, size in roomy._kept.values()) / 2**30
    store = roomy.plan.store
    assert isinstance(store, Pi0Store)
    del roomy
    gc.collect()
    # cuBLAS keeps a workspace (32 MiB on Hopper) for each stream that it ever ran on: one of them is fair.
    assert torch.cuda.memory_allocated() - before - prepared_bytes(store) < 40 * 2**20

    tight = pipelines_of(model, replace(NATIVE, pipeline_memory_gib=budget), store)
    for shape in shapes:
        np.testing.assert_array_equal(run(tight, shape, feeds[shape]), want[shape])
        assert tight.bytes <= tight.budget or len(tight) == 1
    assert len(tight) < len(shapes)
    gc.collect()
    allocated, held = torch.cuda.memory_allocated(), _held()
    graphs: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(3):
        for shape in shapes:
            np.testing.assert_array_equal(run(tight, shape, feeds[shape]), want[shape])
            graphs.update(pipeline.captured.graph for pipeline, _ in tight._kept.values() if pipeline.captured)
    gc.collect()
    assert torch.cuda.memory_allocated() <= allocated
    # Graphs and their pools, too.
    assert _held() - held < 64 * 2**20
    assert len(graphs) == len(tight), "graphs of pipelines that are gone"


def test_fp8_weights_take_half_the_memory() -> None:
    """Of every product but q/k/v, which stays BF16: of the whole prefix nearly, where the MLP is as wide as usual."""
    config = streamable("pi05", width=128, mlp=512, heads=4, depth=3)
    config = replace(config, prefix=replace(config.prefix, width=256, mlp_dim=4096))
    model = on_gpu(random_model(Pi0, config))
    with torch.inference_mode():
        wide = PrefixWeights.of(model, "bf16", None)
        narrow = PrefixWeights.of(model, "fp8", scales_of_any())

    def products(weights: PrefixWeights) -> list[Any]:
        return [p for block in weights.stack.blocks for p in (block.out, block.up, block.down)]

    pairs = list(zip(products(narrow), products(wide), strict=True))
    assert len(pairs) == 6
    for small, large in pairs:
        assert small.weight.dtype == torch.float8_e4m3fn
        assert small.bytes * 2 == large.bytes == large.weight.untyped_storage().nbytes()
        assert small.weight.untyped_storage().nbytes() == small.bytes
    assert wide.stack.bytes - narrow.stack.bytes == sum(small.bytes for small, _ in pairs)
    assert narrow.stack.bytes < 0.56 * wide.stack.bytes


@pytest.mark.parametrize(
    ("precision", "components"),
    [
        ("fp8", ("kv_cache",)), ("fp8", ("denoise",)), ("fp8", ("vision", "kv_cache", "denoise")),
        ("int8", ("denoise",)),  # the others would need calibrated ranges
    ],
)  # fmt: skip
def test_policies_of_one_byte_stay_close(
    precision: EnginePrecision, components: tuple[str, ...], folders: dict[str, Path]
) -> None:
    eager = load(folders["pi05"], EAGER)
    source = load(folders["pi05"], replace(EAGER, precision="bf16"))
    config = replace(NATIVE, **{c: EngineSpec("native", precision=precision) for c in components})
    narrow = OptimizedPolicy(replace(source.checkpoint, calibrated=scales_of_any()), config)
    observations, noise = [tiny_observation(i, PROMPTS[i % 3]) for i in range(4)], noise_for(eager, 4)
    found = cosines(actions_of(narrow, observations, noise), actions_of(eager, observations, noise))
    assert found.min() >= 0.99, found
    details = {c: narrow.ledger.entries[c].detail for c in ("vision", "kv_cache", "denoise")}
    assert {c for c, detail in details.items() if precision.upper() in detail} == set(components)


def test_the_store_counts_weights_once() -> None:
    model = on_gpu(random_model(Pi0, SMALL["pi05"]))
    pipelines = pipelines_of(model, NATIVE)
    store = pipelines.plan.store
    assert isinstance(store, Pi0Store)
    run(pipelines, padded(1, 2, 32, 2), feed_of(model, padded(1, 2, 32, 2), 0))
    before = prepared_bytes(store)
    assert before > 0
    run(pipelines, padded(2, 1, 32, 2), feed_of(model, padded(2, 1, 32, 2), 0))
    assert prepared_bytes(store) == before
    form = "streamed" if why_not_streamed(model, "bf16", 1) is None else "layers"
    assert dataclasses.is_dataclass(store.prepared["denoise", "bf16", form])
