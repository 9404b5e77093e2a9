"""What MolmoAct2's native programs launch at the published width, compiled without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scripts import lines_of, needs_triton


@pytest.mark.slow
@needs_triton
def test_a_step_launches_eight_kernels_a_block() -> None:
    """Two steps of three blocks, each with the flow before it; so few rows come without moments."""
    found = json.loads(*lines_of("compile_each", "molmoact2", "--count"))
    assert found["denoise"] == 2 * (8 * 3 + 1) + 1


@pytest.mark.slow
@needs_triton
def test_every_kernel_compiles_for_hopper_and_fits(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in lines_of("compile_each", "molmoact2", cache=tmp_path)]
    few = {"_few_attention", "_suffix_attention", "_step", "_skinny_pair"}
    assert {row["kernel"] for row in rows} >= few | {"_attention", "_rotate", "_pipelined_columns"}
    assert [row for row in rows if row["bytes"] <= 1000 or not row["fits"] or row["spilled"] > 128] == []
