"""What FastWAM's native programs launch at the published width, compiled without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scripts import lines_of, needs_triton


@pytest.mark.slow
@needs_triton
def test_a_step_launches_ten_kernels_a_block() -> None:
    """Without the library's products: two steps of three blocks, each with its rows' moments, the velocity and the
    flow before it."""
    found = json.loads(*lines_of("compile_each", "fastwam", "--count"))
    assert found["denoise"] == 2 * (10 * 3 + 3) + 1 and found["kv_cache"] < 30


@pytest.mark.slow
@needs_triton
def test_every_kernel_compiles_for_hopper_and_fits(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in lines_of("compile_each", "fastwam", cache=tmp_path)]
    assert {row["kernel"] for row in rows} >= {"_norm_heads", "_suffix_attention", "_flow_step", "_pipelined_columns"}
    assert [row for row in rows if row["bytes"] <= 1000 or not row["fits"] or row["spilled"] > 128] == []
