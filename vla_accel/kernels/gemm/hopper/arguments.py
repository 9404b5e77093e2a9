"""The argument blocks of the GEMM's kernels."""

from __future__ import annotations

from typing import Any

from vla_accel.kernels.struct import block

_FIELDS: tuple[Any, ...] = (
    ("const u16*", "bias", ""),
    ("void*", "out", ""),
    ("float", "scale inverse", "scale multiplies the sums, inverse an FP8 output"),
    ("int", "rows columns", "of out"),
    ("int", "chunks", "of 128 bytes along K"),
    ("int", "token_tiles tiles", "what a cluster computes is a tile"),
    ("float2*", "moments_out", "mean and sum of squared deviations of every 64 columns: (columns / 64, rows) of out"),
    ("const float2*", "moments", "the same of x: (MOMENTS, rows)"),
    ("const float*", "weight_sums", "(N,): 1 W"),
    ("float", "eps", ""),
)
Call = block("Call", *_FIELDS)
Suffix = block(
    "Suffix",
    ("const float*", "shift", "(N,) or null: added to the normed product, in the order of the weight's rows in memory"),
    ("const float*", "gate", "(columns,) or null"),
    ("const float*", "next_scale", "(columns,) or null: scaled gets out * (1 + next_scale)"),
    ("u16*", "scaled", "(rows, columns)"),
    ("float*", "sums_out squares_out", "(columns / 64, rows) or null: of out and of its squares"),
    ("const float*", "squares", "(tiles, rows): of x"),
    ("const float*", "cos sin", "(positions, half)"),
    ("const int*", "lengths", "(rows / tokens,): the position of a sequence's first token"),
    ("u16*", "k v", "q is out"),
    ("int", "tiles width half tokens heads kv_heads", ""),
)
"""What a GEMM takes for the rows of a suffix (`suffix.cu`)."""
SuffixCall = block("Call", *_FIELDS, (Suffix, "suffix", ""))
