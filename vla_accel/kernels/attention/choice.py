"""The attention backend of a program, by name or the fastest one, chosen when the program is built."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.errors import DependencyError, EngineError
from vla_accel.kernels.attention.config import AttentionShape, FlashTile, causal_tiles, flash_tiles
from vla_accel.kernels.attention.ops import BACKENDS, ONE_QUERY_ONLY, Tensors, attend, causal_attention, flash_module
from vla_accel.kernels.autotune import fastest, remembered
from vla_accel.runtime import Runtime

CALLS = 20
"""Calls in a row that are measured together."""


@dataclass(frozen=True)
class Choice:
    """The chosen backend of `ops.BACKENDS`, its text for the ledger, and the tile config if it is Triton's kernel."""

    backend: str
    detail: str
    tile: FlashTile | None = None


@dataclass(frozen=True)
class OwnKernel:
    """The kernel behind the backend "own". `why_not_cuda`: why it is Triton's and not CUDA C++; None if it is CUDA C++,
    or if the runtime has no CUDA C++ kernels.
    """

    name: str
    why_not_cuda: str | None = None


def choose(requested: str, shape: AttentionShape, runtime: Runtime) -> Choice:
    """Choose the attention backend of a program.

    Args:
        requested: one of `BACKENDS`; "fastest", which measures all of them; or "auto", which measures and remembers the
            result if the own kernel is Triton's, and is "own" otherwise and in a deterministic runtime.

    Raises:
        DependencyError: flash-attn is requested and missing.
        EngineError: the backend does not run this shape. Library backends are tried once.
    """
    if requested not in ("auto", *BACKENDS, "fastest"):
        raise EngineError(f"attention: expected auto, {', '.join(BACKENDS)} or fastest, got {requested!r}")
    if requested in BACKENDS and requested != "own":
        _trial(requested, shape, runtime.device)()
        return Choice(requested, f"attention {requested}")
    kernel = own_kernel(shape, runtime)
    triton, reason = kernel.name == "Triton", kernel.why_not_cuda
    tile = _fastest_tile(shape, runtime) if triton else None
    measured = requested == "fastest" or (triton and runtime.device.type == "cuda" and not runtime.deterministic)
    if requested == "own" or not measured:
        text = [kernel.name if tile is None else f"{kernel.name} {tile}"]
        text += [f"CUDA C++ out: {reason}"] if reason else []
        return Choice("own", f"attention own ({'; '.join(text)})", tile)
    what = f"attention of {shape}" if requested == "auto" else ""
    return choose_fastest(lambda backend: _trial(backend, shape, runtime.device, tile), runtime, tile, reason, what)


def choose_fastest(
    trial: Callable[[str], Callable[[], None]], runtime: Runtime, tile: FlashTile | None = None,
    why_not_cuda: str | None = None, what: str = "",
) -> Choice:  # fmt: skip
    """Measure the backends by the calls that a program makes.

    Args:
        trial: returns the program's call with a backend, or raises DependencyError or EngineError.
        tile: the tile config of the backend "own".
        why_not_cuda: as in `OwnKernel`.
        what: the key under which the result is remembered; empty to measure anew.
    """
    calls: dict[str, Callable[[], None]] = {}
    rejected: dict[str, str] = {}
    for backend in BACKENDS:
        if backend == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
            rejected[backend] = "not installed"
            continue
        try:
            calls[backend] = trial(backend)
        except (DependencyError, EngineError) as error:
            # A backend that cannot run is not measured; the ledger has the reason.
            rejected[backend] = str(error)
    found = remembered(what, calls, runtime, repeats=CALLS) if what else fastest(calls, runtime, repeats=CALLS)
    text = [f"{backend} {ms * 1e3:.1f} µs" for backend, ms in found.times.items()] or ["nothing is measured on a CPU"]
    text += [f"own: {tile}"] if tile is not None else []
    rejected = {**rejected, **found.rejected, **({"CUDA C++": why_not_cuda} if why_not_cuda else {})}
    text += [f"{backend} out: {why}" for backend, why in rejected.items()]
    return Choice(found.candidate, f"attention {found.candidate}, the fastest ({'; '.join(text)})", tile)


