"""The native programs against the eager engines, on the CPU: the same folding, buffers and wiring that a GPU runs, with
the fused ops' torch references. What the kernels compute is tested in test_kernels.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpus import H200
from tests.support.tiny import Kind, tiny_config, tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.component import Component
from vla_accel.config import load_config
from vla_accel.engines.native import NativeEngine
from vla_accel.errors import EngineError
from vla_accel.kernels.gpu import Gpu
from vla_accel.nn import plan
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.padding import padded_prompt
from vla_accel.nn.siglip import SiglipConfig
from vla_accel.runtime import Runtime, current

FP32 = PolicyConfig(num_steps=3, precision="fp32", device="cpu")
EAGER = FP32.with_specs(dict.fromkeys(("vision", "kv_cache", "denoise"), EngineSpec("eager")))
CPU = torch.device("cpu")
NATIVE = replace(EAGER, vision=EngineSpec("native"), kv_cache=EngineSpec("native"), denoise=EngineSpec("native"))
# What programs write before they read.
SCRATCH = ("patches", "embedded", "x", "y", "h", "h_mlp", "qkv", "last_kv", "context", "hidden", "active", "last")
SCRATCH = (*SCRATCH, "q", "k", "v")
PROMPTS = ("pick up the bowl", "pick up the black bowl on the plate and place it on the stove")


@pytest.fixture(scope="module", params=["pi05", "pi0"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    write_tiny_checkpoint(folder, kind)
    return folder


def noise(policy: OptimizedPolicy, batch: int) -> np.ndarray:
    config = policy.model.config
    rng = np.random.default_rng(batch)
    return rng.standard_normal((batch, config.action_horizon, config.action_dim)).astype(np.float32)


@pytest.mark.parametrize("component", ["vision", "kv_cache", "denoise", "all"])
@pytest.mark.parametrize("batch", [1, 2])
def test_native_agrees_with_eager(folder: Path, component: str, batch: int) -> None:
    config = NATIVE if component == "all" else replace(EAGER, **{component: EngineSpec("native")})
    eager, native = (OptimizedPolicy.from_pretrained(folder, c) for c in (EAGER, config))
    observations = [tiny_observation(seed, PROMPTS[seed % 2]) for seed in range(batch)]
    start = noise(eager, batch)
    want = [r["actions"] for r in eager.infer_batch(observations, noise=start)]
    results = native.infer_batch(observations, noise=start)
    np.testing.assert_allclose([r["actions"] for r in results], want, rtol=0, atol=2e-4)
    used = {e["component"]: e["used"] for e in results[0]["engines"]}
    assert used == {c: "native" if component in (c, "all") else "eager" for c in used}
    assert all(e["used"] == "eager" or "no GPU" in str(e["detail"]) for e in results[0]["engines"])


@pytest.mark.parametrize("batch", [1, 2])
def test_norms_inside_the_products_agree_with_eager(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does where all products are own kernels, deep enough that every product follows every other."""
    vision = SiglipConfig(width=128, depth=3, mlp_dim=80, heads=2, image_size=28, patch_size=14)
    prefix = GemmaConfig(width=192, depth=4, mlp_dim=96, heads=4, kv_heads=2, head_dim=6)
    write_tiny_checkpoint(
        tmp_path, "pi05", vision=vision, prefix=prefix, expert=replace(tiny_config("pi05").expert, depth=4)
    )
    monkeypatch.setattr(plan, "is_inside", lambda *_: True)
    eager, native = (OptimizedPolicy.from_pretrained(tmp_path, c) for c in (EAGER, NATIVE))
    observations = [tiny_observation(seed, PROMPTS[seed % 2]) for seed in range(batch)]
    start = noise(eager, batch)
    for order in (1, -1):  # twice: what a call leaves behind must not matter to the next
        want = [r["actions"] for r in eager.infer_batch(observations[::order], noise=start)]
        results = native.infer_batch(observations[::order], noise=start)
        np.testing.assert_allclose([r["actions"] for r in results], want, rtol=0, atol=2e-4)
    details = {e["component"]: str(e["detail"]) for e in results[0]["engines"]}
    assert all("norms inside" in details[part] for part in ("vision", "kv_cache"))


