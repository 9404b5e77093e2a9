"""Products of few rows with large weights: the denoise loop, where reading the weights is the cost.

A program owns a slice of output columns and all the rows. K is cut into `PARTS` pieces that become the batch of one
batched product, so that every warp has its own piece and the tensor cores see m16n8k16; the pieces are added at the
end. Weights are fetched into registers before the wait for the previous kernel, which they do not depend on; K passes
through shared memory in up to four chunks, so that two kernels fit on a multiprocessor and overlap. RMSNorm costs no
pass of its own: rms(x ∘ (1 + scale)) W = rstd ∘ ((x ∘ (1 + scale)) W), and the shift's product is a step's constant.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.suffix_tilings import Skinny
from vla_accel.kernels.gemm.suffix_types import ActionInput, ActionOutput, EulerStep, Guidance, Heads, Rotation
from vla_accel.kernels.gemm.triton_epilogues import (
    for_geglu,
    for_heads,
    for_residual,
    own_row,
    residual,
    store_geglu,
    store_heads,
    store_residual,
)
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import SILU, scale_of_sums, wait_for_previous
from vla_accel.numeric import power_of_two


@triton.jit
def _weight_tile(
    w_ptr, first, k0, K: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, limit
):
    """(PARTS, PIECE, BLOCK_N) of a (N, K) weight, from row `first` and column k0."""
    part = tl.arange(0, PARTS)[:, None, None]
    piece = tl.arange(0, PIECE)[None, :, None]
    n = first + tl.arange(0, BLOCK_N)[None, None, :]
    k = k0 + part * PIECE + piece
    return tl.load(w_ptr + n.to(tl.int64) * K + k, mask=(n < limit) & (k < K), other=0.0)


@triton.jit
def _row_tile(x_ptr, row0, rows, k0, K: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr):
    """(PARTS, BLOCK_M, PIECE) of (rows, K) activations."""
    part = tl.arange(0, PARTS)[:, None, None]
    row = row0 + tl.arange(0, BLOCK_M)[None, :, None]
    k = k0 + part * PIECE + tl.arange(0, PIECE)[None, None, :]
    return tl.load(x_ptr + row * K + k, mask=(row < rows) & (k < K), other=0.0)


@triton.jit
def _ahead(w_ptr, first, K: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, limit,
           AHEAD: tl.constexpr):  # fmt: skip
    """The first `AHEAD` (one to four) chunks of a weight; those beyond repeat the first and are never used."""
    BLOCK_K: tl.constexpr = PARTS * PIECE
    w0 = _weight_tile(w_ptr, first, 0, K, BLOCK_N, PARTS, PIECE, limit)
    w1, w2, w3 = w0, w0, w0
    if AHEAD > 1:
        w1 = _weight_tile(w_ptr, first, BLOCK_K, K, BLOCK_N, PARTS, PIECE, limit)
    if AHEAD > 2:
        w2 = _weight_tile(w_ptr, first, 2 * BLOCK_K, K, BLOCK_N, PARTS, PIECE, limit)
    if AHEAD > 3:
        w3 = _weight_tile(w_ptr, first, 3 * BLOCK_K, K, BLOCK_N, PARTS, PIECE, limit)
    return w0, w1, w2, w3


@triton.jit
def _pick(w0, w1, w2, w3, CHUNK: tl.constexpr):
    if CHUNK == 0:  # noqa: SIM116 - a kernel has no dictionaries
        return w0
    elif CHUNK == 1:
        return w1
    elif CHUNK == 2:
        return w2
    else:
        return w3


@triton.jit
def _modulated(
    x, scale_ptr, own, k0, K: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, HAS_SCALE: tl.constexpr
):
    """x ∘ (1 + scale) in the dtype of x, and the sums of squares of x by row, (BLOCK_M,) float32. `own`: where the
    rows' scales begin, 0 or (1, BLOCK_M, 1)."""
    wide = x.to(tl.float32)
    squares = tl.sum(tl.sum(wide * wide, 2), 0)
    if HAS_SCALE:
        part = tl.arange(0, PARTS)[:, None, None]
        k = k0 + part * PIECE + tl.arange(0, PIECE)[None, None, :]
        wide = wide * (1.0 + tl.load(scale_ptr + (own + k), mask=k < K, other=0.0))
    return wide.to(x.dtype), squares


