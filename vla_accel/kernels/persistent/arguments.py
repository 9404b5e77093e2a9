"""The argument blocks of the persistent kernel. Sizes in comments are macros of `core.cu`; `?` marks pairs of rows in a
table, of the step's time and of pinned actions."""

from __future__ import annotations

from vla_accel.kernels.struct import block

Model = block(
    "Model",
    ("const u64*", "weights", "(DEPTH, 4): addresses of q/k/v, output, gate and up, down; then of the time MLP"),
    ("const float*", "in_scale in_shift in_gate post_scale post_shift post_gate", "(STEPS, DEPTH, ?, ...)"),
    ("const float*", "final_scale", "(STEPS, WIDTH), or (WIDTH,) if the norms are plain"),
    ("const float*", "out_shift", "(STEPS, ACTION_DIM): bias of the velocity, with the last norm's shift"),
    ("const float*", "w_out", "(ACTION_DIM, WIDTH)"),
    ("const float*", "w_in b_in mix_bias", "(ACTION_DIM, WIDTH); (WIDTH,) or (STEPS, ?, WIDTH); (WIDTH,)"),
    ("const float*", "cos sin", "(positions, HEAD_DIM / 2)"),
    ("const float*", "schedule", "(3, STEPS): dt, time, and gain of the guidance"),
    ("float", "eps", ""),
)
Call = block(
    "Call",
    ("const u16*", "keys values", "(DEPTH, BATCH, prefix_tokens, KV_HEADS, HEAD_DIM)"),
    ("const int*", "lengths", "(BATCH,)"),
    ("const float*", "target follow", "(BATCH, HORIZON, ACTION_DIM); (BATCH, HORIZON)"),
    ("const float*", "state", "(BATCH, WIDTH): the state token of π0"),
    ("float*", "actions", "(BATCH, HORIZON, ACTION_DIM)"),
    ("u16*", "x embedded context active", "inputs of products, BF16, in the order of `place_of`"),
    ("u16*", "q k v", "(ROWS, HEADS or KV_HEADS, HEAD_DIM)"),
    ("float*", "squares", "(WIDTH / 8, 16): sums of squares of x by tile and row"),
    ("float*", "parts statistics", "of attention: (items, TOKENS, HEAD_DIM); (items, 16, 2)"),
    ("u32*", "arrivals", "(HOPS, HOP_STRIDE)"),
    ("int", "prefix_tokens", ""),
)
