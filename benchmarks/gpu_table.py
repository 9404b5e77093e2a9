"""The tables of GPUs that nobody has run this on: what to start with, what its weights take, and what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.markdown import MODELS, rows


@dataclass(frozen=True)
class Recipe:
    """A GPU as its maker's data sheet has it. `memory`: GB; `shared`: it is the host's, too; `lower`: FP8 or INT8."""

    name: str
    capability: str
    memory: tuple[int, ...]
    lower: str
    shared: bool = False


RECIPES = (
    Recipe("RTX 4090", "8.9", (24,), "fp8"),
    Recipe("RTX 5090", "12.0", (32,), "fp8"),
    Recipe("L40S", "8.9", (48,), "fp8"),
    Recipe("A100", "8.0", (40, 80), "int8"),
    Recipe("Jetson AGX Orin", "8.7", (32, 64), "int8", shared=True),
    Recipe("Jetson Thor", "11.0", (128,), "fp8", shared=True),
)


def gpus(results: Sequence[Any]) -> str:
    """A row for each GPU. `results`: what `benchmarks.memory` counted, and all stored results."""
    sizes, stored = results[0]["families"]["pi05"], [gpu for result in results[1] for gpu in _gpus_of(result)]
    body = []
    for recipe in RECIPES:
        memory = " or ".join(map(str, recipe.memory)) + (", shared with the host" if recipe.shared else "")
        low = f"native-{recipe.lower}"
        ran = sum(recipe.name.removeprefix("Jetson ") in gpu for gpu in stored)
        body.append([
            recipe.name, recipe.capability, memory,
            f"`native` ({_gb(_total(sizes['native-bf16']))} GB)",
            f"`native_{recipe.lower}` ({_gb(_total(sizes[low]))} GB)",
            str(ran) if ran else "none",
        ])  # fmt: skip
    header = ["GPU", "compute capability", "memory GB", "start with", "then, with calibrated scales", "stored runs"]
    return f"{rows(header, body)}\nIn brackets: the weights of π0.5, counted; buffers take some hundred MB more.\n"


def memory(result: dict[str, Any]) -> str:
    """What `benchmarks.memory` counted: GB of weights by component, a row for each model and configuration."""
    body = [
        [label, _said(one), *(_gb(size) for size in _parts(one["bytes"])), _gb(_total(one))]
        for model, label in MODELS.items() for one in result["families"].get(model, {}).values()
    ]  # fmt: skip
    return rows(["weights, GB", "", "vision", "prefix", "denoise", "together"], body)


def _said(one: dict[str, Any]) -> str:
    """Which parts are not in BF16."""
    by_precision: dict[str, list[str]] = {}
    for part, precision in one["low"].items():
        by_precision.setdefault(precision.upper(), []).append("prefix" if part == "kv_cache" else part)
    said = [f"{', '.join(parts)} in {precision}" for precision, parts in by_precision.items()] or ["BF16"]
    return ", ".join([*said, *(["embeddings on the host"] if one["on_host"] else [])])


def _parts(parts: dict[str, int]) -> list[int]:
    """Vision, prefix, denoise: the first part's, the last one's, and what lies between."""
    first, *between, last = parts.values()
    return [first, sum(between), last]


def _total(one: dict[str, Any]) -> int:
    return sum(one["bytes"].values())


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def _gpus_of(result: Any) -> Iterator[str]:
    """The GPU that a result was measured on, where it has one; of a run in several launches, each once."""
    found = {}
    for place in (result, *(result.get("launches") or ()), *(result.get("policies") or {}).values()):
        hardware = place.get("hardware") or {}
        name = hardware.get("gpu") if isinstance(hardware, dict) else None
        if isinstance(name, str):
            found[name] = True
    yield from found
