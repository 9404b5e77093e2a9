"""Arithmetic that several parts share."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import vla_accel
from vla_accel.numeric import DTYPES, cosine, round_up


def test_round_up() -> None:
    assert [round_up(size, 8) for size in (0, 1, 8, 9)] == [0, 8, 8, 16] and round_up(200, 32) == 224


def test_cosine() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert cosine(x, 3 * x) == pytest.approx(1) and cosine(x, -x) == pytest.approx(-1)
    assert cosine(np.array([1.0, 0.0]), np.array([1.0, 1.0])) == pytest.approx(0.5**0.5)
    assert cosine(np.zeros(2), np.zeros(2)) == 1 and cosine(np.zeros(2), np.ones(2)) == 0
    assert np.isnan(cosine(x, np.full((2, 3), np.nan)))
    # In float32 the sum of squares alone would overflow.
    assert cosine(np.full(4, 1e30, np.float32), np.full(4, 1e30, np.float32)) == pytest.approx(1)


@pytest.mark.slow
def test_dtypes_have_one_table() -> None:
    assert {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} == DTYPES
    others = []
    for path in Path(vla_accel.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict) and path.name != "numeric.py":
                pairs = {ast.unparse(k): ast.unparse(v) for k, v in zip(node.keys, node.values, strict=True) if k}
                if pairs.get("'bf16'") == "torch.bfloat16":
                    others.append(path.name)
    assert others == []
