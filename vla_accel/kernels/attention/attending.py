"""Attention by the backends "own" (the project's kernels), "sdpa" (torch) and "flash_attn", by name or the fastest one.

All compute what `attention` defines, including masked keys and FP8 output. A library returns a new tensor, which is
then copied or quantised into the output. Knows shapes, not models. Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.errors import DependencyError, EngineError
from vla_accel.fp8 import E4M3
from vla_accel.kernels import reference
from vla_accel.kernels.attention.tiles import Tile, tiles
from vla_accel.kernels.autotune import fastest, remembered
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.rows.rows import store
from vla_accel.runtime import Runtime, current

WAYS = ("own", "sdpa", "flash_attn")
HALVES = (torch.bfloat16, torch.float16)
CALLS = 20
"""Calls in a row that are measured together."""


@dataclass(frozen=True)
class Sizes:
    """The shape of a program's attention. `padded`: rows may have fewer keys than `source`; `quantised`: the output is
    in the dtype `stored`, FP8 or INT8; `last`: as in `attention`.
    """

    batch: int
    tokens: int
    source: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    padded: bool
    quantised: bool
    stored: torch.dtype = E4M3.dtype
    last: bool = False


@dataclass(frozen=True)
class Choice:
    """The chosen backend `way`, its text for the ledger, and the tile config if it is the own Triton kernel."""

    way: str
    detail: str
    tile: Tile | None = None


def attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, *, inverse_scale: float | None = None,
    last: bool = False, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Attention of every query to the first `lengths[b]` keys, or to all of them without lengths.

    On Hopper the shapes of the full-size models run in CUDA C++ (`vla_accel.kernels.attention.cuda`).

    Args:
        q: (B, T, heads, d).
        k, v: (B, S, kv_heads, d), of equal strides, contiguous in the last dimension.
        out: (B, T, heads * d), contiguous.
        lengths: (B,) int32, or None.
        last: of the real queries, only the last one, lengths[b] - 1, attends to the last key.
        tile: the tile config of Triton's kernel.
    """
    way = path(q)
    if way == "cuda" and not last:
        from vla_accel.kernels.attention import cuda as hopper

        gpu = current(q).gpu
        kernel = hopper.kernel_for(gpu, q, k, v, out, lengths)
        if gpu is not None and kernel is not None:
            return hopper.attention(kernel, q, k, v, out, lengths, gpu=gpu, inverse_scale=inverse_scale)
    if way != "reference":
        return kernels("attention.triton_attention").attention(
            q, k, v, out, lengths, inverse_scale=inverse_scale, last=last, tile=tile
        )
    mask = None if lengths is None else _seen(lengths, q.shape[1], k.shape[1], last)
    store(out, reference.attention(q, k, v, mask).flatten(2), inverse_scale)


def _seen(lengths: Tensor, tokens: int, source: int, last: bool) -> Tensor:
    """Return the mask of `attention`, (B, T, S) bool."""
    end = lengths[:, None].expand(-1, tokens)
    if last:
        end = end - (torch.arange(tokens, device=lengths.device) < lengths[:, None] - 1).to(end.dtype)
    return torch.arange(source, device=lengths.device) < end[..., None]


def attend(
    way: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, *,
    inverse_scale: float | None = None, last: bool = False, tile: Tile | None = None,
) -> None:  # fmt: skip
    """`attention` by a backend of `WAYS`. `tile`: for the own kernel."""
    if way == "own":
        attention(q, k, v, out, lengths, inverse_scale=inverse_scale, last=last, tile=tile)
    else:
        store(out, {"sdpa": _sdpa, "flash_attn": _flash}[way](q, k, v, lengths, last), inverse_scale)


def choose(asked: str, sizes: Sizes, runtime: Runtime) -> Choice:
    """Choose the attention backend of a program.

    Args:
        asked: a backend of `WAYS`; "fastest", which measures all of them; or "auto", which measures and remembers the
            result if the own kernel is Triton's, and is "own" otherwise and in a deterministic runtime.

    Raises:
        DependencyError: flash-attn is requested and missing.
        EngineError: the backend does not run these sizes. Library backends are tried once.
    """
    if asked not in ("auto", *WAYS, "fastest"):
        raise EngineError(f"attention: expected auto, {', '.join(WAYS)} or fastest, got {asked!r}")
    device = runtime.device
    if asked in WAYS and asked != "own":
        _trial(asked, sizes, device)()
        return Choice(asked, f"attention {asked}")
    name, reason = own_kernel(sizes, runtime)
    tile = _fastest_tile(sizes, runtime) if name == "Triton" else None
    if asked == "own" or (asked == "auto" and (device.type != "cuda" or name != "Triton" or runtime.deterministic)):
        said = [name if tile is None else f"{name} {tile}", *([f"CUDA C++ out: {reason}"] if reason else [])]
        return Choice("own", f"attention own ({'; '.join(said)})", tile)
    ways: dict[str, Callable[[], None]] = {}
    out: dict[str, str] = {}
    for way in WAYS:
        if way == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
            out[way] = "not installed"
            continue
        try:
            ways[way] = _trial(way, sizes, device, tile)
        except (DependencyError, EngineError) as error:
            # A candidate that cannot run is out of the race, and the ledger says why.
            out[way] = str(error)
    if asked == "auto":
        found = remembered(f"attention of {sizes}", ways, runtime, repeats=CALLS)
    else:
        found = fastest(ways, runtime, repeats=CALLS)
    said = [f"{way} {ms * 1e3:.1f} µs" for way, ms in found.times.items()] or ["nothing is measured on a CPU"]
    said += [f"own: {tile}"] if tile is not None else []
    out = {**out, **found.out, **({"CUDA C++": reason} if reason else {})}
    said += [f"{way} out: {why}" for way, why in out.items()]
    return Choice(found.way, f"attention {found.way}, the fastest ({'; '.join(said)})", tile)


