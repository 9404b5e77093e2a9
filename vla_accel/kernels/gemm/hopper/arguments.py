"""The argument block of the GEMM kernel."""

from __future__ import annotations

from vla_accel.kernels.struct import block

Call = block(
    "Call",
    ("const u16*", "bias", "(N,) or null"),
    ("const float*", "scales", "(N,) or null: of each weight row, with WIDEN"),
    ("void*", "out", "with ROPE: q"),
    ("float", "scale inverse eps", "scale multiplies the sums, inverse an FP8 output"),
    ("int", "rows columns", "of out"),
    ("int", "chunks", "of 128 bytes along K"),
    ("int", "token_tiles tiles", "a cluster computes one of the tiles at a time"),
    ("const float*", "sums squares", "(moment_tiles, rows): of x and of its squares"),
    ("const float*", "weight_sums", "(N,): the sum of each weight row, for a LayerNorm"),
    ("int", "moment_tiles width", "width: columns of x"),
    ("float*", "sums_out squares_out", "(columns / 64, rows) or null: of the new out and of its squares"),
    ("const float*", "shift", "(N,) or null: added to the normed product, in the order of the weight's rows in memory"),
    ("const float*", "gate next_scale", "(columns,) or null: scaled gets out * (1 + next_scale)"),
    ("u16*", "scaled", "(rows, columns) or null"),
    ("const float*", "cos sin", "(positions, half)"),
    ("const int*", "starts", "(rows / tokens,): the position of a sequence's first token"),
    ("u16*", "k v", ""),
    ("const unsigned char*", "prefetch", "a weight of a later product, or null"),
    ("int", "prefetch_bytes", ""),
    ("int", "half tokens heads kv_heads", "half: distance of the two weight rows of a pair, with PAIRS"),
)
