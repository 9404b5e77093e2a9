"""Cases of what MolmoAct2 adds, as those of kernel_cases.py: its own rows, and awkward shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support.kernel_calls import EPS, Call, Draw, Empty
from vla_accel.kernels.rows.rows import rope_tables


def _few(batch: int, tokens: int, heads: int, head_dim: int) -> Callable:
    def call(draw: Draw) -> Call:
        arguments: dict[str, Any] = {
            "qkv": draw(batch * tokens, 3 * heads * head_dim, scale=2.0),
            "rope": rope_tables(tokens, head_dim, torch.device("cpu")),
            "out": Empty((batch * tokens, heads * head_dim), draw.dtype), "heads": heads, "eps": EPS,
        }  # fmt: skip
        return Call("few_attention", arguments, ("out",))

    return call


def _norm_rows(rows: int, heads: int, head_dim: int) -> Callable:
    def call(draw: Draw) -> Call:
        out = Empty((rows, heads * head_dim), draw.dtype)
        arguments = {"x": draw(rows, heads * head_dim, scale=3.0), "out": out, "heads": heads, "eps": EPS}
        return Call("norm_rows", arguments, ("out",))

    return call


def _cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    for shape in ((1, 10, 12, 64), (2, 30, 3, 24), (3, 1, 2, 16), (1, 64, 1, 72)):
        yield f"few_attention {shape}", _few(*shape)
    for shape in ((3, 12, 64), (2, 3, 24), (5, 1, 40)):
        yield f"norm_rows {shape}", _norm_rows(*shape)


CASES: dict[str, Callable[[Draw], Call]] = dict(_cases())