def own_kernel(sizes: Sizes, runtime: Runtime) -> tuple[str, str]:
    """Return the name of the own kernel, and why it is not CUDA C++ (empty if it is, or cannot be)."""
    way, gpu = runtime.backend, runtime.gpu
    if way != "cuda" or gpu is None:
        return "reference" if way == "reference" else "Triton", ""
    if sizes.last:
        return "Triton", "it has no mask for a key that one query sees"
    from vla_accel.kernels.attention import cuda as hopper

    reason = hopper.why_not(gpu, *_tensors(sizes, runtime.device))
    return ("CUDA C++", "") if reason is None else ("Triton", reason)


# -- libraries --------------------------------------------------------------------------------------------------------


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, last: bool = False) -> Tensor:
    """(B, T, heads, d). On a GPU by cuDNN's, flash or memory-efficient kernels, never by materialised scores."""
    mask, heads = None, q.shape[2]
    if lengths is not None:
        real = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
        mask = _seen(lengths, q.shape[1], k.shape[1], last)[:, None]
        # A bias of -inf does not stop a NaN behind the last key, nor a weight of 0 one among the values.
        k, v = (x.masked_fill(~real[:, :, None, None], 0) for x in (k, v))
    if k.shape[2] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    with _kernels_only(q.device):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.transpose(1, 2)


def _kernels_only(device: torch.device) -> Any:
    if device.type != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return sdpa_kernel(kernels, set_priority=True)


def _flash(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, last: bool = False) -> Tensor:
    """(B, T, heads, d). Keys and values behind a row's length are not read: the cache's own call takes lengths."""
    if last:
        raise EngineError("attention flash_attn: it has no mask for a key that one query sees")
    module = flash_module()
    if lengths is None:
        return module.flash_attn_func(q, k, v)
    return module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)


def flash_module() -> Any:
    """Return flash-attn. Raises DependencyError if it is missing or cannot be imported."""
    try:
        module = importlib.import_module("flash_attn")
        _ = module.flash_attn_func, module.flash_attn_with_kvcache
    except (ImportError, AttributeError) as error:
        raise DependencyError(
            f"attention flash_attn: it needs flash-attn 2.8 or newer: pip install 'vla_accel[flash]' ({error})"
        ) from error
    return module


# -- trying and measuring ---------------------------------------------------------------------------------------------


def _tensors(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return random q, k, v, out and lengths in the layout of the programs."""
    s, generator = sizes, torch.Generator(device).manual_seed(0)
    columns = s.heads + 2 * s.kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(s.dtype)

    qkv = normal(s.batch, s.tokens, columns, s.head_dim)
    q = qkv[:, :, : s.heads]
    if s.padded or s.tokens != s.source:
        k, v = (normal(s.batch, s.source, s.kv_heads, s.head_dim) for _ in range(2))
    else:
        k, v = qkv[:, :, s.heads : s.heads + s.kv_heads], qkv[:, :, s.heads + s.kv_heads :]
    kind = s.stored if s.quantised else s.dtype
    out = torch.empty(s.batch, s.tokens, s.heads * s.head_dim, dtype=kind, device=device)
    lengths = torch.full((s.batch,), s.source, dtype=torch.int32, device=device) if s.padded else None
    return q, k, v, out, lengths


def _fastest_tile(sizes: Sizes, runtime: Runtime) -> Tile | None:
    """Return the fastest tile config of Triton's kernel, measured once; None without a GPU."""
    if runtime.device.type != "cuda":
        return None
    given = _tensors(sizes, runtime.device)
    found = {str(tile): tile for tile in tiles(sizes.tokens, sizes.source, sizes.head_dim, runtime.gpu)}
    calls = {name: _call("own", sizes, given, tile) for name, tile in found.items()}
    return found[remembered(f"tile of {sizes}", calls, runtime, repeats=CALLS).way]


def _call(way: str, sizes: Sizes, given: Any, tile: Tile | None = None) -> Callable[[], None]:
    inverse_scale = 1.0 if sizes.quantised else None
    return lambda: attend(way, *given, inverse_scale=inverse_scale, last=sizes.last, tile=tile)


def _trial(way: str, sizes: Sizes, device: torch.device, tile: Tile | None = None) -> Callable[[], None]:
    """Return a call on tensors of these sizes, after running it once. Raises EngineError if it fails."""
    if way == "flash_attn":
        flash_module()
        if device.type != "cuda" or sizes.dtype not in HALVES:
            raise EngineError(
                f"attention flash_attn: expected bfloat16 or float16 on a GPU, got {sizes.dtype} on {device.type}"
            )
    call = _call(way, sizes, _tensors(sizes, device), tile)
    try:
        with torch.inference_mode():
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise EngineError(f"attention {way}: it cannot run {sizes} ({str(error).splitlines()[0]})") from error
    return call
