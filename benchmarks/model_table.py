"""README's table: a row a model, put together from the stored runs there are of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.bench_tables import call
from benchmarks.markdown import MODELS, doubt, machines, rows, steps_of
from vla_accel.measure.memory import parameters

BUNDLED = {"demo": "pi05", "smolvla_demo": "smolvla"}
"""The family of a bundled checkpoint."""
HEADER = ["model", "parameters", "a call", "reference", "native, BF16", "FP8", "GPU memory", "FP32 beside it",
          "success"]  # fmt: skip


def models(results: Iterable[Mapping[str, Any]]) -> str:
    """A row for each `vla-accel bench` report of a published size. Other results say more of these models: agreement
    with openpi's and lerobot's code at full size, and `python -m eval.paired` of the bundled checkpoints."""
    benches, agreement, played = [], {}, {}
    for result in results:
        if "policies" in result:
            played |= dict(_native(result))
        elif "rows" in result:
            benches.append(result)
        else:
            agreement |= _agreement(result)
    body = [_row(bench, agreement, played) for bench in benches]
    where = machines((MODELS[b["model"]["kind"]], b) for b in benches)
    text = (
        "Median ms of a whole call at the published size, NumPy in to NumPy out, random weights, and how many times as "
        "fast as the reference, the field's own PyTorch code in the same run, or, where none took turns, ours in "
        "eager. FP32 beside it: largest difference of final actions from that code's, on equal weights. Success: of "
        "the bundled checkpoint, small and trained here, in BF16"
    )
    return rows(HEADER, body) + f"\n{text}. {where}.\n"


def _row(bench: Mapping[str, Any], agreement: Mapping[str, Any], played: Mapping[str, str]) -> list[str]:
    model, kind = bench["model"], bench["model"]["kind"]
    steps = bench["rows"][0]["steps"]
    found = {r["system"]: r for r in bench["rows"] if r["steps"] == steps}
    others = {name: row for name, row in found.items() if name.partition("-")[0] in ("openpi", "lerobot")}
    if not others and "eager" in found:
        others = {"ours-eager": found["eager"]}
    count, difference = agreement.get(kind, (None, "-"))
    return [
        MODELS[kind],
        _size(count or parameters(kind)),
        f"{model['views']} views, {model['action_horizon']} actions, {steps_of(kind, steps)}",
        "; ".join(f"{row['median_ms']:.2f} ({name.replace('-', ', ', 1)})" for name, row in others.items()) or "-",
        call(found.get("native-bf16")),
        call(found.get("native-fp8")),
        _memory(found.get("native-bf16")),
        difference,
        played.get(kind, "-"),
    ]


def _memory(row: Mapping[str, Any] | None) -> str:
    """Of the native policy in BF16, at its largest while it ran."""
    memory = row and row.get("memory")
    return f"{memory.get('peak_running', memory['total']) / 1e9:.1f} GB" if memory else "-"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _agreement(result: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """By family: parameters, and the largest difference over all cases, of those compared at their published size."""
    found = result.get("models") or {kind: result[kind] for kind in ("pi0", "pi05")}
    found = {kind: one for kind, one in found.items() if one.get("size") != "small"}
    told = {}
    for kind, one in found.items():
        cases = one.get("cases") or [one["batch1"], one["batch3"]]
        told[kind] = (one["parameters"], f"{max(case['float32_max'] for case in cases):.1e}")
    return told


def _native(pairs: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for row in pairs["rows"]:
        kind = BUNDLED.get(pairs["policies"].get(row["name"], {}).get("policy"))
        if kind and row["name"] == "native" and row["other"]["rate"] is not None:
            rate, run = row["other"], pairs["policies"][row["name"]]
            said = doubt(run["policy"], run.get("weights"))
            yield kind, f"{100 * rate['rate']:.1f} % of {rate['episodes']}" + (f" ({said})" if said else "")
