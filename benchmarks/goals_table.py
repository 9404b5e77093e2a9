"""The table of goals: whole calls of stored `vla-accel bench` runs that have one, and where their time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bench_tables import PI0_PARTS, batched, component_header, components
from benchmarks.markdown import rows
from benchmarks.shapes_table import published, shape_of, timed_calls
from vla_accel.measure.systems import ORDINARY_TOKENS

SHORT = ("pi05", 2, 10)
GOALS: dict[tuple[str, int, int], dict[str, float]] = {
    SHORT: {"portable-bf16": 11.5, "portable-fp8": 10.0},
    ("pi05", 3, 50): {"native-bf16": 10.5, "native-fp8": 8.8, "portable-bf16": 15.0, "portable-fp8": 13.0},
    ("pi0", 3, 50): {"native-bf16": 10.3, "native-fp8": 8.6, "portable-bf16": 15.0, "portable-fp8": 13.0},
}
"""ms of a call of ten steps on an H200, by model, views, actions and system."""
INT8_OVER_FP8 = 1.05
"""What a call of π0.5 with 2 views and 10 actions may take in portable INT8, of the one in portable FP8."""
PER_SECOND = {1: 135, 4: 220, 8: 280, 16: 330, 32: 360}
"""Observations a second by batch, of π0.5 with 2 views and 10 actions in `native-fp8`."""
LONGER_PROMPT = 1.1
"""What a call with a longer prompt may take, beyond its share of tokens, of the one with an ordinary prompt."""
IMAGE_TOKENS = 256
"""Of π0 and π0.5, a view."""


@dataclass(frozen=True)
class Goal:
    """`ms` that the row of a report should not exceed."""

    shape: str
    row: dict[str, Any]
    ms: float

    @property
    def cell(self) -> str:
        """The goal, and by how much it is missed."""
        over = self.row["median_ms"] / self.ms - 1
        return f"{self.ms:.1f}, " + ("met" if over <= 0 else f"missed by {100 * over:.0f} %")


def goals(results: Sequence[dict[str, Any]]) -> str:
    """A row for each stored call that has a goal."""
    body = [
        [goal.shape, goal.row["system"], f"{goal.row['median_ms']:.2f}", goal.cell, *components(goal.row, PI0_PARTS)]
        for goal in (*_single(results), *_batched(results))
    ]  # fmt: skip
    said = (
        "Median ms of a whole call of ten steps, of its components, (their floors). Goals are for an H200: portable "
        f"INT8 at most {100 * INT8_OVER_FP8 - 100:.0f} % above portable FP8; a longer prompt at most "
        f"{100 * LONGER_PROMPT - 100:.0f} % above its share of the prefix's tokens; batches for their observations a "
        "second. The first step of a loop of Hopper's kernels is in the time of the KV cache."
    )
    return rows(["call", "system", "ms", "goal", *component_header(PI0_PARTS)], body) + f"\n{said}\n"


def _single(results: Sequence[dict[str, Any]]) -> Iterator[Goal]:
    shown = list(timed_calls(results))
    found = {(shape, row["system"]): row for shape, _, row in shown}
    for shape, result, row in shown:
        ms = _ms(result, row, lambda other, system: found.get((other, system)))
        if ms is not None and row["parts_ms"] and not result.get("camera"):
            yield Goal(shape, row, ms)


def _batched(results: Sequence[dict[str, Any]]) -> Iterator[Goal]:
    """Of the run with the most batches."""
    mine = [r for r in published(results) if _sizes(r) == SHORT and not r.get("prompt_tokens") and not r.get("camera")]
    for row in batched(mine[0]) if mine else ():
        batch = row["batch"]
        if row["system"] == "native-fp8" and batch in PER_SECOND:
            yield Goal(f"{shape_of(mine[0])}, batch {batch}", row, 1e3 * batch / PER_SECOND[batch])


def _sizes(result: dict[str, Any]) -> tuple[str, int, int]:
    model = result["model"]
    return model["kind"], model["views"], model["action_horizon"]


def _ms(
    result: dict[str, Any], row: dict[str, Any], found: Callable[[str, str], dict[str, Any] | None]
) -> float | None:
    """What a call should take at most; None where nothing is said of it. `found`: the row of a shape and system."""
    model, tokens = result["model"], result.get("prompt_tokens")
    if tokens:
        ordinary = found(shape_of({"model": model}), row["system"])
        images = IMAGE_TOKENS * model["views"]
        share = (images + tokens) / (images + ORDINARY_TOKENS)
        return None if ordinary is None else LONGER_PROMPT * share * ordinary["median_ms"]
    if row["system"] == "portable-int8" and _sizes(result) == SHORT:
        fp8 = found(shape_of(result), "portable-fp8")
        return None if fp8 is None else INT8_OVER_FP8 * fp8["median_ms"]
    return GOALS.get(_sizes(result), {}).get(row["system"])
