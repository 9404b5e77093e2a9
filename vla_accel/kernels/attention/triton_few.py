"""A program owns a head of a sequence, with all its queries and keys. See `vla_accel.kernels.attention.few`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.triton_common import LOG2E, wait_for_previous
from vla_accel.numeric import power_of_two


@triton.jit
def _few_attention(qkv_ptr, rope, out_ptr, numbers, HEADS: constexpr, HALF: constexpr, ROWS: constexpr, PDL: constexpr):
    cos_ptr, sin_ptr = rope
    tokens, scale, eps = numbers
    DIM: constexpr = 2 * HALF
    WIDTH: constexpr = HEADS * DIM
    head, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * tokens
    t, i = tl.arange(0, ROWS), tl.arange(0, max(16, triton.next_power_of_2(HALF)))
    d = tl.arange(0, max(16, triton.next_power_of_2(DIM)))
    # Queries (T, half), keys (half, T).
    across, along = (t < tokens)[:, None] & (i < HALF)[None, :], (t < tokens)[None, :] & (i < HALF)[:, None]
    angle, turned = t[:, None] * HALF + i[None, :], t[None, :] * HALF + i[:, None]
    q_cos, q_sin = tl.load(cos_ptr + angle, mask=across, other=0.0), tl.load(sin_ptr + angle, mask=across, other=0.0)
    k_cos, k_sin = tl.load(cos_ptr + turned, mask=along, other=0.0), tl.load(sin_ptr + turned, mask=along, other=0.0)
    wait_for_previous(PDL)
    rows = qkv_ptr + first * (3 * WIDTH) + head * DIM
    q_at = rows + t[:, None] * (3 * WIDTH) + i[None, :]
    k_at = rows + WIDTH + t[None, :] * (3 * WIDTH) + i[:, None]
    in_head = (t < tokens)[:, None] & (d < DIM)[None, :]
    q_low, q_high = tl.load(q_at, mask=across, other=0.0), tl.load(q_at + HALF, mask=across, other=0.0)
    k_low, k_high = tl.load(k_at, mask=along, other=0.0), tl.load(k_at + HALF, mask=along, other=0.0)
    v = tl.load(rows + 2 * WIDTH + t[:, None] * (3 * WIDTH) + d[None, :], mask=in_head, other=0.0)
    kind = v.dtype
    q_low, q_high = q_low.to(tl.float32), q_high.to(tl.float32)
    k_low, k_high = k_low.to(tl.float32), k_high.to(tl.float32)
    q_rstd = tl.rsqrt(tl.sum(q_low * q_low + q_high * q_high, 1) / DIM + eps)[:, None]
    k_rstd = tl.rsqrt(tl.sum(k_low * k_low + k_high * k_high, 0) / DIM + eps)[None, :]
    q = ((q_low * q_cos - q_high * q_sin) * q_rstd).to(kind)
    s = tl.dot(q, ((k_low * k_cos - k_high * k_sin) * k_rstd).to(kind))
    q = ((q_high * q_cos + q_low * q_sin) * q_rstd).to(kind)
    s = tl.dot(q, ((k_high * k_cos + k_low * k_sin) * k_rstd).to(kind), s)
    s = tl.where((t < tokens)[None, :], s * scale, -float("inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    out = tl.dot(p.to(kind), v) / tl.sum(p, 1)[:, None]
    target = out_ptr + (first + t[:, None]) * WIDTH + head * DIM + d[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=in_head)


def few_attention(qkv: Tensor, rope: tuple[Tensor, Tensor], out: Tensor, *, heads: int, eps: float) -> None:
    """See `vla_accel.kernels.attention.few.few_attention`."""
    tokens, half = rope[0].shape
    rows, grid = max(16, power_of_two(tokens)), (heads, len(qkv) // tokens)
    numbers = (tokens, (2 * half) ** -0.5 * LOG2E.value, eps)
    launch(_few_attention, grid, qkv, rope, out, numbers, heads, half, rows, num_warps=4, num_stages=1)
