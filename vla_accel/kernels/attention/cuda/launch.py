"""Attention of many queries in CUDA C++ (`whole.cu`, `shared_keys.cu`): supported shapes, source, launches.

For Hopper. Triton's kernel runs if `kernel_for` returns None; results are equal up to rounding.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from vla_accel.kernels import nvrtc
from vla_accel.kernels.chain import launch_cuda
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.struct import block
from vla_accel.kernels.tensor_map import TensorMap, tensor_map
from vla_accel.kernels.wgmma import wgmma
from vla_accel.numeric import round_up

ARCHITECTURE = "sm_90a"
LOG2E = 1.4426950408889634
SLOTS = 5
MAX_SPLITS = 3
WHOLE_KEYS = 320
"""Keys that are all in shared memory, and whose scores are in registers."""
_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}

Kernel = Literal["whole", "shared_keys"]


Output = block("Output", ("void*", "data", "(B, T, H * D), contiguous"), ("float", "inverse_scale", ""))
WholeMaps = block("WholeMaps", (TensorMap, "q k v", ""))
Whole = block(
    "Whole",
    ("const u16*", "q k v", ""),
    ("u64", "q_batch q_token q_head k_batch k_token k_head", "strides, in elements"),
    (Output, "out", ""),
    ("float", "scale", ""),
    ("int", "tokens tiles heads", ""),
)
Maps = block("Maps", (TensorMap, "q k k_tail v v_tail", "boxes of 64 keys, of a tail of 16"))
SharedKeys = block(
    "SharedKeys",
    ("const int*", "lengths", "(B,) or null"),
    (Output, "out", ""),
    ("float", "scale", ""),
    ("int", "tokens tiles source splits", "128 rows are a tile; splits: blocks of a cluster"),
)


def kernel_for(gpu: Gpu | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None) -> Kernel | None:
    """Return the kernel for this call, or None if neither supports it. Arguments as `attention.ops.attention`."""
    if gpu is None or why_not(gpu, q, k, v, out, lengths) is not None:
        return None
    return "whole" if _fits_whole(q, k, lengths) else "shared_keys"


def why_not(gpu: Gpu, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None) -> str | None:
    """Explain why neither kernel takes this call; None if one does."""
    if gpu.architecture != ARCHITECTURE:
        return f"it needs compute capability 9.0, {gpu.name} has {gpu.version}"
    if q.dtype not in _KINDS or not q.dtype == k.dtype == v.dtype or out.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"it needs BF16 or FP16, and this or FP8 as out, got {q.dtype}, {k.dtype}, {v.dtype} and {out.dtype}"
    # Sixteen bytes at a time, from every row of every head.
    strides = (*q.stride()[:3], *k.stride()[:3])
    if k.stride() != v.stride() or any(stride % 8 for stride in strides):
        return "it needs keys and values of equal strides, which are multiples of 16 bytes"
    if any(x.data_ptr() % 16 or x.stride(-1) != 1 for x in (q, k, v, out)):
        return "it needs tensors aligned to 16 bytes, and contiguous heads"
    if not _fits_whole(q, k, lengths) and not _fits_shared_keys(q, k):
        sizes = f"{q.shape[2]} heads of {q.shape[3]}, {k.shape[2]} key heads, {k.shape[1]} keys"
        return f"no kernel supports {sizes}{'' if lengths is None else ' with lengths'}"
    return None


def _fits_whole(q: Tensor, k: Tensor, lengths: Tensor | None) -> bool:
    return lengths is None and q.shape[2] == k.shape[2] and q.shape[3] in (64, 72, 80) and k.shape[1] <= WHOLE_KEYS


def _fits_shared_keys(q: Tensor, k: Tensor) -> bool:
    group = q.shape[2] // k.shape[2]
    return group > 1 and 64 % group == 0 and q.shape[3] == 256


def whole(q: Tensor, k: Tensor, v: Tensor, out: Tensor, inverse_scale: float | None) -> None:
    """All keys at once: no lengths, as many key heads as query heads, a small head, at most `WHOLE_KEYS` keys."""
    batch, tokens, heads, head_dim = q.shape
    source = k.shape[1]
    tiles = -(-tokens // 64)
    read, written = (x.data_ptr() for x in (q, k, v)), Output(out.data_ptr(), inverse_scale or 1.0)
    call = Whole(*read, *q.stride()[:3], *k.stride()[:3], written, head_dim**-0.5 * LOG2E, tokens, tiles, heads)
    module = _module("whole", q.dtype, inverse_scale is not None, q.device, D=head_dim, S=source)
    maps = WholeMaps(_map(q, 64), *(_map(x, round_up(source, 64) // 2) for x in (k, v)))
    launch_cuda(module, "whole", batch * heads * tiles, 256, (maps, call))


def shared_keys(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, inverse_scale: float | None, gpu: Gpu
) -> None:
    """Several query heads a key head, a head of 256, any number of keys."""
    batch, tokens, heads, head_dim = q.shape
    source, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    tiles = -(-tokens * group // 128)
    blocks = batch * kv_heads * tiles
    splits = splits_of(blocks, gpu)
    maps = Maps(_map(q, 64 // group, group), *(_map(x, rows) for x in (k, v) for rows in (64, 16)))
    read, written = None if lengths is None else lengths.data_ptr(), Output(out.data_ptr(), inverse_scale or 1.0)
    call = SharedKeys(read, written, head_dim**-0.5 * LOG2E, tokens, tiles, source, splits)
    sizes = {"D": head_dim, "GROUP": group, "KV": kv_heads}
    module = _module("shared_keys", q.dtype, inverse_scale is not None, q.device, **sizes)
    launch_cuda(module, "shared_keys", blocks * splits, 384, (maps, call), cluster=splits)


def splits_of(blocks: int, gpu: Gpu) -> int:
    """Return how many blocks of a cluster share the keys of a tile: as many as run at once for `blocks` tiles."""
    fitting = (n for n in range(MAX_SPLITS, 1, -1) if blocks <= gpu.clusters_at_once(n))
    return next(fitting, 1)


@functools.cache
def _module(kernel: str, dtype: torch.dtype, quantised: bool, device: torch.device, **sizes: int) -> nvrtc.Module:
    source, shared = plan(kernel, dtype, quantised, **sizes)
    return nvrtc.load_module(source, {kernel: shared}, ARCHITECTURE, device)


def plan(kernel: str, dtype: torch.dtype, quantised: bool, **sizes: int) -> tuple[str, int]:
    """Return the source of a kernel for these sizes, and its shared memory in bytes."""
    head_dim = sizes["D"]
    macros = {"QUANT": int(quantised), "HALF": int(dtype == torch.float16), **sizes}
    if kernel == "whole":
        keys, chunks = round_up(sizes["S"], 64), head_dim // 8
        # Swizzled rows of 128 bytes, what is left of them, two barriers, both halves' exchange and statistics.
        rest = 16 * (2 * 64 + 4 * keys) if chunks > 8 else 0
        shared = 128 * (64 + 2 * keys) + rest + 16 + 16 * 128 * chunks + 16 * 256
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
    blocks = Output.cpp + (WholeMaps.cpp + Whole.cpp if kernel == "whole" else Maps.cpp + SharedKeys.cpp)
    return nvrtc.source_of(
        macros, "attention/cuda/common", f"attention/cuda/{kernel}", generated=blocks + "".join(wrapped)
    )


def _map(x: Tensor, tokens: int, heads: int = 1) -> TensorMap:
    """The tensor map of x (B, N, heads, d) for boxes of these tokens, heads and 128 bytes of a head."""
    return tensor_map(x, (1, tokens, heads, 64), promotion=128)
