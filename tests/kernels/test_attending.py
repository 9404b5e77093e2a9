"""The ways to attend, on the CPU: libraries against the reference, with masked keys that are NaN, shared key heads and
FP8 output; choosing by name and by time; what the ledger says. flash-attn is played by a module with its calls."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import kernel_calls as calls
from tests.support import kernel_cases as cases
from tests.support.gpus import H200, RTX_4090
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import Attention, load_config
from vla_accel.errors import ConfigError, DependencyError, EngineError
from vla_accel.kernels import reference
from vla_accel.kernels.attention import attending
from vla_accel.kernels.attention.attending import Choice, Sizes, attend, choose, own_kernel
from vla_accel.kernels.autotune import Fastest
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import Runtime

CPU = torch.device("cpu")
ON_CPU = Runtime.of(CPU)
ATTENTION = [name for name in cases.CASES if name.startswith(("attention", "self-attention"))]
SMALL = [name for name in ATTENTION if not any(size in name for size in ("1024", "544", "800"))]
SIZES = Sizes(2, 10, 10, 4, 1, 16, torch.float32, padded=True, quantised=False)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """flash-attn, played by the reference. Counts the calls."""
    calls = {"func": 0, "kvcache": 0}

    def func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls["func"] += 1
        return reference.attention(q, k, v, None)

    def kvcache(q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor) -> Tensor:
        calls["kvcache"] += 1
        assert cache_seqlens.dtype == torch.int32
        rows = [
            reference.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], None)
            for b, n in enumerate(cache_seqlens.tolist())
        ]
        return torch.cat(rows)

    module = ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_with_kvcache = func, kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.fixture
def no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)


def run(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's case, by a way: NaN where it must not look, margins checked."""
    call = cases.call_of(name, torch.float32)
    want = calls.outputs_of(call, CPU, kernel=False)
    with monkeypatch.context() as patched:
        patched.setattr(
            attending, "attention", lambda q, k, v, out, lengths, inverse_scale, last=False, **_: attend(
                way, q, k, v, out, lengths, inverse_scale=inverse_scale, last=last
            )
        )  # fmt: skip
        got = calls.outputs_of(call, CPU, kernel=True)
    for one, right in zip(got, want, strict=True):
        found = calls.difference(one, right)
        assert found.worst <= (0.13 if one.dtype == calls.FP8 else 1e-5) and found.mean <= 1e-4, found


@pytest.mark.parametrize("name", SMALL)
def test_sdpa_computes_what_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, "sdpa", monkeypatch)


@pytest.mark.parametrize("name", SMALL)
def test_flash_attn_is_asked_for_the_reference(
    name: str, flash: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = cases.call_of(name, torch.float32).arguments
    if arguments.get("last"):
        with pytest.raises(EngineError, match="it has no mask for a key that one query sees"):
            run(name, "flash_attn", monkeypatch)
        return
    run(name, "flash_attn", monkeypatch)
    padded = arguments["lengths"] is not None
    assert flash == {"func": int(not padded), "kvcache": int(padded)}


def test_a_missing_flash_attn_says_how_to_get_it(no_flash: None) -> None:
    with pytest.raises(DependencyError, match=r"attention flash_attn: .*pip install 'vla_accel\[flash\]'"):
        choose("flash_attn", SIZES, ON_CPU)


def test_a_flash_attn_without_its_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(DependencyError, match=r"flash-attn 2\.8 or newer"):
        choose("flash_attn", SIZES, ON_CPU)


def test_flash_attn_without_a_gpu_is_refused(flash: dict[str, int]) -> None:
    with pytest.raises(EngineError, match=r"expected bfloat16 or float16 on a GPU, got torch\.float32 on cpu"):
        choose("flash_attn", SIZES, ON_CPU)
    assert flash == {"func": 0, "kvcache": 0}


def test_a_way_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Tensor | None) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(attending, "_sdpa", broken)
    with pytest.raises(EngineError, match=r"attention sdpa: it cannot run .*head_dim=16.*No available kernel"):
        choose("sdpa", SIZES, ON_CPU)
    # Out of the race, and the ledger says so.
    choice = choose("fastest", SIZES, ON_CPU)
    assert choice.way == "own" and "sdpa out: attention sdpa: it cannot run" in choice.detail
    assert "nothing is measured on a CPU" in choice.detail


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(EngineError, match="expected auto, own, sdpa, flash_attn or fastest, got 'fast'"):
        choose("fast", SIZES, ON_CPU)


