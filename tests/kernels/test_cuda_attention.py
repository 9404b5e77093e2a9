"""The CUDA attention (`ops/cuda/attention/`) against what its kernels expect of it, without a GPU: which calls it
takes, structures, launches, tensor maps, shared memory, and that it compiles without spilling a register."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_kernels_compile import nvrtc_library
from tests.support.cubin import local_between, registers_of, stack_of
from tests.support.gpus import GPUS, H200
from tests.support.streamed_support import RecordedModule
from vla_accel.kernels import nvrtc
from vla_accel.kernels.attention.choice import random_tensors
from vla_accel.kernels.attention.config import AttentionShape
from vla_accel.kernels.attention.cuda import launch as hopper
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.tensor_map import TensorMap

CPU = torch.device("cpu")
SHARED_LIMIT, MULTIPROCESSOR = 227 * 1024, 228 * 1024
TOWER = AttentionShape(2, 256, 256, 16, 16, 72, torch.bfloat16, padded=False, quantised=False)
PREFIX = AttentionShape(1, 544, 544, 8, 1, 256, torch.bfloat16, padded=True, quantised=False)
__all__ = ["nvrtc_library"]


def takes(*arguments: Any) -> str:
    """The kernel that an H200 runs, "" for none."""
    return hopper.kernel_for(H200, *arguments) or ""


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        (TOWER, "whole"), (replace(TOWER, batch=3, quantised=True, dtype=torch.float16), "whole"),
        (replace(TOWER, head_dim=64), "whole"), (replace(TOWER, tokens=40, source=40), "whole"),
        (replace(TOWER, tokens=320, source=320), "whole"), (replace(TOWER, tokens=321, source=321), ""),
        (replace(TOWER, head_dim=56), ""),
        (replace(TOWER, head_dim=88), ""), (replace(TOWER, head_dim=76), ""), (replace(TOWER, padded=True), ""),
        (replace(TOWER, dtype=torch.float32), ""), (PREFIX, "shared_keys"),
        (replace(PREFIX, tokens=800, source=800, batch=4, quantised=True), "shared_keys"),
        (replace(PREFIX, padded=False), "shared_keys"), (replace(PREFIX, kv_heads=2), "shared_keys"),
        (replace(PREFIX, kv_heads=8), ""), (replace(PREFIX, heads=6), ""), (replace(PREFIX, head_dim=128), ""),
        (replace(PREFIX, dtype=torch.float32), ""),
    ],
)  # fmt: skip
def test_which_calls_are_taken(sizes: AttentionShape, kernel: str) -> None:
    q, k, v, out, lengths = random_tensors(sizes, CPU)
    assert takes(q, k, v, out, lengths) == kernel
    for name, gpu in GPUS.items():
        reason = hopper.why_not(gpu, q, k, v, out, lengths)
        if gpu.capability != (9, 0):
            assert reason == f"it needs compute capability 9.0, {gpu.name} has {gpu.version}", name
        assert (hopper.kernel_for(gpu, q, k, v, out, lengths) is None) == (reason is not None), name
    assert hopper.kernel_for(None, q, k, v, out, lengths) is None


def test_layouts_that_are_no_multiple_of_sixteen_bytes_are_not() -> None:
    q, k, v, out, lengths = random_tensors(PREFIX, CPU)
    room = torch.zeros(q.numel() * 2, dtype=q.dtype)
    assert takes(room[: 544 * 2048].view(1, 544, 8, 256), k, v, out, lengths) == "shared_keys"
    assert takes(room[4 : 4 + 544 * 2048].view(1, 544, 8, 256), k, v, out, lengths) == ""
    odd = room.as_strided((1, 544, 8, 256), (0, 2052, 256, 1))
    assert takes(odd, k, v, out, lengths) == ""
    assert takes(q.transpose(2, 3)[..., :8], k, v, out, lengths) == ""
    assert takes(q, k, v.transpose(1, 3).contiguous().transpose(1, 3), out, lengths) == ""
    assert takes(q, k, v.half(), out, lengths) == ""
    assert takes(q, k, v, out.float(), lengths) == ""
    assert takes(q, k, v, torch.empty(out.numel() + 1, dtype=out.dtype)[1:].view(out.shape), lengths) == ""


# -- what is handed to the kernels ------------------------------------------------------------------------------------


def launched(
    sizes: AttentionShape, monkeypatch: pytest.MonkeyPatch, early: bool = False
) -> tuple[tuple[Any, ...], list[tuple[Any, ...]], tuple[Tensor | None, ...], RecordedModule]:
    """The launch, the tensor maps, the tensors and the module."""
    modules: list[RecordedModule] = []
    maps: list[tuple[Any, ...]] = []

    def load(*arguments: Any) -> RecordedModule:
        modules.append(RecordedModule(*arguments))
        return modules[-1]

    def encode(x: Tensor, box: tuple[int, ...], promotion: int) -> TensorMap:
        maps.append((x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), box))
        assert promotion == 128
        return TensorMap.from_buffer_copy(bytes([len(maps)]) * 128)

    monkeypatch.setattr(nvrtc, "load_module", load)
    monkeypatch.setattr(hopper, "tensor_map", encode)
    hopper._module.cache_clear()
    q, k, v, out, lengths = random_tensors(sizes, CPU)
    scale = 200.0 if sizes.quantised else None
    whole = hopper.kernel_for(H200, q, k, v, out, lengths) == "whole"
    with Chain(H200, early).resumed():
        if whole:
            hopper.whole(q, k, v, out, scale)
        else:
            hopper.shared_keys(q, k, v, out, lengths, scale, H200)
    hopper._module.cache_clear()
    (module,) = modules
    (launch,) = module.launches
    return launch, maps, (q, k, v, out, lengths), module


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("tokens", "tiles"), [(262, 5), (256, 4), (200, 4), (65, 2), (64, 1)])
def test_a_tower_s_launch(tokens: int, tiles: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(TOWER, tokens=tokens, source=tokens, quantised=early)
    (name, blocks, threads, (boxes, call), cluster, dependent), maps, tensors, module = launched(
        sizes, monkeypatch, early
    )
    q, k, v, out, _ = tensors
    assert q is not None and k is not None and v is not None and out is not None
    assert (name, blocks, threads, cluster, dependent) == ("whole", 2 * 16 * tiles, 256, 1, early)
    assert (call.q, call.k, call.v, call.out.data) == tuple(x.data_ptr() for x in (q, k, v, out))
    assert (call.q_batch, call.q_token, call.q_head) == (tokens * 48 * 72, 48 * 72, 72)
    assert (call.k_batch, call.k_token, call.k_head) == (tokens * 48 * 72, 48 * 72, 72)
    assert (call.tokens, call.tiles, call.heads) == (tokens, tiles, 16)
    assert call.scale == pytest.approx(72**-0.5 / 0.6931471805599453) and call.out.inverse_scale == (
        200 if early else 1
    )
    assert bytes(boxes) == b"\1" * 128 + b"\2" * 128 + b"\3" * 128
    strides = (tokens * 48 * 72, 48 * 72, 72, 1)
    # Each box brings half of the keys: it has at most 256 rows.
    keys = -(-tokens // 64) * 32
    boxed = [(1, 64, 1, 64), (1, keys, 1, 64), (1, keys, 1, 64)]
    assert maps == [
        (x.data_ptr(), torch.bfloat16, (2, tokens, 16, 72), strides, box)
        for x, box in zip((q, k, v), boxed, strict=True)
    ]
    assert f"#define S {tokens}\n" in module.source and f"#define QUANT {int(early)}\n" in module.source


@pytest.mark.parametrize(
    ("batch", "tokens", "kv_heads", "tiles", "splits"),
    [(1, 544, 1, 34, 3), (1, 800, 1, 50, 2), (2, 544, 1, 34, 1), (3, 10, 1, 1, 3), (1, 545, 2, 18, 3)],
)
def test_a_prefix_s_launch(
    batch: int, tokens: int, kv_heads: int, tiles: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = replace(PREFIX, batch=batch, tokens=tokens, source=tokens, kv_heads=kv_heads, dtype=torch.float16)
    (name, blocks, threads, (boxes, call), cluster, dependent), maps, tensors, module = launched(sizes, monkeypatch)
    q, k, v, out, lengths = tensors
    assert q is not None and k is not None and v is not None and out is not None and lengths is not None
    # Two warpgroups that multiply, one that fetches.
    assert (name, blocks, threads, dependent) == ("shared_keys", batch * kv_heads * tiles * splits, 384, False)
    assert cluster == call.splits == splits
    assert (call.lengths, call.out.data) == (lengths.data_ptr(), out.data_ptr())
    assert (call.tokens, call.tiles, call.source) == (tokens, tiles, tokens)
    # Two tiles of 64 rows a block.
    assert (tiles - 1) * 128 < tokens * (8 // kv_heads) <= tiles * 128
    assert bytes(boxes) == b"".join(bytes([i]) * 128 for i in range(1, 6))
    group = 8 // kv_heads
    # A tile is a few tokens times all heads of a group.
    assert maps[0][2:] == ((batch, tokens, 8, 256), q.stride(), (1, 64 // group, group, 64))
    assert [m[4] for m in maps[1:]] == [(1, 64, 1, 64), (1, 16, 1, 64)] * 2
    assert [m[0] for m in maps[1:]] == [k.data_ptr()] * 2 + [v.data_ptr()] * 2
    assert "#define HALF 1\n" in module.source and f"#define GROUP {group}\n" in module.source


def test_no_lengths_are_a_null_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, _, _, (_, call), *_), *_ = launched(replace(PREFIX, padded=False), monkeypatch)
    assert call.lengths is None


@pytest.mark.parametrize("multiprocessors", [78, 114, 132])
def test_all_clusters_run_at_once(multiprocessors: int) -> None:
    gpu = replace(H200, multiprocessors=multiprocessors)
    counts = [hopper.splits_of(blocks, gpu) for blocks in range(1, 200)]
    assert counts[0] == hopper.MAX_SPLITS and counts[-1] == 1 and counts == sorted(counts, reverse=True)
    # Of a group of 16 multiprocessors a cluster of three leaves one over.
    rooms = {1: 10**9, 2: 8 * (multiprocessors // 16), 3: 5 * (multiprocessors // 16)}
    for blocks, splits in enumerate(counts, 1):
        assert blocks <= rooms[splits] and (splits == hopper.MAX_SPLITS or blocks > rooms[splits + 1])


# -- the source -------------------------------------------------------------------------------------------------------


SOURCES = {
    "tower": ("whole", torch.bfloat16, False, {"D": 72, "S": 256}),
    "tower fp8": ("whole", torch.bfloat16, True, {"D": 72, "S": 256}),
    "tower fp16": ("whole", torch.float16, False, {"D": 72, "S": 256}),
    "64": ("whole", torch.bfloat16, False, {"D": 64, "S": 16}),
    "320 keys": ("whole", torch.bfloat16, False, {"D": 64, "S": 262}),
    "320 keys fp8": ("whole", torch.bfloat16, True, {"D": 64, "S": 320}),
    "320 keys of 72": ("whole", torch.bfloat16, False, {"D": 72, "S": 320}),
    "80": ("whole", torch.bfloat16, True, {"D": 80, "S": 200}),
    "prefix": ("shared_keys", torch.bfloat16, False, {"D": 256, "GROUP": 8, "KV": 1}),
    "prefix fp8": ("shared_keys", torch.bfloat16, True, {"D": 256, "GROUP": 4, "KV": 2}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "64" else pytest.mark.slow) for n in SOURCES])
def test_a_kernel_compiles_and_fits(name: str, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, dtype, quantised, sizes = SOURCES[name]
    source, shared = hopper.plan(kernel, dtype, quantised, **sizes)
    assert shared <= SHARED_LIMIT
    if kernel == "whole" and (sizes["D"] == 64 or (sizes["D"] == 72 and sizes["S"] <= 256)):
        # Three views are more blocks than multiprocessors: two must fit one.
        assert 2 * (shared + 1024) <= MULTIPROCESSOR
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    code = nvrtc.compile_source(source, hopper.ARCHITECTURE)
    assert b".text." + kernel.encode() + b"\0" in code
    assert stack_of(code) == {0} and max(registers_of(code)) <= 255


@pytest.mark.parametrize("between", [True, False])
def test_a_stack_is_seen(between: bool, nvrtc_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whether it is used between products, for which exponentials stand here."""
    pytest.importorskip("triton", reason="NOT RUN: needs triton: pip install 'triton>=3.6' (Linux)")
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc_library)
    first, last = ("__expf(f[0])", "__expf(x)") if between else ("f[0]", "__expf(__expf(x))")
    fill = "float a[64]; for (int i = 0; i < 64; ++i) a[i * n & 63] = f[i];"
    body = f"{fill} a[f[64] > 0] = {first}; float x = a[n + 1 & 63]; f[0] = {last};"
    code = nvrtc.compile_source(f'extern "C" __global__ void g(float* f, int n) {{ {body} }}', hopper.ARCHITECTURE)
    assert max(stack_of(code)) >= 256 and 8 <= max(registers_of(code)) <= 64
    assert local_between(code, "MUFU.EX2") == between
