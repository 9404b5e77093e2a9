"""The attention backends on the CPU: libraries against the reference, with masked keys that are NaN, shared key heads
and FP8 output; the choice by name and by time; the ledger's text. A module of the test plays flash-attn."""

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
from tests.support.gpus import GPUS, H200, RTX_4090
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import Attention, load_config
from vla_accel.errors import ConfigError, DependencyError, EngineError
from vla_accel.kernels import reference
from vla_accel.kernels.attention import choice, ops
from vla_accel.kernels.attention.choice import Choice, OwnKernel, choose, own_kernel, random_tensors
from vla_accel.kernels.attention.config import AttentionShape, FlashTile, causal_tiles, flash_tiles
from vla_accel.kernels.attention.ops import attend
from vla_accel.kernels.autotune import Fastest
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import Runtime

CPU = torch.device("cpu")
ON_CPU, ON_GPU = Runtime.of(CPU), Runtime(torch.device("cuda:0"), H200, "cuda")
ATTENTION = [name for name in cases.CASES if name.startswith(("attention", "self-attention"))]
SMALL = [name for name in ATTENTION if not any(size in name for size in ("1024", "544", "800"))]
SHAPE = AttentionShape(2, 10, 10, 4, 1, 16, torch.float32, padded=True, quantised=False)
PREFIX = AttentionShape(1, 544, 544, 8, 1, 256, torch.bfloat16, padded=True, quantised=False)


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