@pytest.mark.parametrize(("own", "sdpa", "way"), [(12.5, 11.0, "sdpa"), (9.25, 11.0, "own")])
def test_the_fastest_is_the_one_that_took_least(
    own: float, sdpa: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(ways: Any, runtime: Runtime, repeats: int) -> Fastest:
        assert list(ways) == ["own", "sdpa"] and runtime == ON_CPU and repeats == attending.CALLS
        for run in ways.values():
            run()
        return Fastest(way, {"own": own / 1e3, "sdpa": sdpa / 1e3}, {"some": "no kernel"})

    monkeypatch.setattr(attending, "fastest", measured)
    monkeypatch.setattr(attending.importlib.util, "find_spec", lambda _: None)
    choice = choose("fastest", SIZES, ON_CPU)
    assert choice.way == way
    assert choice.detail == (
        f"attention {way}, the fastest (own {own:.1f} µs; sdpa {sdpa:.1f} µs; flash_attn out: not installed; "
        "some out: no kernel)"
    )


@pytest.mark.parametrize(
    ("where", "kernel", "way"),
    [
        ("cuda:0", "CUDA C++", "own"),
        ("cuda:0", "Triton", "sdpa"),
        ("cpu", "Triton", "own"),
        ("cpu", "reference", "own"),
    ],
)
def test_auto_measures_where_the_own_kernel_is_tritons(
    where: str, kernel: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(what: str, ways: Any, runtime: Runtime, repeats: int) -> Fastest:
        assert str(SIZES) in what and list(ways)[:2] == ["own", "sdpa"] and str(runtime.device) == where
        return Fastest("sdpa", {"own": 2e-3, "sdpa": 1e-3})

    monkeypatch.setattr(attending, "remembered", measured)
    monkeypatch.setattr(attending, "own_kernel", lambda *_: (kernel, ""))
    monkeypatch.setattr(attending, "_trial", lambda *_: lambda: None)
    monkeypatch.setattr(attending, "_fastest_tile", lambda *_: None)
    runtime = Runtime(torch.device(where), H200, "cuda")
    assert choose("auto", SIZES, runtime).way == way
    assert choose("auto", SIZES, replace(runtime, deterministic=True)) == Choice("own", f"attention own ({kernel})")


PREFIX = Sizes(1, 544, 544, 8, 1, 256, torch.bfloat16, padded=True, quantised=False)


@pytest.mark.parametrize(
    ("gpu", "sizes", "reason"),
    [
        (H200, PREFIX, None),
        (RTX_4090, PREFIX, f"it needs compute capability 9.0, {RTX_4090.name} has 8.9"),
        (
            H200,
            replace(PREFIX, head_dim=128),
            "no kernel is made for 8 heads of 128, 1 key heads, 544 keys with lengths",
        ),
        (H200, replace(PREFIX, last=True), "it has no mask for a key that one query sees"),
        (H200, replace(PREFIX, dtype=torch.float32), "it takes BF16 or FP16 throughout"),
    ],
)
def test_the_ledger_says_which_limit_the_own_kernel_met(
    gpu: Gpu, sizes: Sizes, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that Triton's runs instead, whether it was asked for or measured."""
    monkeypatch.setattr(attending, "_trial", lambda *_: lambda: None)
    monkeypatch.setattr(attending, "remembered", lambda *_, **__: Fastest("own", {"own": 2e-3}, {}))
    runtime = Runtime(CPU, gpu, "cuda")
    said = choose("own", sizes, runtime).detail
    name, why = own_kernel(sizes, runtime)
    if reason is None:
        assert said == "attention own (CUDA C++)" and (name, why) == ("CUDA C++", "")
        return
    assert said.startswith("attention own (Triton; CUDA C++ out: ") and reason in said and name == "Triton"
    monkeypatch.setattr(attending, "own_kernel", lambda *_: (name, why))
    monkeypatch.setattr(attending, "_fastest_tile", lambda *_: None)
    measured = choose("auto", sizes, replace(runtime, device=torch.device("cuda:0"))).detail
    assert measured.startswith("attention own, the fastest (own 2.0 µs; ") and f"CUDA C++ out: {reason}" in measured


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_what_is_measured_is_laid_out_as_the_programs_are(padded: bool, quantised: bool) -> None:
    sizes = replace(SIZES, padded=padded, quantised=quantised, kv_heads=4)
    q, k, v, out, lengths = attending._tensors(sizes, CPU)
    assert q.shape == k.shape == v.shape == (2, 10, 4, 16) and out.shape == (2, 10, 64)
    assert (lengths is not None) == padded and (out.dtype == calls.FP8) == quantised
    assert not q.is_contiguous() and k.is_contiguous() == padded and k.stride() == v.stride()


# -- in a policy ------------------------------------------------------------------------------------------------------


def policy_config(attention: Attention) -> PolicyConfig:
    spec = EngineSpec("native", attention=attention)
    return PolicyConfig(num_steps=2, precision="fp32", device="cpu", vision=spec, kv_cache=spec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pi05")
    write_tiny_checkpoint(folder, "pi05")
    return folder


@pytest.mark.parametrize("attention", ["sdpa", "fastest"])
def test_a_policy_attends_as_it_is_told(folder: Path, attention: Attention) -> None:
    eager = OptimizedPolicy.from_pretrained(folder, PolicyConfig(num_steps=2, precision="fp32", device="cpu"))
    policy = OptimizedPolicy.from_pretrained(folder, policy_config(attention))
    noise = np.zeros((policy.model.config.action_horizon, policy.model.config.action_dim), np.float32)
    observation = tiny_observation(0, "pick up the bowl")
    result = policy.infer(observation, noise=noise)
    want = eager.infer(observation, noise=noise)["actions"]
    np.testing.assert_allclose(result["actions"], want, rtol=0, atol=2e-4)
    details = {e["component"]: e["detail"] for e in result["engines"]}
    for part in ("vision", "kv_cache"):
        assert ("attention sdpa" if attention == "sdpa" else ", the fastest (nothing is measured") in details[part]


def test_own_kernels_are_named(folder: Path) -> None:
    policy = OptimizedPolicy.from_pretrained(folder, policy_config("own"))
    assert all("attention own (reference)" in policy.ledger.entries[p].detail for p in ("vision", "kv_cache"))


def test_the_loop_has_no_choice(folder: Path) -> None:
    config = replace(policy_config("own"), denoise=EngineSpec("native", attention="sdpa"))
    with pytest.raises(EngineError, match=r"denoise: .*\(native: its attention has own kernels only, got sdpa"):
        OptimizedPolicy.from_pretrained(folder, config)


def test_configurations_name_the_attention() -> None:
    config = load_config({"kv_cache": {"engine": "native", "attention": "fastest"}})
    assert config.kv_cache == EngineSpec("native", attention="fastest") and config.vision.attention == "auto"
    EngineSpec("tensorrt", fallback=("native",), attention="sdpa")
    with pytest.raises(ConfigError, match=r"vision\.attention: .*native.*, got eager"):
        load_config({"vision": {"engine": "eager", "attention": "sdpa"}})
    with pytest.raises(ConfigError, match=r"vision\.attention: expected one of auto, own, sdpa, flash_attn, fastest"):
        load_config({"vision": {"engine": "native", "attention": "flash"}})
