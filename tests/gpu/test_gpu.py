"""The native engine on a GPU: kernels against references, policies against eager float32, and what may go wrong
between calls: poisoned buffers, changed shapes, threads, memory. Written for an H200: FP8 and the streamed loop
need a Hopper."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import kernel_cases as cases
from tests.support.agreement import assert_as_near, assert_mostly_as_near
from tests.support.scales import scales_of_any
from tests.support.streamed_support import LOOPS, LoopCase, streamable
from tests.support.tiny import TOKENIZER, statistics, tiny_config, tiny_observation
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.checkpoint import save_checkpoint
from vla_accel.config import EnginePrecision, RtcConfig
from vla_accel.engines.auto import choose
from vla_accel.engines.native import NativeEngine
from vla_accel.errors import EngineError
from vla_accel.families.pi0 import PI0, PI05
from vla_accel.families.prompted import PromptShape
from vla_accel.fp8 import E4M3
from vla_accel.ledger import Ledger
from vla_accel.models.memory import Counted
from vla_accel.models.pi0 import Pi0, Pi0Config
from vla_accel.models.random_weights import random_model
from vla_accel.native.constants import step_tables
from vla_accel.native.expert import ExpertWeights, _LayerLoop, sizes_of, why_not_streamed
from vla_accel.native.loop import LoopProgram
from vla_accel.native.pi0 import Pi0Store
from vla_accel.native.prefix import PrefixWeights
from vla_accel.ops.cuda.denoise import StepTables, StreamedLoop, why_not
from vla_accel.ops.gpu import Gpu
from vla_accel.policy.pipeline import Feed, Pipelines, Plan

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16_COSINE = 0.9995
PARTS = ("vision", "kv_cache", "denoise")
NATIVE = PolicyConfig(num_steps=3, device=DEVICE).with_specs(dict.fromkeys(PARTS, EngineSpec("native")))
EAGER = PolicyConfig(num_steps=3, device=DEVICE, precision="fp32").with_specs(dict.fromkeys(PARTS, EngineSpec("eager")))
PROMPTS = ("pick up the bowl", "pick up the black bowl on the plate and place it on the stove", "place it")
NAN = float("nan")
# What programs write before they read.
SCRATCH = (
    "patches", "embedded", "x", "y", "h", "h_mlp", "qkv", "last_kv", "context", "hidden", "active", "last", "gate_up",
    "q", "k", "v", "state_token",
)  # fmt: skip


# -- support ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Pi0Config] = {
    # The first two run the streamed loop, the others the Triton loop.
    "pi05": streamable("pi05", width=128, mlp=512, heads=4),
    "pi0": streamable("pi0", width=128, mlp=512, heads=4, kv_heads=2),
    "pi05 awkward": streamable("pi05", width=72, mlp=200, heads=3, head_dim=40, horizon=7),
    "pi0 awkward": streamable("pi0", width=136, mlp=264, heads=6, kv_heads=3, head_dim=72, horizon=50),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with random weights, by name."""
    made = {}
    for name, config in SMALL.items():
        folder = made[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        config = replace(config, vocab_size=TOKENIZER.vocab_size)
        save_checkpoint(random_model(Pi0, config).state_dict(), config, folder)
        TOKENIZER.save(folder / "tokenizer.json")
        (folder / "norm_stats.json").write_text(_statistics_text())
    return made


def _statistics_text() -> str:
    import json

    return json.dumps({"norm_stats": statistics()})


@pytest.fixture(scope="module", params=["pi05", "pi0"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="module")
def demo() -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained("demo", NATIVE)


def load(path: Path | str, config: PolicyConfig = NATIVE) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(path, config)


def demo_observation(policy: OptimizedPolicy, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    one = policy.processor.example()
    for key, value in one.items():
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:
            one[key] = rng.integers(0, 256, value.shape, dtype=np.uint8)
    return one


def noise_for(policy: OptimizedPolicy, batch: int, seed: int = 0) -> np.ndarray:
    config = policy.model.config
    shape = (batch, config.action_horizon, config.action_dim)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def actions_of(
    policy: OptimizedPolicy, observations: list[dict[str, Any]], noise: np.ndarray, **options: Any
) -> np.ndarray:
    """Robot actions without what the normalisation adds, which would flatter the cosine."""
    results = policy.infer_batch(observations, noise=noise, **options)
    processor = policy.processor
    offsets = [processor.finish(np.zeros_like(noise[0]), processor.prepare(o)) for o in observations]
    return np.stack([r["actions"] - o for r, o in zip(results, offsets, strict=True)])


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By the first axis."""
    x, y = a.reshape(len(a), -1).astype(np.float64), b.reshape(len(b), -1).astype(np.float64)
    return (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)


def used(policy: OptimizedPolicy) -> dict[str, str]:
    return {name: entry.used for name, entry in policy.ledger.entries.items()}


def on_gpu(model: Pi0) -> Pi0:
    return model.to(DEVICE).to_compute_dtype(torch.bfloat16)


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.CASES)
def test_a_kernel_computes_what_its_reference_does(name: str) -> None:
    call = cases.call_of(name, torch.bfloat16)
    device = torch.device(DEVICE)
    for pdl in (False, True) if call.op in cases.TAKES_PDL else (False,):
        repeat = 3 if call.op == "suffix_attention" else 1
        got = cases.outputs_of(call, device, kernel=True, pdl=pdl, repeat=repeat)
        cases.check(call, got, 0.02, 0.003, 0.006)


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 64, 128), (17, 1152, 4352), (51, 4352, 1152), (100, 256, 48)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("what", ["plain", "bias", "gelu"])
def test_a_product_of_cublas(rows: int, k: int, n: int, fp8: bool, what: str) -> None:
    if fp8 and what == "gelu":
        pytest.skip("FP8 has its GELU in a kernel of its own")
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(n, k, generator=generator) / k**0.5, torch.randn(n, generator=generator)
    x = torch.randn(rows, k, generator=generator).bfloat16()
    from vla_accel.ops import linear as ops

    def layer(device: str) -> ops.Linear:
        return ops.make_linear(
            weight.to(device), None if what == "plain" else bias.to(device), torch.bfloat16, 6.0 if fp8 else None
        )

    host = layer("cpu")
    if fp8:
        x = (x.float() * (host.inverse_scale or 1.0)).clamp(-448, 448).to(E4M3.dtype)
    want, got = torch.full((rows, n), NAN), torch.full((rows, n), NAN, dtype=torch.bfloat16, device=DEVICE)
    ops.linear(x, host, want, gelu=what == "gelu")
    with torch.inference_mode():
        ops.linear(x.to(DEVICE), layer(DEVICE), got, gelu=what == "gelu")
    found = cases.difference(got, want)
    assert found.worst <= 0.03 and found.mean <= 0.004, found


def test_the_patch_product_is_exact_to_float32() -> None:
    from vla_accel.ops import linear as ops

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (37, 1184), generator=generator).bfloat16()
    weight = torch.randn(72, 1184, generator=generator).bfloat16()
    got = torch.full((37, 72), NAN, device=DEVICE)
    ops.patch_product(rows.to(DEVICE), weight.to(DEVICE), got)
    want = (rows.double() @ weight.double().T).float()
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=float(want.abs().max()) * 1e-5)


# -- policies against eager float32 -----------------------------------------------------------------------------------


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
    save_checkpoint(random_model(Pi0, config).state_dict(), config, tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    (tmp_path / "norm_stats.json").write_text(_statistics_text())
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


# -- shapes that change -----------------------------------------------------------------------------------------------


def padded(batch: int, views: int, tokens: int, steps: int) -> PromptShape:
    return PromptShape(batch=batch, steps=steps, views=views, tokens=tokens, padded=True)


def feed_of(model: Pi0, shape: PromptShape, seed: int) -> Feed:
    """Random inputs of a shape; rows differ in length."""
    rng, config = np.random.default_rng(seed), model.config
    size, images = config.vision.image_size, shape.views * config.vision.tokens
    return Feed(
        {
            "images": list(rng.integers(0, 256, (shape.batch, shape.views, size, size, 3), dtype=np.uint8)),
            "tokens": list(rng.integers(0, config.vocab_size, (shape.batch, shape.tokens))),
            "lengths": (images + rng.integers(1, shape.tokens + 1, shape.batch)).astype(np.int32),
            "state": list(rng.standard_normal((shape.batch, config.action_dim)).astype(np.float32)),
        },
        noise=rng.standard_normal((shape.batch, config.action_horizon, config.action_dim)).astype(np.float32),
    )


def pipelines_of(model: Pi0, config: PolicyConfig, store: Pi0Store | None = None) -> Pipelines:
    family = {"pi0": PI0, "pi05": PI05}[model.config.kind]
    device = torch.device(DEVICE)
    choices = choose(config.specs(PARTS), device, model.dtype)
    return Pipelines(Plan(family, model, config, choices, store or Pi0Store(model), device, Ledger()))


def run(pipelines: Pipelines, shape: PromptShape, feed: Feed) -> np.ndarray:
    with torch.inference_mode():
        pipeline = pipelines.get(shape)
        pipeline.feed(feed, torch.Generator(DEVICE))
        return pipeline.run()[0].copy()


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


# -- poison -----------------------------------------------------------------------------------------------------------


def scratch_of(program: Any) -> Iterator[Tensor]:
    """What a program writes before it reads. Not the padding of values, which must stay zero, nor the counters."""
    for holder in (program, getattr(program, "loop", program)):
        for name in SCRATCH:
            buffer = vars(holder).get(name)
            if isinstance(buffer, Tensor):
                yield buffer
    loop = getattr(program, "loop", None)
    if isinstance(loop, _LayerLoop):
        for kind, taken in loop.cuts.taken.items():
            yield from taken.workspace[: 2 if kind == "attention" else 1] if taken.workspace is not None else ()
    elif isinstance(loop, StreamedLoop):
        tokens = loop._buffers["q"].shape[0] // loop._buffers["vts"].shape[0]
        for name, buffer in loop._buffers.items():
            yield buffer[..., :tokens] if name == "vts" else buffer
        if loop.values_t is not None:
            yield loop.values_t[..., : loop.prefix_tokens]


@pytest.mark.parametrize("name", SMALL)
def test_stale_buffers_do_not_leak_into_a_call(name: str, folders: dict[str, Path]) -> None:
    native = load(folders[name])
    observations, noise = [tiny_observation(i, PROMPTS[i]) for i in range(2)], noise_for(native, 2)
    want = [r["actions"] for r in native.infer_batch(observations, noise=noise)]
    poison(native)
    for _ in range(2):
        got = [r["actions"] for r in native.infer_batch(observations, noise=noise)]
        np.testing.assert_array_equal(got, want)


def poison(policy: OptimizedPolicy) -> None:
    """NaN into every buffer of every shape that a call must have written before it reads."""
    poisoned = 0
    with torch.inference_mode():
        for pipeline, _ in policy.pipelines._kept.values():
            assert pipeline._noise is not None
            buffers: list[Tensor] = [pipeline._answer, pipeline._noise]
            for _, engine in pipeline.engines:
                buffers += [*engine.inputs.values(), *engine.outputs.values(), *scratch_of(engine.program)]  # type: ignore[attr-defined]
            for buffer in buffers:
                if buffer.dtype == torch.float8_e4m3fn:
                    buffer.view(torch.uint8).fill_(0x7F)
                else:
                    buffer.fill_(NAN if buffer.is_floating_point() else 1)
                poisoned += 1
    assert poisoned > 30


# -- real-time chunking -----------------------------------------------------------------------------------------------


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
        with pytest.raises(EngineError, match="non-finite"):
            broken.infer(tiny_observation(0))
    assert np.isfinite(load(folders["pi05"]).infer(tiny_observation(0))["actions"]).all()


# -- memory -----------------------------------------------------------------------------------------------------------


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_ten_thousand_calls_take_no_more_memory(demo: OptimizedPolicy) -> None:
    observations = itertools.cycle([demo_observation(demo, seed) for seed in range(16)])
    for _ in range(200):
        demo.infer(next(observations))
    torch.cuda.synchronize()
    gc.collect()
    allocated, reserved, resident = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), _resident()
    for _ in range(10_000):
        demo.infer(next(observations))
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= allocated
    assert torch.cuda.memory_reserved() <= reserved
    # The latency log holds 10,000 samples of a few hundred bytes.
    assert _resident() - resident < 64 * 2**20


def prepared_bytes(store: Any) -> int:
    """Bytes of what a store has prepared."""
    return Counted("cuda").add(itertools.chain(*store.tensors().values()))


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
        return [p for layer in weights.layers[:-1] for p in (layer.o, layer.gate_up, layer.down)]

    pairs = list(zip(products(narrow), products(wide), strict=True))
    assert len(pairs) == 6
    for small, large in pairs:
        assert small.weight.dtype == torch.float8_e4m3fn
        assert small.bytes * 2 == large.bytes == large.weight.untyped_storage().nbytes()
        assert small.weight.untyped_storage().nbytes() == small.bytes
    assert wide.bytes - narrow.bytes == sum(small.bytes for small, _ in pairs)
    assert narrow.bytes < 0.56 * wide.bytes


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


# -- capture and threads ----------------------------------------------------------------------------------------------


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
        EngineError, match="strict mode: call: asked for engine cuda_graph, using stream: out of memory"
    ):
        load(folder, replace(NATIVE, strict=True))
    monkeypatch.undo()
    assert used(load(folder))["call"] == "cuda_graph"


def test_without_a_graph_the_results_are_the_same(folder: Path) -> None:
    with_graph, without = load(folder), load(folder, replace(NATIVE, cuda_graph=False))
    noise = noise_for(with_graph, 1)[0]
    for seed in range(3):
        observation = tiny_observation(seed, PROMPTS[seed])
        a, b = (p.infer(observation, noise=noise)["actions"] for p in (with_graph, without))
        assert cosines(a[None], b[None]).min() > 0.99999
    assert "call" not in used(without)


@pytest.mark.parametrize("graph", [True, False])
def test_a_first_step_beside_the_prefix_changes_no_bit(
    graph: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do calls in a row, whose steps would meet the next call's prefix."""
    config = replace(NATIVE, cuda_graph=graph, num_steps=2)
    beside = load(folder, config)
    monkeypatch.setattr(LoopProgram, "follow", lambda *_: "")
    behind = load(folder, config)
    said = beside.ledger.entries["denoise"].detail
    streamed = said.startswith("streamed") and "apart" not in said
    assert ("the first step beside the prefix" in said) == streamed
    assert "beside the prefix" not in behind.ledger.entries["denoise"].detail
    for seed in range(20):
        observation, noise = tiny_observation(seed, PROMPTS[seed % 3]), noise_for(beside, 1, seed)[0]
        a, b = (p.infer(observation, noise=noise)["actions"] for p in (beside, behind))
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


# -- timings ----------------------------------------------------------------------------------------------------------


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


# -- the streamed loop ------------------------------------------------------------------------------------------------

BATCHED = {
    f"{name} x {batch}": replace(LOOPS[name], batch=batch) for name in ("demo", "grouped") for batch in (2, 3, 4)
} | {"full x 4": replace(LOOPS["full"], batch=4)}


def loops_inputs(case: LoopCase) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """keys, values, lengths and guidance, the state's token and the noise, on the CPU. Beyond a row's length there is
    rubbish."""
    config, generator = case.config, torch.Generator().manual_seed(case.batch)
    expert = config.expert
    cache = (expert.depth, case.batch, case.prefix_tokens, expert.kv_heads, expert.head_dim)
    keys, values = (torch.randn(cache, generator=generator).bfloat16() for _ in range(2))
    lengths = torch.tensor([max(1, case.prefix_tokens - 7 * b) for b in range(case.batch)], dtype=torch.int32)
    beyond = (torch.arange(case.prefix_tokens) >= lengths[:, None])[None, :, :, None, None]
    keys, values = keys.masked_fill(beyond, 1e3), values.masked_fill(beyond, -1e3)
    state = torch.randn(case.batch, expert.width, generator=generator) if config.kind == "pi0" else None
    noise = torch.randn(case.batch, config.action_horizon, config.action_dim, generator=generator)
    target, weights = torch.randn(noise.shape, generator=generator), torch.rand(noise.shape[:2], generator=generator)
    weights[:, -1] = 0
    given = {"keys": keys, "values": values, "lengths": lengths, "target": target, "weights": weights}
    return given, state, noise


def loop_of(case: LoopCase, weights: ExpertWeights, tables: StepTables) -> StreamedLoop:
    gpu, mix_bias = Gpu.of(torch.device(DEVICE)), None if weights.mix is None else weights.mix_bias
    assert gpu is not None and weights.packed is not None
    return StreamedLoop(
        gpu, sizes_of(case.config), weights.packed, tables, weights.w_out, weights.b_out, mix_bias, case.batch,
        case.prefix_tokens,
    )  # fmt: skip


def run_loop(loop: Any, inputs: dict[str, Tensor], state: Tensor | None, noise: Tensor, device: str) -> np.ndarray:
    placed = {name: value.to(device) for name, value in inputs.items()}
    actions = noise.to(device, copy=True)
    with torch.inference_mode():
        loop.run(placed, None if state is None else state.to(device), actions)
    return actions.cpu().numpy()


@pytest.mark.parametrize("name", LOOPS | BATCHED)
def test_the_streamed_loop_agrees_with_the_triton_loop(name: str) -> None:
    case = (LOOPS | BATCHED)[name]
    config, device = case.config, torch.device(DEVICE)
    why = why_not(Gpu.of(device), sizes_of(config), case.batch, case.precision)
    if why is not None:
        assert why.startswith("it needs compute capability 9.0")
        pytest.skip(f"NOT RUN: {why}")
    model = random_model(Pi0, config)
    inputs, state, noise = loops_inputs(case)
    sizes = (case.batch, case.prefix_tokens)
    with torch.inference_mode():
        exact = ExpertWeights.of(model, "fp32")
        tables = step_tables(model, exact.normed_products(), case.steps)
        reference = _LayerLoop(exact, config, tables, *sizes)
        want = run_loop(
            reference, {n: v.float() if n != "lengths" else v for n, v in inputs.items()}, state, noise, "cpu"
        )
        weights = ExpertWeights.of(on_gpu(model), case.precision)
        tables = step_tables(model, weights.normed_products(), case.steps)
        layered = _LayerLoop(weights, config, tables, *sizes)
        streamed = loop_of(case, ExpertWeights.of(model, case.precision, streamed=True), tables)
    triton_actions = run_loop(layered, inputs, state, noise, DEVICE)
    first = run_loop(streamed, inputs, state, noise, DEVICE)
    assert np.isfinite(first).all()
    # Without what both start from, which would flatter the cosine.
    start = noise.numpy()
    of_triton = cosines(triton_actions - start, want - start).min()
    if case.precision == "bf16":
        assert of_triton >= BF16_COSINE
    # The same weights, rounded to INT8, are as far from float32 in either loop.
    assert cosines(first - start, want - start).min() >= min(BF16_COSINE, of_triton - 1e-4)
    assert cosines(first - start, triton_actions - start).min() >= BF16_COSINE
    # Buffers hold the last run's values now.
    for _ in range(3):
        np.testing.assert_array_equal(run_loop(streamed, inputs, state, noise, DEVICE), first)


@pytest.mark.parametrize("name", LOOPS | BATCHED)
def test_nan_behind_the_length_changes_no_bit(name: str) -> None:
    """Another engine may have made the prefix, whose padding then holds anything."""
    case = (LOOPS | BATCHED)[name]
    if why_not(Gpu.of(torch.device(DEVICE)), sizes_of(case.config), case.batch, case.precision):
        pytest.skip("NOT RUN: needs compute capability 9.0")
    inputs, state, noise = loops_inputs(case)
    inputs["lengths"] = (inputs["lengths"] - 13).clamp(min=1)
    beyond = (torch.arange(case.prefix_tokens) >= inputs["lengths"][:, None])[None, :, :, None, None]
    model = on_gpu(random_model(Pi0, case.config))
    with torch.inference_mode():
        weights = ExpertWeights.of(model, case.precision, streamed=True)
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
    if why_not(Gpu.of(torch.device(DEVICE)), sizes_of(case.config), case.batch, case.precision):
        pytest.skip("NOT RUN: needs compute capability 9.0")
    inputs, state, noise = loops_inputs(case)
    inputs["weights"].zero_()
    model = on_gpu(random_model(Pi0, case.config))
    with torch.inference_mode():
        weights = ExpertWeights.of(model, case.precision, streamed=True)
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
from vla_accel.ops.cuda import runtime
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
    assert done.returncode != 0 and "EngineError: cuda:0: a kernel ended itself" in done.stderr, done.stderr


def test_the_streamed_loop_sees_each_row_s_length() -> None:
    """Rubbish beyond the length changes nothing, a key before it does."""
    case = BATCHED["demo x 2"]
    model = on_gpu(random_model(Pi0, case.config))
    inputs, state, noise = loops_inputs(case)
    with torch.inference_mode():
        weights = ExpertWeights.of(model, "bf16", streamed=True)
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
