"""Attention of many queries in CUDA C++ (`whole.cu`, `shared_keys.cu`): which shapes it takes, its source, launches.

For Hopper. Where `kernel_for` names none, the Triton kernel runs; results are the same up to rounding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from vla_accel.numeric import round_up
from vla_accel.ops.chain import launch_cuda
from vla_accel.ops.cuda import runtime
from vla_accel.ops.cuda.wgmma import wgmma
from vla_accel.ops.gpu import Gpu

ARCHITECTURE = "sm_90a"
LOG2E = 1.4426950408889634
SLOTS = 5
MAX_SPLITS = 3
_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}

Kernel = Literal["whole", "shared_keys"]


class _Output(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("inverse_scale", ctypes.c_float)]


class _Whole(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "qkv"),
        *((name, ctypes.c_uint64) for name in ("q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head")),
        ("out", _Output),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads")),
    ]


class _SharedKeys(ctypes.Structure):
    _fields_ = [
        ("lengths", ctypes.c_void_p),
        ("out", _Output),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "source", "splits")),
    ]


def kernel_for(gpu: Gpu | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None) -> Kernel | None:
    """The kernel that runs this call on a GPU, None where neither does. Arguments as `ops.attending` has them."""
    if gpu is None or why_not(gpu, q, k, v, out, lengths) is not None:
        return None
    return "whole" if _fits_whole(q, k, lengths) else "shared_keys"


def why_not(gpu: Gpu, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None) -> str | None:
    """Why neither kernel takes this call on a GPU; None where one does."""
    if gpu.architecture != ARCHITECTURE:
        return f"it needs compute capability 9.0, {gpu.name} has {gpu.version}"
    if q.dtype not in _KINDS or not q.dtype == k.dtype == v.dtype or out.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"it takes BF16 or FP16 throughout, and FP8 out, got {q.dtype}, {k.dtype}, {v.dtype} and {out.dtype}"
    # Sixteen bytes at a time, from every row of every head.
    strides = (*q.stride()[:3], *k.stride()[:3])
    if k.stride() != v.stride() or any(stride % 8 for stride in strides):
        return "its keys and values lie alike, and rows of heads are multiples of 16 bytes apart"
    if any(x.data_ptr() % 16 or x.stride(-1) != 1 for x in (q, k, v, out)):
        return "its tensors begin at multiples of 16 bytes, and a head's values lie side by side"
    if not _fits_whole(q, k, lengths) and not _fits_shared_keys(q, k):
        sizes = f"{q.shape[2]} heads of {q.shape[3]}, {k.shape[2]} key heads, {k.shape[1]} keys"
        return f"no kernel is made for {sizes}{'' if lengths is None else ' with lengths'}"
    return None


def _fits_whole(q: Tensor, k: Tensor, lengths: Tensor | None) -> bool:
    return lengths is None and q.shape[2] == k.shape[2] and q.shape[3] in (64, 72, 80) and k.shape[1] <= 256


def _fits_shared_keys(q: Tensor, k: Tensor) -> bool:
    group = q.shape[2] // k.shape[2]
    return group > 1 and 64 % group == 0 and q.shape[3] == 256


def attention(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, *, gpu: Gpu,
    inverse_scale: float | None,
) -> None:  # fmt: skip
    """Launch the kernel that `kernel_for` named."""
    if kernel == "whole":
        whole(q, k, v, out, inverse_scale)
    else:
        shared_keys(q, k, v, out, lengths, inverse_scale, gpu=gpu)


def whole(q: Tensor, k: Tensor, v: Tensor, out: Tensor, inverse_scale: float | None) -> None:
    """All keys at once: no lengths, as many key heads as query heads, a small head, at most 256 keys."""
    batch, tokens, heads, head_dim = q.shape
    source = k.shape[1]
    tiles = -(-tokens // 64)
    call = _Whole(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), *q.stride()[:3], *k.stride()[:3],
        _Output(out.data_ptr(), inverse_scale or 1.0), head_dim**-0.5 * LOG2E, tokens, tiles, heads,
    )  # fmt: skip
    module = _module("whole", q.dtype, inverse_scale is not None, q.device, D=head_dim, S=source)
    boxes = (_map(q, (64, 1, 64, 1)), *(_map(x, (64, 1, round_up(source, 64), 1)) for x in (k, v)))
    launch_cuda(module, "whole", batch * heads * tiles, 256, (_bytes(boxes), call))


def shared_keys(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, inverse_scale: float | None, *, gpu: Gpu,
) -> None:  # fmt: skip
    """Several query heads a key head, a head of 256, any number of keys."""
    batch, tokens, heads, head_dim = q.shape
    source, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    tiles = -(-tokens * group // 128)
    blocks = batch * kv_heads * tiles
    splits = splits_of(blocks, gpu)
    boxes = (_map(q, (64, group, 64 // group, 1)), *(_map(x, (64, 1, rows, 1)) for x in (k, v) for rows in (64, 16)))
    call = _SharedKeys(
        lengths.data_ptr() if lengths is not None else None, _Output(out.data_ptr(), inverse_scale or 1.0),
        head_dim**-0.5 * LOG2E, tokens, tiles, source, splits,
    )  # fmt: skip
    sizes = {"D": head_dim, "GROUP": group, "KV": kv_heads}
    module = _module("shared_keys", q.dtype, inverse_scale is not None, q.device, **sizes)
    launch_cuda(module, "shared_keys", blocks * splits, 384, (_bytes(boxes), call), cluster=splits)


def splits_of(blocks: int, gpu: Gpu) -> int:
    """Blocks of a cluster, which share the keys that each of `blocks` would read alone: as many as run all at once."""
    fitting = (n for n in range(MAX_SPLITS, 1, -1) if blocks <= gpu.clusters_at_once(n))
    return next(fitting, 1)


def _bytes(parts: Iterable[bytes]) -> ctypes.Array[ctypes.c_ubyte]:
    """Arguments of a kernel as they lie in memory."""
    joined = b"".join(parts)
    return (ctypes.c_ubyte * len(joined)).from_buffer_copy(joined)


@functools.cache
def _module(kernel: str, dtype: torch.dtype, quantised: bool, device: torch.device, **sizes: int) -> runtime.Module:
    source, shared = plan(kernel, dtype, quantised, **sizes)
    return runtime.load_module(source, {kernel: shared}, ARCHITECTURE, device)


def plan(kernel: str, dtype: torch.dtype, quantised: bool, **sizes: int) -> tuple[str, int]:
    """Source of a kernel for these sizes, and the bytes of shared memory that it takes."""
    head_dim = sizes["D"]
    macros = {"QUANT": int(quantised), "HALF": int(dtype == torch.float16), **sizes}
    if kernel == "whole":
        keys, chunks = round_up(sizes["S"], 64), head_dim // 8
        # Swizzled rows of 128 bytes, what is left of them, two barriers, both halves' exchange and statistics.
        shared = 128 * (64 + 2 * keys) + 16 * (2 * 64 + 4 * keys) + 16 + 16 * 128 * chunks + 16 * 256
        products = {"qk": keys // 2, "pv": 64, **({"pv_rest": head_dim - 64} if head_dim > 64 else {})}
    else:
        macros |= {"SLOTS": SLOTS, "MAX_SPLITS": MAX_SPLITS}
        # Two tiles of queries, keys and values; barriers of both tiles, of full and empty slots, and of eight warps.
        shared = (2 + SLOTS) * head_dim * 128 + (2 + 2 * SLOTS + 8) * 8
        products = {"qk": 64, "pv": head_dim}
    return _source(kernel, macros, products, dtype), shared


def _source(kernel: str, macros: dict[str, int], products: dict[str, int], dtype: torch.dtype) -> str:
    """`products`: columns of each. QKᵀ finds k in a row of shared memory; the weights of PV are in registers."""
    wrapped = (
        wgmma(f"wgmma_{name}", n, _KINDS[dtype], registers=name != "qk", transposed=name != "qk")
        for name, n in products.items()
    )
    return runtime.source_of(macros, "attention/common", f"attention/{kernel}", generated="".join(wrapped))


def _map(x: Tensor, box: tuple[int, int, int, int]) -> bytes:
    """A tensor map of x (B, N, heads, d) for boxes of (d, heads, N, B), swizzled in 128 bytes, zeros outside of x."""
    return _encode(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), box)


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    raw = (ctypes.c_ubyte * 192)()
    at = round_up(ctypes.addressof(raw), 64)
    dims = (ctypes.c_uint64 * 4)(*reversed(shape))
    pitches = (ctypes.c_uint64 * 3)(*(2 * stride for stride in reversed(strides[:3])))
    boxes, ones = (ctypes.c_uint32 * 4)(*box), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    kind = {torch.float16: 6, torch.bfloat16: 9}[dtype]  # CUtensorMapDataType
    # No interleaving, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, zeros outside.
    runtime.check_driver(
        runtime.driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), kind, 4, ctypes.c_void_p(address), dims, pitches, boxes, ones, 0, 3, 2, 0
        ),
        f"tensor map of {shape}",
    )  # fmt: skip
    return ctypes.string_at(at, 128)
