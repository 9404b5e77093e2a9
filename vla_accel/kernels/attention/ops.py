"""Attention of many queries, by the kernels of this package ("own"), torch ("sdpa") or flash-attn ("flash_attn").

All backends compute what `attention` defines, including masked keys and quantised output. A library returns a new
tensor, which is then copied or quantised into the output. Conventions as in `vla_accel.kernels.rows.rows`.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.errors import DependencyError, EngineError
from vla_accel.kernels import reference
from vla_accel.kernels.attention.config import FlashTile
from vla_accel.kernels.dispatch import kernels, op
from vla_accel.kernels.rows.rows import store
from vla_accel.runtime import current

BACKENDS = ("own", "sdpa", "flash_attn")
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""q, k, v, out and lengths of `attention`."""
ONE_QUERY_ONLY = "it has no mask for a key that one query sees"


def attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, *, bias: Tensor | None = None,
    inverse_scale: float | None = None, last: bool = False, tile: FlashTile | None = None,
) -> None:  # fmt: skip
    """Attention of every query to the first `lengths[b]` keys, or to all of them without lengths.

    On Hopper the shapes of the full-size models run in CUDA C++ (`vla_accel.kernels.attention.cuda`).

    Args:
        q: (B, T, heads, d).
        k, v: (B, S, kv_heads, d), of equal strides, contiguous in the last dimension.
        out: (B, T, heads * d), contiguous.
        lengths: (B,) int32, or None.
        bias: (B, S) float32, added to the scores of every query and head; instead of `lengths`. The first key's is
            finite.
        last: of the real queries, only the last one, lengths[b] - 1, attends to the last key.
        tile: the tile config of Triton's kernel.
    """
    runtime = current(q)
    if runtime.backend == "cuda" and not last and bias is None:
        from vla_accel.kernels.attention import cuda as hopper

        kernel = hopper.kernel_for(runtime.gpu, q, k, v, out, lengths)
        if kernel == "whole":
            return hopper.whole(q, k, v, out, inverse_scale)
        if runtime.gpu is not None and kernel is not None:
            return hopper.shared_keys(q, k, v, out, lengths, inverse_scale, runtime.gpu)
    if runtime.backend != "reference":
        tensors = q, k, v, out, lengths
        return kernels("attention.triton_attention").attention(tensors, bias, inverse_scale, last, tile)
    mask = None if bias is None else bias[:, None]
    if lengths is not None:
        mask = _mask(lengths, q.shape[1], k.shape[1], last)
    store(out, reference.attention(q, k, v, mask).flatten(2), inverse_scale)


@op("attention.triton_attention")
def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor | None = None, together: Tensor | None = None,
    *, inverse_scale: float | None = None, tile: FlashTile | None = None,
) -> None:  # fmt: skip
    """Causal attention.

    Args:
        q: (B, T, heads, d).
        k, v: (B, T, kv_heads, d), of equal strides.
        out: (B, T, heads * d), contiguous.
        starts: (B,) int32, the rows before the first real one; each of them sees itself alone.
        together: (T,) int32, 1 for rows that see each other, whatever their order, otherwise 0.
        tile: the tile config of Triton's kernel.
    """
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril().expand(len(q), -1, -1)
    if together is not None:
        mask = mask | ((together[:, None] > 0) & (together > 0))
    if starts is not None:
        real = torch.arange(q.shape[1], device=q.device) >= starts[:, None]
        mask = mask & (real[:, None] | torch.eye(q.shape[1], dtype=torch.bool, device=q.device))
    store(out, reference.attention(q, k, v, mask).flatten(2), inverse_scale)


def attend(
    backend: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lengths: Tensor | None, *,
    inverse_scale: float | None = None, last: bool = False, tile: FlashTile | None = None,
) -> None:  # fmt: skip
    """`attention` by one of `BACKENDS`. `tile`: for "own"."""
    if backend == "own":
        attention(q, k, v, out, lengths, inverse_scale=inverse_scale, last=last, tile=tile)
    else:
        store(out, {"sdpa": _sdpa, "flash_attn": _flash}[backend](q, k, v, lengths, last), inverse_scale)


def _mask(lengths: Tensor, tokens: int, source: int, last: bool) -> Tensor:
    """Return the mask of `attention`, (B, T, S) bool."""
    end = lengths[:, None].expand(-1, tokens)
    if last:
        end = end - (torch.arange(tokens, device=lengths.device) < lengths[:, None] - 1).to(end.dtype)
    return torch.arange(source, device=lengths.device) < end[..., None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, last: bool = False) -> Tensor:
    """(B, T, heads, d). On a GPU by cuDNN's, flash or memory-efficient kernels, never by materialised scores."""
    mask, heads = None, q.shape[2]
    if lengths is not None:
        real = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
        mask = _mask(lengths, q.shape[1], k.shape[1], last)[:, None]
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

    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return sdpa_kernel(backends, set_priority=True)


def _flash(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, last: bool = False) -> Tensor:
    """(B, T, heads, d). Keys and values behind a row's length are not read: the cache's own call takes lengths."""
    if last:
        raise EngineError(f"attention flash_attn: {ONE_QUERY_ONLY}")
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
