"""The argument blocks of the denoise kernels. Sizes in comments are macros of `core.cu`."""

from __future__ import annotations

from vla_accel.kernels.struct import block

Model = block(
    "Model",
    ("const unsigned char*", "weights", "π0's time MLP, then the layers, layer_bytes apart, packed"),
    ("u64", "layer_at layer_bytes o_at gate_up_at down_at", ""),
    ("const float*", "in_scale in_shift in_gate post_scale post_shift post_gate", "(steps, L, ...)"),
    ("const float*", "final_scale final_shift b_in", "(steps, W)"),
    ("const float*", "w_in w_out b_out mix_bias cos sin", ""),
)
Call = block(
    "Call",
    ("const u16*", "keys", "(L, BATCH, S, KV, D)"),
    ("const u16*", "values_t", "(L, BATCH, KV, D, SP)"),
    ("const int*", "lengths", "(BATCH,)"),
    ("const float*", "state", "(BATCH, W): π0's state token"),
    ("float*", "actions", "(BATCH, HZ, A)"),
    ("float*", "xf", "(M, W): the residual stream"),
    ("u16*", "xb hidden context active", "inputs of products, BF16, in the order of `place_of`; xb = BF16(xf)"),
    ("u16*", "q ks vts vs", ""),
    ("const u16*", "values", "(L, BATCH, S, KV, D)"),
    ("const float*", "target follow", "(BATCH, HZ, A), (BATCH, HZ): the previous chunk and its actions' weights"),
    ("int", "s sp steps", ""),
)
