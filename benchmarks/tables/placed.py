"""The table of goals for calls with the checkpoint's own steps and with fewer, from the `goals_*` runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.tables.bench import batched
from benchmarks.tables.shapes import shape_of
from benchmarks.tables.table import NOT_STORED, Row, machines, steps_of, table

GOALS: dict[tuple[str, int, int], dict[tuple[str, int], float]] = {
    ("pi05", 2, 10): {
        ("native-bf16", 10): 7.6, ("native-fp8", 10): 6.4, ("native-fp8-vision", 10): 6.0,
        ("native-bf16", 3): 5.3, ("native-fp8", 3): 4.1, ("native-fp8-vision", 3): 3.8,
        ("portable-bf16", 10): 9.0, ("portable-bf16", 3): 6.5,
    },
    ("pi05", 3, 50): {
        ("native-fp8", 10): 10.0, ("native-fp8", 3): 6.3, ("portable-fp8", 10): 13.0, ("portable-fp8", 3): 7.5,
    },
    ("pi0", 3, 50): {("native-fp8", 10): 10.0, ("native-fp8", 3): 6.3},
    ("smolvla", 2, 50): {("native-bf16", 10): 4.3, ("native-bf16", 3): 2.6},
    ("groot", 2, 40): {("native-bf16", 4): 7.0, ("native-bf16", 2): 5.0},
}  # fmt: skip
"""Ms of a whole call on an H200, by model, views and actions, and by system and steps."""
TOKEN_GOALS = {"native-bf16": 1.2, "native-fp8-decode": 0.8, "native-int8-decode": 0.8}
"""Ms a token of π0-FAST on an H200, by system."""
PER_SECOND = {16: 420, 32: 420}
"""Observations a second of π0.5 in `native-fp8` with three steps, by batch."""
RUNS = tuple(
    f"goals_{name}_{{gpu}}"
    for name in (
        "pi05",
        "pi05_long",
        "pi0_long",
        "smolvla",
        "groot",
        "pi0_fast",
        "portable",
        "portable_long",
        "batches",
    )
)
"""The stored runs that the table reads; see `benchmarks.jobs.goals`."""


def _rows(results: Sequence[Row]) -> Iterator[dict[str, Any]]:
    seen = set()
    for result in results:
        model, shape = result["model"], shape_of(result)
        kind = model["kind"]
        goals = GOALS.get((kind, model["views"], model["action_horizon"]), {})
        for row in result["rows"]:
            found = {"call": shape, "steps": steps_of(kind, row["steps"]), **row, "unit": "ms"}
            if kind == "pi0_fast":
                floor = (row["floors_ms"] or {}).get("decode")
                token = {"total": floor / row["steps"]} if floor else None
                found |= {"steps": "a token", "median_ms": row["step_ms"], "floors_ms": token}
                goal = TOKEN_GOALS.get(row["system"])
            else:
                goal = goals.get((row["system"], row["steps"]))
            key = (shape, row["system"], row["steps"])
            if goal is not None and key not in seen:
                seen.add(key)
                yield found | {"goal": goal, "over": found["median_ms"] / goal - 1}
        for row in batched(result):
            if (goal := PER_SECOND.get(row["batch"])) and row["system"] == "native-fp8" and row["steps"] == 3:
                call = f"{shape}, batch {row['batch']}"
                yield {
                    **row, "call": call, "steps": "3 steps", "median_ms": row["per_second"],
                    "unit": "observations/s", "goal": goal, "over": goal / row["per_second"] - 1,
                }  # fmt: skip


def _met(row: Row) -> str:
    return "met" if row["over"] <= 0 else f"missed by {100 * row['over']:.0f} %"


def placed_goals(results: Sequence[Row | None]) -> str:
    """Each call with a goal for its number of steps, and whether the goal is met."""
    stored = [result for result in results if result]
    if not stored:
        return NOT_STORED
    where = machines((shape_of(result), result) for result in stored)
    columns = {
        "call": "{call}", "system": "{system}", "steps": "{steps}", "median": "{median_ms:.2f} {unit}",
        "floor ms": lambda row: f"{row['floors_ms']['total']:.2f}" if row.get("floors_ms") else "-",
        "goal": "{goal} {unit}", "result": _met,
    }  # fmt: skip
    note = (
        "Median of a whole call, with random weights of the published size. The goals are for an H200. The times at "
        f"which the steps lie do not change the duration of a call. {where}."
    )
    return table(columns, _rows(stored), note)