def test_one_pipeline_serves_a_bucket_of_prompts(folder: Path) -> None:
    native, eager = OptimizedPolicy.from_pretrained(folder, NATIVE), OptimizedPolicy.from_pretrained(folder, EAGER)
    start = noise(native, 1)[0]
    lengths = set()
    for prompt in (*PROMPTS, "bowl", *PROMPTS):
        observation = tiny_observation(0, prompt)
        lengths.add(len(native.processor.prepare(observation).tokens))
        want = eager.infer(observation, noise=start)["actions"]
        np.testing.assert_allclose(native.infer(observation, noise=start)["actions"], want, rtol=0, atol=2e-4)
    buckets = {padded_prompt(n) for n in lengths}
    possible = {padded_prompt(n) for n in range(1, native.model.config.max_token_len + 1)}
    assert len(lengths) == 3 and buckets <= possible and len(native.pipelines) == len(possible) < len(lengths)


def test_stale_buffers_do_not_leak_into_a_call(folder: Path) -> None:
    native = OptimizedPolicy.from_pretrained(folder, NATIVE)
    observation, start = tiny_observation(0, PROMPTS[0]), noise(native, 1)[0]
    want = native.infer(observation, noise=start)["actions"]
    poisoned = 0
    with torch.inference_mode():
        for pipeline, _ in native.pipelines._kept.values():
            for _, engine in pipeline.engines:
                program = engine.program  # type: ignore[attr-defined]
                holders = [vars(getattr(program, part, program)) for part in ("", "loop", "stack")]
                scratch = [h[name] for h in holders for name in SCRATCH if name in h]
                for buffer in (*engine.inputs.values(), *engine.outputs.values(), *scratch):
                    buffer.fill_(float("nan") if buffer.is_floating_point() else 1)
                    poisoned += 1
    assert poisoned > 30
    np.testing.assert_array_equal(native.infer(observation, noise=start)["actions"], want)


@pytest.mark.parametrize(
    ("component", "low", "precision", "parts"),
    [
        ("kv_cache", "fp8", "bf16", ("FP8 needs calibrated scales",)),
        ("kv_cache", "fp8", "fp32", ("fp32 policy has fp32", "got fp8")),
        ("denoise", "fp16", "fp32", ("fp32 policy has fp32", "got fp16", "bf16")),
    ],
)
def test_a_precision_that_a_component_lacks_is_named(
    folder: Path, component: str, low: Any, precision: Any, parts: tuple[str, ...]
) -> None:
    config = replace(NATIVE, precision=precision, **{component: EngineSpec("native", precision=low)})
    with pytest.raises(EngineError) as refused:
        OptimizedPolicy.from_pretrained(folder, config)
    assert all(part in str(refused.value) for part in (component, *parts))


def test_weights_are_prepared_once_for_all_shapes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = OptimizedPolicy.from_pretrained(folder, NATIVE)
    other = native.with_steps(5)
    other.infer(tiny_observation(0, PROMPTS[0]))
    assert other.store is native.store
    kept = [p for p, _ in (*native.pipelines._kept.values(), *other.pipelines._kept.values())]
    engines = [p.engine("denoise") for p in kept]
    programs = [e.program for e in engines if isinstance(e, NativeEngine)]
    assert len(programs) == 3, "two prompt buckets of one, and what the other was asked"
    assert len({id(program.weights) for program in programs}) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kernels", "backend", "named"),
    [("portable", "cuda", "portable kernels"), ("triton", "triton", "Triton's kernels only")],
)
def test_kernels_of_other_gpus_are_built_and_run_without_hopper_s(
    kernels: str, backend: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is built and runs with the runtime of a GPU that has no more than an Ada one."""
    found: list[tuple[Gpu | None, str]] = []

    def program(_: EngineSpec) -> Any:
        found.append((current(CPU).gpu, current(CPU).backend))

        def run(inputs: Any, outputs: Any) -> None:
            found.append((current(CPU).gpu, current(CPU).backend))

        run.detail = "a program"  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    component = Component("part", torch.nn.Identity(), (), (), native=program)
    config = load_config({"native": {"kernels": kernels}, "denoise": "native"})
    spec = config.specs(("vision", "denoise"))["denoise"]
    hopper = Runtime(CPU, H200, "cuda")
    with hopper.open():
        engine = NativeEngine(component, CPU, spec)
    engine.run()
    assert found == [(H200.portable, backend)] * 2 and not H200.portable.dependent_launch
    assert engine.detail.endswith(f", {named} (as on compute capability 8.9)")
    with hopper.open():
        plain = NativeEngine(component, CPU, EngineSpec("native"))
    assert found[2] == (H200, "cuda") and named not in plain.detail
