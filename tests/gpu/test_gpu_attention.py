"""Attention on a GPU: the CUDA kernels and the libraries' against the reference, dependent launches, and the choice
among them in a policy. Written for an H200: other GPUs run the Triton kernel, which test_gpu_kernels.py covers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import kernel_calls as calls
from tests.support import kernel_shapes as shapes
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import Attention
from vla_accel.errors import EngineError
from vla_accel.fp8 import E4M3
from vla_accel.kernels import reference
from vla_accel.kernels.attention import cuda as hopper
from vla_accel.kernels.attention import ops
from vla_accel.kernels.attention.choice import choose, random_tensors
from vla_accel.kernels.attention.config import AttentionShape
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import Runtime

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOWER = AttentionShape(2, 256, 256, 16, 16, 72, torch.bfloat16, padded=False, quantised=False)
XVLA = replace(TOWER, batch=1, tokens=262, source=262, head_dim=64)
PREFIX = AttentionShape(1, 544, 544, 8, 1, 256, torch.bfloat16, padded=True, quantised=False)
# Clusters of three blocks, of two, and none.
PREFIXES = [PREFIX, replace(PREFIX, tokens=800, source=800), replace(PREFIX, batch=2)]
NAMES = [n for n in shapes.WIDE if n.startswith(("attention", "self-attention"))]


def hopper_only() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("NOT RUN: needs compute capability 9.0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_what_its_reference_does(name: str, dtype: torch.dtype) -> None:
    call = shapes.call_of(name, dtype)
    if dtype == torch.float16 and not name.endswith("fp8=False"):
        pytest.skip("FP16 has one case a shape")
    for early in (False, True):
        calls.check(call, calls.outputs_of(call, GPU, kernel=True, early=early), 0.02, 0.003, 0.006)


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        (TOWER, "whole"), (replace(TOWER, batch=3, quantised=True), "whole"), (PREFIX, "shared_keys"),
        (replace(PREFIX, tokens=800, source=800), "shared_keys"), (replace(PREFIX, dtype=torch.float32), ""),
        (replace(TOWER, source=300, tokens=300), "whole"),
        (replace(TOWER, source=321, tokens=321), ""), (replace(TOWER, head_dim=36), ""),
        (replace(TOWER, head_dim=128), ""),
        (replace(PREFIX, heads=6), ""), (replace(PREFIX, kv_heads=8), ""), (replace(TOWER, padded=True), ""),
    ],
)  # fmt: skip
def test_the_full_size_models_shapes_have_kernels_of_their_own(sizes: AttentionShape, kernel: str) -> None:
    hopper_only()
    assert (hopper.kernel_for(Gpu.of(GPU), *random_tensors(sizes, GPU)) or "") == kernel


def chain(given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], results: Tensor) -> None:
    """Each attention asks with what the last one put out: a launch that did not wait would show."""
    q, k, v, _, lengths = given
    source = q
    for result in results:
        ops.attention(source, k, v, result, lengths)
        source = result.view(q.shape)


def flash_only() -> None:
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("NOT RUN: needs flash-attn: pip install 'vla_accel[flash]'")


@pytest.mark.parametrize("sizes", [TOWER, replace(TOWER, batch=3), XVLA, *PREFIXES])
def test_dependent_launches_wait_for_what_they_read(sizes: AttentionShape) -> None:
    with torch.inference_mode():
        given = random_tensors(sizes, GPU)
        want, got = (given[3].new_full((6, *given[3].shape), float("nan")) for _ in range(2))
        chain(given, want)
        assert torch.isfinite(want).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), Chain(Gpu.of(GPU)):
            chain(given, got)
        for _ in range(20):
            got.fill_(float("nan"))
            graph.replay()
            assert torch.equal(got, want)


@pytest.mark.parametrize("sizes", PREFIXES)
def test_lengths_are_read_when_the_kernel_runs(sizes: AttentionShape) -> None:
    """One graph serves every prompt of its bucket."""
    q, k, v, out, lengths = random_tensors(sizes, GPU)
    assert lengths is not None
    ops.attention(q, k, v, out, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attention(q, k, v, out, lengths)
    for length in (544, 532, 273, 272, 17, 16, 1):
        lengths.fill_(length)
        graph.replay()
        want = reference.attention(q.float(), k[:, :length].float(), v[:, :length].float(), None).flatten(2)
        found = calls.difference(out, want)
        assert found.worst <= 0.02 and found.mean <= 0.003, (length, found)


# -- the ways ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["sdpa", "flash_attn"])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    "shape", [TOWER, PREFIX, replace(PREFIX, batch=2), replace(TOWER, head_dim=64, heads=4, kv_heads=4)]
)
def test_a_library_agrees(way: str, quantised: bool, shape: AttentionShape) -> None:
    if way == "flash_attn":
        flash_only()
    sizes = replace(shape, quantised=quantised)
    q, k, v, out, lengths = random_tensors(sizes, GPU)
    if lengths is not None:
        lengths.copy_(torch.tensor([301, 544][: sizes.batch]))
        beyond = (torch.arange(sizes.source, device=GPU) >= lengths[:, None])[:, :, None, None]
        k, v = (x.masked_fill(beyond, float("nan")) for x in (k, v))
    scale = 200.0 if quantised else None
    ops.attend(way, q, k, v, out, lengths, inverse_scale=scale)
    host = [x if x is None else x.cpu() for x in (q, k, v, lengths)]
    want = torch.empty(out.shape, dtype=E4M3.dtype if quantised else torch.float32)
    wide = [x.float().nan_to_num(0.0) for x in host[:3] if x is not None]
    ops.attention(wide[0], wide[1], wide[2], want, host[3], inverse_scale=scale)
    found = calls.difference(out, want)
    assert found.worst <= (0.13 if quantised else 0.02) and found.mean <= (0.006 if quantised else 0.003), found


@pytest.mark.parametrize("sizes", [TOWER, PREFIX])
def test_the_fastest_is_measured(sizes: AttentionShape) -> None:
    choice = choose("fastest", sizes, Runtime.of(GPU))
    assert choice.backend in ops.BACKENDS and f"attention {choice.backend}, the fastest (own " in choice.detail
    assert choice.detail.count("µs") >= 2
    if torch.cuda.get_device_capability() == (9, 0):
        assert choice.backend == "own" and "(CUDA C++)" in choose("own", sizes, Runtime.of(GPU)).detail


def test_a_shape_that_a_library_cannot_do_is_refused() -> None:
    with pytest.raises(EngineError, match=r"attention sdpa: it cannot run .*torch.float64"):
        choose("sdpa", replace(TOWER, dtype=torch.float64), Runtime.of(GPU))


@pytest.mark.parametrize("attention", ["sdpa", "flash_attn", "fastest"])
def test_a_policy_attends_as_it_is_told(attention: Attention) -> None:
    if attention == "flash_attn":
        flash_only()

    def policy(way: Attention) -> OptimizedPolicy:
        spec = EngineSpec("native", attention=way)
        config = PolicyConfig(num_steps=3, device="cuda", vision=spec, kv_cache=spec, denoise=EngineSpec("native"))
        return OptimizedPolicy.from_pretrained("demo", config)

    own, other = policy("own"), policy(attention)
    config = own.model.config
    noise = np.random.default_rng(0).standard_normal((config.action_horizon, config.action_dim)).astype(np.float32)
    observation = own.processor.example()
    want, result = (p.infer(observation, noise=noise) for p in (own, other))
    a, b = want["actions"].ravel(), result["actions"].ravel()
    assert float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) > 0.9995
    details = {e["component"]: e["detail"] for e in result["engines"]}
    for part in ("vision", "kv_cache"):
        assert (", the fastest (own " if attention == "fastest" else f"attention {attention}") in details[part]
    assert result["engines"] and "graph" in str(result["engines"])
