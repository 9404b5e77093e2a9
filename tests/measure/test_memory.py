"""Weights of published sizes, counted; the GPUs of the page are those that tests know."""

from __future__ import annotations

import pytest

from benchmarks.tables.hardware import RECIPES, gpus, memory
from benchmarks.tables.table import MODELS
from tests.support.gpus import A100, L40S, ORIN, RTX_4090, RTX_5090, THOR
from vla_accel.measure.memory import SMALLEST, counted


@pytest.mark.slow
def test_a_lower_precision_takes_less_and_host_memory_is_not_counted() -> None:
    found = counted("smolvla")
    total = {name: sum(one.bytes.values()) for name, one in found.items()}
    assert total["native-bf16"] > total["native-fp8"] > total["native-fp8-vision"] > total[SMALLEST] > 0
    assert found["native-fp8"].bytes["vision"] == found["native-bf16"].bytes["vision"], "only the prefix is in FP8"
    assert found[SMALLEST].on_host and set(found[SMALLEST].low.values()) == {"fp8"}


def sizes(vision: int, kv_cache: int, denoise: int) -> dict[str, int]:
    return {"vision": vision, "kv_cache": kv_cache, "denoise": denoise}


COUNTED = {
    "families": {
        "pi05": {
            "native-bf16": {"low": {}, "on_host": False, "bytes": sizes(840_000_000, 4_800_000_000, 630_000_000)},
            "native-fp8": {"low": {"kv_cache": "fp8"}, "on_host": False, "bytes": sizes(1, 2, 3)},
            "native-int8": {"low": {"kv_cache": "int8"}, "on_host": True, "bytes": sizes(10**9, 10**9, 10**9)},
        }
    }
}


def test_the_pages_gpus_are_those_that_kernels_are_compiled_for() -> None:
    known = dict(zip((r.name for r in RECIPES), (RTX_4090, RTX_5090, L40S, A100, ORIN, THOR), strict=True))
    for recipe in RECIPES:
        gpu = known[recipe.name]
        assert recipe.capability == gpu.version and gpu.memory >> 30 in recipe.memory, recipe
        assert recipe.lower == ("fp8" if gpu.fp8 else "int8") and gpu.name.split()[-1].split("-")[0] in recipe.name


def test_a_gpu_has_its_configurations_and_what_is_stored_of_it() -> None:
    stored = [
        {"hardware": {"gpu": "NVIDIA GeForce RTX 4090"}},
        {"launches": [{"hardware": {"gpu": "NVIDIA GeForce RTX 4090"}}] * 2},
        {"policies": {"native": {"hardware": {"gpu": "NVIDIA H200"}}}},
        {"hardware": "none"},
    ]
    lines = gpus([COUNTED, stored]).splitlines()
    assert lines[2] == "| RTX 4090 | 8.9 | 24 | `native` (6.27 GB) | `native_fp8` (0.00 GB) | 2 |"
    assert lines[5] == "| A100 | 8.0 | 40 or 80 | `native` (6.27 GB) | `native_int8` (3.00 GB) | none |"


def test_a_table_of_weights_says_what_is_not_in_bf16() -> None:
    every = {"families": dict.fromkeys(MODELS, COUNTED["families"]["pi05"])}
    lines = memory(every).splitlines()
    assert lines[2] == "| π0.5 | BF16 | 0.84 | 4.80 | 0.63 | 6.27 |"
    assert lines[4] == "| π0.5 | prefix in INT8, embeddings on the host | 1.00 | 1.00 | 1.00 | 3.00 |"
