"""The argument blocks of the denoise kernels. Sizes in comments are macros of `core.cu`."""

from __future__ import annotations

from vla_accel.kernels.struct import block

Model = block(
    "Model",
    ("const unsigned char*", "weights", "the time MLP, then the layers, layer_bytes apart, packed"),
    ("u64", "layer_at layer_bytes o_at gate_up_at down_at", ""),
    ("const float*", "in_scale in_shift in_gate post_scale post_shift post_gate", "(steps, DEPTH, ...)"),
    ("const float*", "final_scale final_shift b_in", "(steps, WIDTH)"),
    ("const float*", "w_in w_out b_out mix_bias cos sin", ""),
)
Call = block(
    "Call",
    ("const u16*", "keys", "(DEPTH, BATCH, prefix_tokens, KV_HEADS, HEAD_DIM)"),
    ("const u16*", "values_t", "(DEPTH, BATCH, KV_HEADS, HEAD_DIM, padded_prefix_tokens)"),
    ("const int*", "lengths", "(BATCH,)"),
    ("const float*", "state", "(BATCH, WIDTH): the state token of π0"),
    ("float*", "actions", "(BATCH, HORIZON, ACTION_DIM)"),
    ("float*", "xf", "(ROWS, WIDTH): the residual stream"),
    ("u16*", "xb hidden context active", "inputs of products, BF16, in the order of `place_of`; xb = BF16(xf)"),
    ("u16*", "q ks vts vs", ""),
    ("const u16*", "values", "(DEPTH, BATCH, prefix_tokens, KV_HEADS, HEAD_DIM)"),
    ("const float*", "target", "(BATCH, HORIZON, ACTION_DIM): the previous chunk"),
    ("const float*", "follow", "(BATCH, HORIZON): the weights of its actions"),
    ("int", "prefix_tokens padded_prefix_tokens steps", ""),
)
AttendWork = block(
    "AttendWork",
    ("int", "prefix_keys suffix_keys", "of each block of a cluster; both are multiples of eight"),
    ("int", "keys values queries maxima totals statistics own_queries barriers", "offsets in shared memory"),
)
GroupedWork = block("GroupedWork", ("int", "keys values queries made statistics barrier", "offsets in shared memory"))
