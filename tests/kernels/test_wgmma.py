"""The text of Hopper's warpgroup products (`ops/cuda/wgmma.py`); that it is right, GPU tests of its users say."""

from __future__ import annotations

import re

import pytest

from tests.support.gpus import H200
from vla_accel.families.pi0.native_loop import expert_spec
from vla_accel.families.pi0.network import Pi0Config, pi0, pi05
from vla_accel.kernels.loop.schedule import Schedule
from vla_accel.kernels.wgmma import wgmma


@pytest.mark.parametrize("n", [8, 16, 72, 256])
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("values", [False, True])
def test_every_operand_is_named_once(n: int, registers: bool, values: bool) -> None:
    text = wgmma("times", n, "bf16", registers=registers, transposed=values)
    count = n // 2
    instruction = text[text.index("wgmma") : text.index(";\\n}")]
    assert f"m64n{n}k16.f32.bf16.bf16" in instruction and f"(&d)[{count}]" in text
    named = [int(i) for i in re.findall(r"%(\d+)", text)]
    inputs = 5 if registers else 2
    # The last of all decides whether d is added to: it is named in the predicate.
    assert sorted(named) == list(range(count + inputs + 1)) and f"setp.ne.b32 p, %{count + inputs}, 0" in text
    assert [int(i) for i in re.findall(r'"\+f"\(d\[(\d+)\]\)', text)] == list(range(count))
    # Signs of a and b, then which of the operands in shared memory lie with k across.
    assert instruction.endswith(f"p, 1, 1, {int(values)}" if registers else f"p, 1, 1, 0, {int(values)}")


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [((pi05(action_horizon=10), 2), []), ((pi05(action_horizon=10), 4), [16, 64]),
     ((pi0(action_horizon=50), 1), [16, 32, 64])],
)  # fmt: skip
def test_many_rows_have_a_product_of_every_width(sizes: tuple[Pi0Config, int], columns: list[int]) -> None:
    """Of the units together, of q's, of one, and of the clusters that share K."""
    config, batch = sizes
    schedule = Schedule.of(expert_spec(config), batch, 544, H200)
    found = re.findall(r"void wgmma\(float \(&d\)\[(\d+)\]", schedule.source)
    assert [2 * int(n) for n in found] == columns
    if columns:
        split = {schedule.clusters[name] * 8 for name in schedule.clusters if name in ("down", "output", "mix")}
        assert split | {16, 16 * schedule.macros["GATE_UP_UNITS"]} <= set(columns)


def test_fp8_has_no_layout_but_k_in_a_row() -> None:
    text = wgmma("times", 136, "e4m3")
    assert "m64n136k32.f32.e4m3.e4m3" in text and "p, 1, 1;" in text