@triton.jit
def _normed_pair(x_ptr, w_ptr, wscale, scale_ptr, pinned_ptr, row0, rows, first, first_end, second, second_end, eps,
                 K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
                 PIECE: tl.constexpr, AHEAD: tl.constexpr, HAS_SCALE: tl.constexpr, PINNED: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """Normed rows times two tiles of weight rows, from `first` and from `second`; waits for the previous kernel."""
    wa0, wa1, wa2, wa3 = _ahead(w_ptr, first, K, BLOCK_N, PARTS, PIECE, first_end, AHEAD)
    wb0, wb1, wb2, wb3 = _ahead(w_ptr, second, K, BLOCK_N, PARTS, PIECE, second_end, AHEAD)
    scale_a = scale_of_sums(w_ptr, wscale, tl.minimum(first + tl.arange(0, BLOCK_N), first_end - 1))
    scale_b = scale_of_sums(w_ptr, wscale, tl.minimum(second + tl.arange(0, BLOCK_N), second_end - 1))
    wait_for_previous(PDL)
    acc_a = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    acc_b = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    own = 0
    if PINNED:
        own = own_row(pinned_ptr, row0 + tl.arange(0, BLOCK_M)[None, :, None], rows, K)
    coming = _row_tile(x_ptr, row0, rows, 0, K, BLOCK_M, PARTS, PIECE)
    for k0 in tl.static_range(0, K, PARTS * PIECE):
        x = coming
        if k0 + PARTS * PIECE < K:
            coming = _row_tile(x_ptr, row0, rows, k0 + PARTS * PIECE, K, BLOCK_M, PARTS, PIECE)
        if k0 < AHEAD * PARTS * PIECE:
            wa, wb = _pick(wa0, wa1, wa2, wa3, k0 // (PARTS * PIECE)), _pick(wb0, wb1, wb2, wb3, k0 // (PARTS * PIECE))
        else:
            wa = _weight_tile(w_ptr, first, k0, K, BLOCK_N, PARTS, PIECE, first_end)
            wb = _weight_tile(w_ptr, second, k0, K, BLOCK_N, PARTS, PIECE, second_end)
        x, more = _modulated(x, scale_ptr, own, k0, K, PARTS, PIECE, HAS_SCALE)
        squares += more
        acc_a = tl.dot(x, wa.to(x.dtype), acc_a)
        acc_b = tl.dot(x, wb.to(x.dtype), acc_b)
    rstd = tl.rsqrt(squares / K + eps)[:, None]
    return tl.sum(acc_a, 0) * scale_a * rstd, tl.sum(acc_b, 0) * scale_b * rstd


@triton.jit
def _qkv_rope(x_ptr, w_ptr, wscale, scale_ptr, shift_ptr, pinned_ptr, cos_ptr, sin_ptr, length_ptr, q_ptr, k_ptr,
              v_ptr, rows, tokens, eps, K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
              HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
              PIECE: tl.constexpr, AHEAD: tl.constexpr, HAS_SCALE: tl.constexpr, PINNED: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    TILES: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    head, i0 = tl.program_id(0) // TILES, (tl.program_id(0) % TILES) * BLOCK_N
    row0 = tl.program_id(1) * BLOCK_M
    # Rotary embeddings mix columns i and i + HALF of a head: one program owns both.
    low, high = head * (2 * HALF) + i0, head * (2 * HALF) + HALF + i0
    low_end, high_end = low - i0 + HALF, high - i0 + HALF
    of_low, of_high, cos, sin = for_heads(shift_ptr, pinned_ptr, cos_ptr, sin_ptr, length_ptr, head, i0, row0, rows,
                                          tokens, HEADS, KV_HEADS, HALF, BLOCK_M, BLOCK_N, HAS_SCALE,
                                          PINNED)  # fmt: skip
    a, b = _normed_pair(x_ptr, w_ptr, wscale, scale_ptr, pinned_ptr, row0, rows, low, low_end, high, high_end, eps, K,
                        BLOCK_M, BLOCK_N, PARTS, PIECE, AHEAD, HAS_SCALE, PINNED, PDL)  # fmt: skip
    store_heads(a, b, of_low, of_high, cos, sin, q_ptr, k_ptr, v_ptr, head, i0, row0, rows, HEADS, KV_HEADS, HALF,
                BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit
def _gate_up_geglu(x_ptr, w_ptr, wscale, scale_ptr, shift_ptr, pinned_ptr, out_ptr, rows, eps, K: tl.constexpr,
                   HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
                   PIECE: tl.constexpr, AHEAD: tl.constexpr, HAS_SCALE: tl.constexpr,
                   GATE: tl.constexpr, PINNED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    n0, row0 = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    gate, up = for_geglu(shift_ptr, pinned_ptr, n0, row0, rows, HIDDEN, BLOCK_M, BLOCK_N, HAS_SCALE, PINNED)
    g, u = _normed_pair(x_ptr, w_ptr, wscale, scale_ptr, pinned_ptr, row0, rows, n0, HIDDEN, HIDDEN + n0, 2 * HIDDEN,
                        eps, K, BLOCK_M, BLOCK_N, PARTS, PIECE, AHEAD, HAS_SCALE, PINNED, PDL)  # fmt: skip
    store_geglu(g, u, gate, up, out_ptr, n0, row0, rows, HIDDEN, BLOCK_M, BLOCK_N, GATE)


@triton.jit
def _project(a_ptr, w_ptr, wscale, bias_ptr, gate_ptr, pinned_ptr, x_ptr, rows, tokens, N: tl.constexpr,
             K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr,
             AHEAD: tl.constexpr, RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
             SKIP_FIRST: tl.constexpr, PINNED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    n0, row0 = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    w0, w1, w2, w3 = _ahead(w_ptr, n0, K, BLOCK_N, PARTS, PIECE, N, AHEAD)
    scale = scale_of_sums(w_ptr, wscale, tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1))
    bias, gate = for_residual(
        bias_ptr, gate_ptr, pinned_ptr, n0, row0, rows, N, BLOCK_M, BLOCK_N, HAS_GATE, HAS_BIAS, PINNED
    )
    wait_for_previous(PDL)
    before, keep = residual(x_ptr, n0, row0, rows, tokens, N, BLOCK_M, BLOCK_N, RESIDUAL, SKIP_FIRST)
    acc = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    coming = _row_tile(a_ptr, row0, rows, 0, K, BLOCK_M, PARTS, PIECE)
    for k0 in tl.static_range(0, K, PARTS * PIECE):
        a = coming
        if k0 + PARTS * PIECE < K:
            coming = _row_tile(a_ptr, row0, rows, k0 + PARTS * PIECE, K, BLOCK_M, PARTS, PIECE)
        if k0 < AHEAD * PARTS * PIECE:
            w = _pick(w0, w1, w2, w3, k0 // (PARTS * PIECE))
        else:
            w = _weight_tile(w_ptr, n0, k0, K, BLOCK_N, PARTS, PIECE, N)
        acc = tl.dot(a, w.to(a.dtype), acc)
    y = tl.sum(acc, 0) * scale
    store_residual(y, bias, gate, before, keep, x_ptr, n0, row0, N, BLOCK_M, BLOCK_N)


def qkv_rope(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None,
    rotation: Rotation, out: Heads, *, eps: float, pinned: Tensor | None, cut: Skinny,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.qkv_rope`."""
    batch, tokens, heads, head_dim = out.q.shape
    rows, width, half = batch * tokens, x.shape[-1], head_dim // 2
    grid = ((heads + 2 * out.k.shape[2]) * triton.cdiv(half, cut.columns), triton.cdiv(rows, cut.rows))
    launch(
        _qkv_rope, grid,
        x, layer.weight, layer.sums_scale, scale if scale is not None else x, shift if shift is not None else x,
        pinned if pinned is not None else x, rotation.cos, rotation.sin, rotation.starts, out.q,
        out.k, out.v, rows, tokens, eps, width, heads,
        out.k.shape[2], half, cut.rows, cut.columns, cut.parts, cut.block_k // cut.parts, cut.ahead, scale is not None,
        pinned is not None, num_warps=cut.parts, num_stages=1,
    )  # fmt: skip


def gate_up_geglu(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None, out: Tensor, *,
    eps: float, activation: Activation, pinned: Tensor | None, cut: Skinny,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.gate_up_geglu`."""
    rows, hidden = out.shape
    width = x.shape[-1]
    grid = (triton.cdiv(hidden, cut.columns), triton.cdiv(rows, cut.rows))
    launch(
        _gate_up_geglu, grid,
        x, layer.weight, layer.sums_scale, scale if scale is not None else x, shift if shift is not None else x,
        pinned if pinned is not None else x, out, rows, eps, width, hidden, cut.rows, cut.columns, cut.parts,
        cut.block_k // cut.parts, cut.ahead, scale is not None, activation.gate.code, pinned is not None,
        num_warps=cut.parts, num_stages=1,
    )  # fmt: skip


def project(
    a: Tensor, layer: Linear, gate: Tensor | None, x: Tensor, *,
    residual: bool, skip_every: int, pinned: Tensor | None, cut: Skinny,
    workspace: object = None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.project`."""
    rows, k = a.shape
    n = layer.weight.shape[0]
    grid = (triton.cdiv(n, cut.columns), triton.cdiv(rows, cut.rows))
    launch(
        _project, grid,
        a, layer.weight, layer.sums_scale, a if layer.bias is None else layer.bias, gate if gate is not None else a,
        pinned if pinned is not None else a, x, rows, skip_every or 1, n, k, cut.rows, cut.columns, cut.parts,
        cut.block_k // cut.parts, cut.ahead, residual, gate is not None, layer.bias is not None, skip_every > 0,
        pinned is not None, num_warps=cut.parts, num_stages=1,
    )  # fmt: skip


@triton.jit
def _step(x_ptr, scale_ptr, shift_ptr, w_out_ptr, b_out_ptr, actions_ptr, target_ptr, weights_ptr, w_in_ptr,
          b_in_ptr, next_ptr, dt, time, gain, eps, tokens, horizon, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
          ACTIONS: tl.constexpr, BLOCK_A: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
          HAS_SHIFT: tl.constexpr, ACTIVATION: tl.constexpr, PINNED: tl.constexpr, TWO_INPUTS: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    batch, place = row // horizon, row % horizon
    token_row = batch * tokens + (tokens - horizon) + place
    column = tl.arange(0, BLOCK_W)
    in_width = column < WIDTH
    action = tl.arange(0, BLOCK_A)
    in_actions = action < ACTIONS
    both = in_actions[:, None] & in_width[None, :]
    tile = action[:, None] * WIDTH + column[None, :]
    wait_for_previous(PDL)
    noisy = tl.load(actions_ptr + row * ACTIONS + action, mask=in_actions, other=0.0)
    follow = tl.load(weights_ptr + row)
    if not FIRST:
        x = tl.load(x_ptr + token_row * WIDTH + column, mask=in_width, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        scale = tl.load(scale_ptr + column, mask=in_width, other=0.0)
        if HAS_SHIFT:
            shift = tl.load(shift_ptr + column, mask=in_width, other=0.0)
            # Norm and projection stay in float32; nothing is rounded between them.
            normed = normed * (1.0 + scale) + shift
        else:
            normed = normed * (1.0 + scale)
        w_out = tl.load(w_out_ptr + tile, mask=both, other=0.0)
        velocity = tl.sum(w_out * normed[None, :], 1) + tl.load(b_out_ptr + action, mask=in_actions, other=0.0)
        if PINNED:
            velocity = tl.where(follow > 0.0, 0.0, velocity)
        else:
            target = tl.load(target_ptr + row * ACTIONS + action, mask=in_actions, other=0.0)
            velocity -= gain * (follow * (target - (noisy - time * velocity)))
        noisy += dt * velocity
        tl.store(actions_ptr + row * ACTIONS + action, noisy, mask=in_actions)
    if not LAST:
        w_in = tl.load(w_in_ptr + tile, mask=both, other=0.0)
        own = 0
        if TWO_INPUTS:
            own = (follow > 0.0).to(tl.int32) * WIDTH
        embedded = tl.sum(w_in * noisy[:, None], 0) + tl.load(b_in_ptr + own + column, mask=in_width, other=0.0)
        if ACTIVATION == SILU:
            embedded = embedded / (1.0 + tl.exp(-embedded))
        tl.store(next_ptr + token_row * WIDTH + column, embedded.to(next_ptr.dtype.element_ty), mask=in_width)


def step(
    x: Tensor, output: ActionOutput, actions: Tensor, guidance: Guidance, into: ActionInput, following: Tensor,
    at: EulerStep, *, tokens: int,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.step`."""
    batch, horizon, action_dim = actions.shape
    width, scale, shift = output.weight.shape[1], output.scale, output.shift
    launch(
        _step, (batch * horizon,),
        x, scale if scale is not None else x, shift if shift is not None else x, output.weight, output.bias, actions,
        guidance.target, guidance.weights, into.weight, into.bias, following, at.dt, at.time, at.gain, output.eps,
        tokens, horizon, width, power_of_two(width), action_dim, power_of_two(action_dim), at.first, at.last,
        shift is not None, into.activation.code, guidance.pinned, into.bias.ndim == 2, num_warps=8, num_stages=1,
    )  # fmt: skip