def own_kernel(shape: AttentionShape, runtime: Runtime) -> OwnKernel:
    """Return which kernel of this package runs a shape."""
    if runtime.backend != "cuda" or runtime.gpu is None:
        return OwnKernel("reference" if runtime.backend == "reference" else "Triton")
    if shape.last:
        return OwnKernel("Triton", ONE_QUERY_ONLY)
    from vla_accel.kernels.attention import cuda as hopper

    reason = hopper.why_not(runtime.gpu, *random_tensors(shape, runtime.device))
    return OwnKernel("CUDA C++" if reason is None else "Triton", reason)


def random_tensors(shape: AttentionShape, device: torch.device) -> Tensors:
    """Return random q, k, v, out and lengths in the layout of the programs."""
    s, generator = shape, torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(s.dtype)

    qkv = normal(s.batch, s.tokens, s.heads + 2 * s.kv_heads, s.head_dim)
    q, k, v = qkv.split((s.heads, s.kv_heads, s.kv_heads), 2)
    if s.padded or s.tokens != s.source:
        k, v = (normal(s.batch, s.source, s.kv_heads, s.head_dim) for _ in range(2))
    kind = s.stored if s.quantised else s.dtype
    out = torch.empty(s.batch, s.tokens, s.heads * s.head_dim, dtype=kind, device=device)
    lengths = torch.full((s.batch,), s.source, dtype=torch.int32, device=device) if s.padded else None
    return q, k, v, out, lengths


def _fastest_tile(shape: AttentionShape, runtime: Runtime) -> FlashTile | None:
    """Return the fastest tile config of Triton's kernel, measured once; None without a GPU."""
    if runtime.device.type != "cuda":
        return None
    tensors = random_tensors(shape, runtime.device)
    by_name = {str(tile): tile for tile in flash_tiles(runtime.gpu, shape)}
    calls = {name: _call("own", shape, tensors, tile) for name, tile in by_name.items()}
    return by_name[remembered(f"tile of {shape}", calls, runtime, repeats=CALLS).candidate]


def fastest_causal_tile(shape: AttentionShape, together: Tensor | None, runtime: Runtime) -> FlashTile | None:
    """Return the fastest tile config of causal attention, measured once; None without a GPU."""
    if runtime.device.type != "cuda":
        return None
    q, k, v, out, lengths = random_tensors(shape, runtime.device)
    starts = None if lengths is None else torch.zeros_like(lengths)
    inverse_scale = 1.0 if shape.quantised else None

    def call(tile: FlashTile) -> Callable[[], None]:
        return lambda: causal_attention(q, k, v, out, starts, together, inverse_scale=inverse_scale, tile=tile)

    by_name = {str(tile): tile for tile in causal_tiles(runtime.gpu, shape.tokens, shape.head_dim)}
    what = f"causal tile of {shape}{'' if together is None else ', some rows together'}"
    calls = {name: call(tile) for name, tile in by_name.items()}
    return by_name[remembered(what, calls, runtime, repeats=CALLS).candidate]


def _call(backend: str, shape: AttentionShape, tensors: Tensors, tile: FlashTile | None) -> Callable[[], None]:
    inverse_scale = 1.0 if shape.quantised else None
    return lambda: attend(backend, *tensors, inverse_scale=inverse_scale, last=shape.last, tile=tile)


def _trial(
    backend: str, shape: AttentionShape, device: torch.device, tile: FlashTile | None = None
) -> Callable[[], None]:
    """Return a call on tensors of this shape, after running it once. Raises EngineError if it fails."""
    if backend == "flash_attn":
        flash_module()
        if device.type != "cuda" or shape.dtype not in (torch.bfloat16, torch.float16):
            raise EngineError(
                f"attention flash_attn: expected bfloat16 or float16 on a GPU, got {shape.dtype} on {device.type}"
            )
    call = _call(backend, shape, random_tensors(shape, device), tile)
    try:
        with torch.inference_mode():
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EngineError(f"attention {backend}: it cannot run {shape} ({reason})") from error
    return call
