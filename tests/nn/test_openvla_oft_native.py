"""What OpenVLA-OFT's native programs launch at the published width, compiled without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scripts import lines_of, needs_triton


@pytest.mark.slow
@needs_triton
def test_blocks_launch_four_and_five_kernels() -> None:
    """Without the library's products: of two towers and the language model, with two blocks each."""
    found = json.loads(*lines_of("compile_each", "openvla_oft", "--count"))
    assert found == {"vision": 2 * (2 + 2 * 4) + 2, "decode": 1 + 2 * 5}


@pytest.mark.slow
@needs_triton
def test_every_kernel_compiles_for_hopper_and_fits(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in lines_of("compile_each", "openvla_oft", cache=tmp_path)]
    assert {row["kernel"] for row in rows} >= {"_attention", "_rotate", "_gelu", "_geglu"}
    assert [row for row in rows if row["bytes"] <= 1000 or not row["fits"] or row["spilled"] > 128] == []
