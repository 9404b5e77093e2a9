"""Tables of runs next to other projects' code: lerobot's policy objects (`benchmarks.time_attach`), and FastWAM's text
encoder (`benchmarks.time_prompts`)."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.table import MODELS, NOT_STORED, Row, command, machine, plural, table

PRECISIONS = {"pi05": "BF16", "pi05_fp32": "float32"}
"""Precisions of the objects of models that are timed in several."""

ENCODERS = {
    "ours": "vla_accel, the instruction alone",
    "transformers": "transformers, 128 tokens as in lerobot",
}


def attach(result: Row | None) -> str:
    """A row for each policy object."""
    if result is None:
        return NOT_STORED
    made = result["settings"]
    return table(
        "policy = {name} | lerobot = {lerobot[p50_ms]:.2f} | attached = {attached[p50_ms]:.2f}, {speed_up:.1f}× | "
        "difference = {difference:.1e} | first call = {first_call_s:.0f} s | GPU memory = {memory[lerobot]:.1f} GB | "
        "attached, GPU memory = {memory[attached]:.1f} GB",
        map(_named, result["rows"]),
        f"Median ms of `predict_action_chunk`, {plural(made['calls'], 'call')} each, from a batch on the GPU to "
        f"actions on the host; {plural(made['steps'], 'step')}, {plural(made['horizon'], 'action')}, "
        f"{plural(made['cameras'], 'camera')}, random weights. Speed-up: over the same object without `attach`, in the "
        "same process. Difference: `attached.difference`. First call: it computes both answers and builds the engines. "
        f"{machine(result)}; {command(result)}.",
    )


def prompts(result: Row | None) -> str:
    """A row for each text encoder."""
    if result is None:
        return NOT_STORED
    return table(
        "encoder = {encoder} | ms = {p50_ms:.2f} | p90 = {p90_ms:.2f}",
        [{**row, "encoder": ENCODERS[row["encoder"]]} for row in result["rows"]],
        f"An instruction of {plural(result['tokens'], 'token')}, random weights of the published size in BF16, median "
        f"of {plural(result['calls'], 'call')} each, in turns. {machine(result)}; {command(result)}.",
    )


def _named(row: Row) -> dict[str, Any]:
    model = row["model"]
    name = ", ".join(filter(None, (MODELS[model.removesuffix("_fp32")], PRECISIONS.get(model))))
    memory = {key: value / 1e9 for key, value in row["memory"].items()} if "memory" in row else None
    return {**dict.fromkeys(("attached", "speed_up", "difference")), **row, "name": name, "memory": memory}
