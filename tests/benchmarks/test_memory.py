"""Weights of published sizes, counted; the GPUs of the page are those that tests know."""

from __future__ import annotations

import pytest

from benchmarks.memory import SMALLEST, counted
from benchmarks.tables.hardware import RECIPES
from tests.support.gpus import A100, L40S, ORIN, RTX_4090, RTX_5090, THOR


@pytest.mark.slow
def test_a_lower_precision_takes_less_and_host_memory_is_not_counted() -> None:
    found = counted("smolvla")
    total = {name: sum(one["bytes"].values()) for name, one in found.items()}
    assert total["native-bf16"] > total["native-fp8"] > total["native-fp8-vision"] > total[SMALLEST] > 0
    assert found["native-fp8"]["bytes"]["vision"] == found["native-bf16"]["bytes"]["vision"], (
        "only the prefix is in FP8"
    )
    assert found[SMALLEST]["on_host"] and set(found[SMALLEST]["low"].values()) == {"fp8"}


def test_the_pages_gpus_are_those_that_kernels_are_compiled_for() -> None:
    known = dict(zip((r.name for r in RECIPES), (RTX_4090, RTX_5090, L40S, A100, ORIN, THOR), strict=True))
    for recipe in RECIPES:
        gpu = known[recipe.name]
        assert recipe.capability == gpu.version and gpu.memory >> 30 in recipe.memory, recipe
        assert recipe.lower == ("fp8" if gpu.fp8 else "int8") and gpu.name.split()[-1].split("-")[0] in recipe.name
