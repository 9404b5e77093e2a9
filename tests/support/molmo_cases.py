"""Cases of what MolmoAct2 adds, as those of kernel_cases.py: its own rows, and awkward shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support.kernel_calls import EPS, Call, Draw, Empty, Workspace
from vla_accel.kernels.attention.config import KeySplit, SuffixShape
from vla_accel.kernels.attention.few import Queries, query_splits
from vla_accel.kernels.attention.suffix import Prefix
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.rows.rows import rope_tables


def _into(tokens: int, heads: int, head_dim: int, width: int, weights: str = "", *, gated: bool = True) -> Callable:
    def call(draw: Draw) -> Call:
        gate = draw.wide(width) if gated else None
        arguments: dict[str, Any] = {
            "qkv": draw(tokens, 3 * heads * head_dim, scale=2.0),
            "rope": rope_tables(tokens, head_dim, torch.device("cpu")),
            "weights": draw.linear(width, heads * head_dim, weights=weights, bias=gated),
            "out": draw(tokens, width), "epilogue": Epilogue(gate=gate, residual=True), "eps": EPS,
        }  # fmt: skip
        return Call("attention_into", arguments, ("out",))

    return call


def _queries(
    tokens: int, width: int, heads: int, head_dim: int, prefix: int, length: int, weights: str = "",
    config: KeySplit | None = None,
) -> Callable:  # fmt: skip
    def call(draw: Draw) -> Call:
        sizes = SuffixShape(1, tokens, prefix, heads, heads, head_dim, draw.dtype.itemsize, own=False)
        taken, n = config or query_splits(None, sizes, width)[0], heads * head_dim
        norm = Norm(EPS, None, draw.wide(width, scale=0.3))
        keys, values = (draw(1, prefix, heads, head_dim) for _ in range(2))
        arguments: dict[str, Any] = {
            "x": draw(tokens, width, scale=2.0),
            "queries": Queries(draw.linear(n, width, weights=weights), norm, draw.wide(n), EPS),
            "prefix": Prefix(keys, values, torch.tensor([length], dtype=torch.int32)),
            "out": Empty((tokens, n), draw.dtype), "workspace": Workspace(sizes, taken), "config": taken,
        }  # fmt: skip
        beyond = (torch.arange(prefix) >= length)[None, :, None, None].expand_as(keys)
        return Call("query_attention", arguments, ("out",), {"keys": beyond, "values": beyond})

    return call


def _norm_rows(rows: int, heads: int, head_dim: int) -> Callable:
    def call(draw: Draw) -> Call:
        out = Empty((rows, heads * head_dim), draw.dtype)
        arguments = {"x": draw(rows, heads * head_dim, scale=3.0), "out": out, "heads": heads, "eps": EPS}
        return Call("norm_rows", arguments, ("out",))

    return call


def _cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    yield "attention_into (10, 12, 64, 768)", _into(10, 12, 64, 768)
    for shape, weights in (((16, 3, 24, 40), "fp8"), ((1, 2, 16, 18), "int8"), ((5, 1, 72, 100), "")):
        yield f"attention_into {shape} {weights}", _into(*shape, weights)
    yield "attention_into plain", _into(7, 2, 6, 20, gated=False)
    yield "query_attention (10, 768, 2, 64, 130, 100)", _queries(10, 768, 2, 64, 130, 100)
    for shape, weights in (((16, 300, 3, 24, 64, 64), "fp8"), ((1, 40, 2, 16, 20, 1), "int8")):
        yield f"query_attention {shape} {weights}", _queries(*shape, weights)
    for keys in (32, 128):
        yield f"query_attention by {keys}", _queries(9, 72, 3, 72, 200, 190, config=KeySplit(16, keys, 1, 1, 8))
    for shape in ((3, 12, 64), (2, 3, 24), (5, 1, 40)):
        yield f"norm_rows {shape}", _norm_rows(*shape)


CASES: dict[str, Callable[[Draw], Call]] = dict(_cases())