def run(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a kernel's case by a backend: NaN where it must not look, margins checked."""
    call = cases.call_of(name, torch.float32)
    want = calls.outputs_of(call, CPU, kernel=False)
    with monkeypatch.context() as patch:
        patch.setattr(
            ops, "attention", lambda q, k, v, out, lengths, inverse_scale, last=False, **_: attend(
                backend, q, k, v, out, lengths, inverse_scale=inverse_scale, last=last
            )
        )  # fmt: skip
        got = calls.outputs_of(call, CPU, kernel=True)
    for one, right in zip(got, want, strict=True):
        found = calls.difference(one, right)
        assert found.worst <= (0.13 if one.dtype == calls.FP8 else 1e-5) and found.mean <= 1e-4, found


@pytest.mark.parametrize("name", SMALL)
def test_libraries_compute_what_the_reference_does(
    name: str, flash: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(name, "sdpa", monkeypatch)
    arguments = cases.call_of(name, torch.float32).arguments
    if arguments.get("last"):
        with pytest.raises(EngineError, match=r"flash_attn: .*a key that one query sees"):
            run(name, "flash_attn", monkeypatch)
        return
    run(name, "flash_attn", monkeypatch)
    padded = arguments["lengths"] is not None
    assert flash == {"func": int(not padded), "kvcache": int(padded)}


@pytest.mark.parametrize("module", [None, ModuleType("flash_attn")])
def test_a_missing_or_old_flash_attn_is_an_error(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    with pytest.raises(DependencyError, match=r"flash-attn 2\.8 or newer: pip install 'vla_accel\[flash\]'"):
        choose("flash_attn", SHAPE, ON_CPU)


def test_flash_attn_needs_a_gpu(flash: dict[str, int]) -> None:
    with pytest.raises(EngineError, match=r"expected bfloat16 or float16 on a GPU, got torch\.float32 on cpu"):
        choose("flash_attn", SHAPE, ON_CPU)
    assert flash == {"func": 0, "kvcache": 0}


def test_a_backend_that_cannot_run_is_an_error_or_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Tensor | None) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(ops, "_sdpa", broken)
    with pytest.raises(EngineError, match=r"attention sdpa: it cannot run .*head_dim=16.*No available kernel"):
        choose("sdpa", SHAPE, ON_CPU)
    found = choose("fastest", SHAPE, ON_CPU)
    assert found.backend == "own" and "sdpa out: attention sdpa: it cannot run" in found.detail
    with pytest.raises(EngineError, match="expected auto, own, sdpa, flash_attn or fastest, got 'fast'"):
        choose("fast", SHAPE, ON_CPU)


@pytest.mark.parametrize(("own", "sdpa", "fastest"), [(12.5, 11.0, "sdpa"), (9.25, 11.0, "own")])
def test_the_ledger_has_the_times_of_all_backends(
    own: float, sdpa: float, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(candidates: Any, runtime: Runtime, repeats: int) -> Fastest:
        assert list(candidates) == ["own", "sdpa"] and runtime == ON_CPU and repeats == choice.CALLS
        for call in candidates.values():
            call()
        return Fastest(fastest, {"own": own / 1e3, "sdpa": sdpa / 1e3}, {"some": "no kernel"})

    monkeypatch.setattr(choice, "fastest", measured)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda _: None)
    found = choose("fastest", SHAPE, ON_CPU)
    assert found.backend == fastest and f"{fastest}, the fastest" in found.detail
    for part in (f"own {own:.1f} µs", f"sdpa {sdpa:.1f} µs", "flash_attn out: not installed", "some out: no kernel"):
        assert part in found.detail


@pytest.mark.parametrize(
    ("runtime", "kernel", "backend"),
    [(ON_GPU, "CUDA C++", "own"), (ON_GPU, "Triton", "sdpa"), (ON_CPU, "Triton", "own"), (ON_CPU, "reference", "own")],
)
def test_auto_measures_if_the_own_kernel_is_tritons(
    runtime: Runtime, kernel: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(what: str, candidates: Any, where: Runtime, repeats: int) -> Fastest:
        assert str(SHAPE) in what and list(candidates)[:2] == ["own", "sdpa"] and where == runtime
        return Fastest("sdpa", {"own": 2e-3, "sdpa": 1e-3})

    monkeypatch.setattr(choice, "remembered", measured)
    monkeypatch.setattr(choice, "own_kernel", lambda *_: OwnKernel(kernel))
    monkeypatch.setattr(choice, "_trial", lambda *_: lambda: None)
    monkeypatch.setattr(choice, "_fastest_tile", lambda *_: None)
    assert choose("auto", SHAPE, runtime).backend == backend
    assert choose("auto", SHAPE, replace(runtime, deterministic=True)) == Choice("own", f"attention own ({kernel})")


@pytest.mark.parametrize(
    ("gpu", "shape", "reason"),
    [
        (H200, PREFIX, None),
        (RTX_4090, PREFIX, "compute capability 9.0"),
        (H200, replace(PREFIX, head_dim=128), "8 heads of 128, 1 key heads, 544 keys with lengths"),
        (H200, replace(PREFIX, last=True), "a key that one query sees"),
        (H200, replace(PREFIX, dtype=torch.float32), "BF16 or FP16"),
    ],
)
def test_the_ledger_says_why_cuda_cpp_does_not_run(
    gpu: Gpu, shape: AttentionShape, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Triton's kernel was requested or measured."""
    runtime = Runtime(CPU, gpu, "cuda")
    kernel, detail = own_kernel(shape, runtime), choose("own", shape, runtime).detail
    if reason is None:
        assert detail == "attention own (CUDA C++)" and kernel == OwnKernel("CUDA C++")
        return
    assert kernel.name == "Triton" and reason in str(kernel.why_not_cuda)
    monkeypatch.setattr(choice, "_trial", lambda *_: lambda: None)
    monkeypatch.setattr(choice, "remembered", lambda *_, **__: Fastest("own", {"own": 2e-3}, {}))
    monkeypatch.setattr(choice, "own_kernel", lambda *_: kernel)
    monkeypatch.setattr(choice, "_fastest_tile", lambda *_: None)
    measured = choose("auto", shape, replace(runtime, device=torch.device("cuda:0"))).detail
    assert all(f"CUDA C++ out: {kernel.why_not_cuda}" in text for text in (detail, measured))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_measured_tensors_are_laid_out_as_the_programs_are(padded: bool, quantised: bool) -> None:
    shape = replace(SHAPE, padded=padded, quantised=quantised, kv_heads=4)
    q, k, v, out, lengths = random_tensors(shape, CPU)
    assert q.shape == k.shape == v.shape == (2, 10, 4, 16) and out.shape == (2, 10, 64)
    assert (lengths is not None) == padded and (out.dtype == calls.FP8) == quantised
    assert not q.is_contiguous() and k.is_contiguous() == padded and k.stride() == v.stride()


# -- tile configs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_flash_tiles_fit_the_problem_and_the_gpu(name: str) -> None:
    gpu = GPUS[name]
    for tokens, source, head_dim, count in ((544, 544, 256, 4), (1024, 1024, 64, 5), (70, 64, 72, 3), (10, 17, 64, 1)):
        shape = replace(SHAPE, tokens=tokens, source=source, head_dim=head_dim)
        found = flash_tiles(gpu, shape)
        assert found[0] == FlashTile.default(gpu, tokens, source, head_dim) and len(found) == count
        # Tensor cores take 16 queries a warp at least.
        assert all(16 * tile.warps <= tile.queries and tile.keys <= source for tile in found[1:]), found
    little = gpu.shared_per_block < 128 << 10
    assert FlashTile.default(gpu, 544, 544, 256).stages == (2 if little else 3)
    # Fewer keys at once where they would leave no registers or do not fit (`test_kernels_compile.py` compiles them).
    keys = {head_dim: FlashTile.default(gpu, 256, 256, head_dim).keys for head_dim in (64, 72, 256)}
    assert keys == {64: 128, 72: 64 if little or name in ("B200", "Thor") else 128, 256: 32}


def test_the_fastest_tile_is_used_whichever_backend_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(1, 40, 40, 2, 1, 16, torch.float32, padded=True, quantised=False)
    used: list[FlashTile | None] = []
    best = flash_tiles(H200, shape)[-1]

    def measured(what: str, candidates: dict, runtime: Runtime, repeats: int) -> Fastest:
        for call in candidates.values():
            call()
        return Fastest(str(best) if what.startswith("tile of") else "own", {"own": 2e-3})

    monkeypatch.setattr(choice, "own_kernel", lambda *_: OwnKernel("Triton"))
    monkeypatch.setattr(choice, "remembered", measured)
    monkeypatch.setattr(ops, "attention", lambda *_, tile, **__: used.append(tile))
    monkeypatch.setattr(choice, "random_tensors", lambda shape, _: random_tensors(shape, CPU))
    monkeypatch.setattr(choice, "_trial", lambda *_: lambda: None)
    own, auto = (choose(requested, shape, ON_GPU) for requested in ("own", "auto"))
    assert own.tile == auto.tile == best and set(used) == set(flash_tiles(H200, shape))
    assert f"Triton {best}" in own.detail and f"own: {best}" in auto.detail


# -- in a policy ------------------------------------------------------------------------------------------------------


def policy_config(attention: Attention) -> PolicyConfig:
    spec = EngineSpec("native", attention=attention)
    return PolicyConfig(num_steps=2, precision="fp32", device="cpu", vision=spec, kv_cache=spec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pi05")
    write_tiny_checkpoint(folder, "pi05")
    return folder


@pytest.mark.parametrize(
    ("attention", "text"),
    [("sdpa", "attention sdpa"), ("fastest", ", the fastest (nothing"), ("own", "attention own (reference)")],
)
def test_a_policy_uses_the_requested_attention(folder: Path, attention: Attention, text: str) -> None:
    policy = OptimizedPolicy.from_pretrained(folder, policy_config(attention))
    assert all(text in policy.ledger.entries[part].detail for part in ("vision", "kv_cache"))
    if attention == "own":
        return
    eager = OptimizedPolicy.from_pretrained(folder, PolicyConfig(num_steps=2, precision="fp32", device="cpu"))
    noise = np.zeros((policy.model.config.action_horizon, policy.model.config.action_dim), np.float32)
    observation = tiny_observation(0, "pick up the bowl")
    got, want = (p.infer(observation, noise=noise)["actions"] for p in (policy, eager))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_the_loop_has_no_choice(folder: Path) -> None:
    config = replace(policy_config("own"), denoise=EngineSpec("native", attention="sdpa"))
    with pytest.raises(EngineError, match=r"denoise: .*attention: expected auto or own.*, got sdpa"):
        OptimizedPolicy.from_pretrained(folder, config)


def test_configurations_name_the_attention() -> None:
    config = load_config({"kv_cache": {"engine": "native", "attention": "fastest"}})
    assert config.kv_cache == EngineSpec("native", attention="fastest") and config.vision.attention == "auto"
    EngineSpec("tensorrt", fallback=("native",), attention="sdpa")
    with pytest.raises(ConfigError, match=r"vision\.attention: .*native.*, got eager"):
        load_config({"vision": {"engine": "eager", "attention": "sdpa"}})
    with pytest.raises(ConfigError, match=r"vision\.attention: expected one of auto, own, sdpa, flash_attn, fastest"):
        load_config({"vision": {"engine": "native", "attention": "flash"}})


def test_causal_attention_has_more_tiles_on_hopper() -> None:
    default, few = FlashTile(64, 64, 4, 2), FlashTile(16, 64, 4, 2)
    found = causal_tiles(H200, 490, 128)
    assert found[0] == default and len({str(tile) for tile in found}) == len(found) > 3
    for gpu in (None, RTX_4090):
        assert causal_tiles(gpu, 490, 128) == [default]
    assert causal_tiles(H200, 20, 128) == [few] and causal_tiles(H200, 490, 256) == [default]
    assert choice.fastest_causal_tile(SHAPE, None, ON_CPU) is None


@pytest.mark.parametrize("padded", [False, True])
def test_causal_tiles_are_measured_with_padding_if_the_program_has_it(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def measured(what: str, candidates: Any, runtime: Runtime, repeats: int) -> Fastest:
        for call in candidates.values():
            call()
        return Fastest(next(iter(candidates)), {})

    monkeypatch.setattr(choice, "remembered", measured)
    monkeypatch.setattr(choice, "random_tensors", lambda shape, _: random_tensors(shape, CPU))
    monkeypatch.setattr(choice, "causal_attention", lambda q, k, v, out, starts, together, **_: seen.append(starts))
    assert choice.fastest_causal_tile(replace(SHAPE, padded=padded), None, ON_GPU) is not None
    assert seen and all((starts is not None) == padded for starts in seen)
