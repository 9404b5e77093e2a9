"""Tables of agreement: with FP32 eager, and with the original code of openpi and lerobot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.tables.success import stress_of
from benchmarks.tables.table import MODELS, Row, blocks, doubts, filled, machine, machines, of, table, with_interval
from vla_accel.measure.proportion import wilson
from vla_accel.report.conditions import fell_back


def _chunks(report: Row) -> int:
    return report["observations"] * report["draws"]


def quality(results: Sequence[Any]) -> str:
    """What each configuration keeps. `results`: a list of the `vla-accel parity` reports, and runs of `python -m
    eval.paired` whose policies are named like the reports; the first of them is not under stress."""
    demo = list({report["name"]: report for report in results[0] if report["weights"] == "demo"}.values())
    plain, stressed = ([run for run in results[1:] if bool(stress_of(run)) is hard] for hard in (False, True))
    found = [{row["name"]: row for run in runs for row in run["rows"]} for runs in (plain, stressed)]
    reference, suite = plain[0]["reference"], plain[0]["protocol"]["suite"]
    rates = [next(iter(rows.values()))["reference"] if rows else None for rows in found]
    rows = [{"name": reference, "cosine": "1", "flips": "0", **_rates(rates, [None, None])}]
    for report in demo:
        cosine = filled("{rest_cosine:.4f}", report) + f", {report['threshold']:g} needed"
        mine = [rows.get(report["name"]) for rows in found]
        row = {
            "name": report["name"],
            "cosine": cosine + ("" if report["passed"] else ", **too little**"),
            "flips": f"{report['flipped']} of {_chunks(report)}",
            **_rates([row and row["other"] for row in mine], mine),
        }
        rows.append(row)
    stress = f"; stress: {stress_of(stressed[0])}" if stressed else ""
    portable = "; portable: kernels for GPUs other than Hopper" if any("portable" in r["name"] for r in demo) else ""
    made = [("agreement", "demo", report.get("fingerprint")) for report in demo]
    runs = [run for result in results[1:] for run in result["policies"].values()]
    made += [("success", run["policy"], run.get("weights")) for run in runs]
    return table(
        "configuration = `{name}` | cosine of the final actions = {cosine} | flips = {flips} | "
        "success (95 %) = {rate0} | regressions / improvements = {pairs0} | under stress (95 %) = {rate1} | "
        "regressions / improvements under stress = {pairs1}",
        rows,
        f"The bundled checkpoint, compared with {reference}. Flips: chunks of actions in which the command of the "
        f"gripper is the opposite; the cosine excludes them. Success: on the same episodes of {suite}; regressions: "
        f"episodes that only {reference} won; improvements: episodes that only the configuration won{stress}{portable}."
        f"{doubts(made)}",
    )


def _rates(rates: Sequence[Row | None], pairs: Sequence[Row | None]) -> dict[str, str]:
    return {
        **{f"rate{i}": with_interval(rate) if rate else "-" for i, rate in enumerate(rates)},
        **{f"pairs{i}": filled("{lost} / {gained} of {pairs}", row or {}) for i, row in enumerate(pairs)},
    }


def parity(results: Sequence[Row]) -> str:
    """The `vla-accel parity` reports."""
    rows = []
    for report in sorted(results, key=lambda r: (r["weights"], r["name"], -r["num_steps"])):
        draws = f" × {report['draws']}" if report.get("draws", 1) > 1 else ""
        low, high = wilson(report["flipped"], _chunks(report))
        more = {
            "name": report["name"] + fell_back(report["engines"]),
            "count": f"{report['observations']} {'recorded' if report['recorded'] else 'random'}{draws}",
            "flips": f"{report['flipped']} ({100 * low:.1f} to {100 * high:.1f} %)",
            "agrees": "yes" if report["passed"] else "**no**",
            "needed": filled("{threshold:g}", report),
            "allowed": filled("{relative_threshold:.1%}", report),
            "eager": filled("{eager_error:.1%}", report),
        }
        rows.append({**report, **more})
    where = machines((f"{r['name']} ({r['weights']})", r) for r in results)
    old = doubts((r["name"], r["weights"], r.get("fingerprint")) for r in results)
    return table(
        "configuration = {name} | weights = {weights} | observations = {count} | steps = {num_steps} | "
        "cosine = {rest_cosine:.6f} | needed = {needed} | with flips = {actions[cosine]:.6f} | "
        "median = {actions[median_cosine]:.6f} | worst = {actions[worst_cosine]:.6f} | "
        "max error = {robot_actions[max_error]:.1e} | sensitivity = {sensitivity:.1%} | "
        "error = {relative_error:.1%} | allowed = {allowed} | eager = {eager} | flipped = {flips} | "
        "agrees = {agrees}",
        rows,
        "Cosine: of the final actions with FP32 eager, over all chunks without a flipped command; it must reach the "
        "number in the column needed. With flips: over all chunks. Median, worst: of single chunks. Max error: in the "
        "robot's units. Sensitivity: how much another observation changes the reference's actions, relative to their "
        "norm. Error: of the configuration, in units of that change; it must not exceed the number in the column "
        "allowed. Eager: with random weights, the error of eager in the same dtype, which may raise that limit; older "
        "runs lack it. Flipped: chunks in which a command, such as the gripper's, is the opposite of the reference's, "
        "with the 95 % interval of their share, which must not begin above 1 %. "
        f"{where}.{old}",
    )


def openpi_agreement(result: Row) -> str:
    """Final actions of our code and openpi's on equal weights."""
    return table(
        "model = {kind} | batch = {batch} | rms of the actions = {actions_rms:.2f} | "
        "FP32, largest difference = {float32_max:.1e} | our BF16 = {bfloat16_rms_to_float32:.1e} | "
        "openpi's BF16 = {openpi_bfloat16_rms_to_float32:.1e}",
        [{"kind": kind, "batch": n, **result[kind][f"batch{n}"]} for kind in ("pi0", "pi05") for n in (1, 3)],
        f"BF16: rms difference from FP32. {result['gpu']}; {result['software']}.",
    )


def lerobot_agreement(result: Row) -> str:
    """Final actions of our code and lerobot's on equal weights."""
    models = result["models"].values()
    versions = {", ".join(f"{name} {v}" for name, v in sorted(model["versions"].items())) for model in models}
    return table(
        "model = {model} | case = {case} | batch = {batch} | views = {views} | steps = {steps} | "
        "rms of the actions = {actions_rms:.2f} | FP32, largest difference = {float32_max:.1e} | "
        "our BF16 = {bfloat16_rms_to_float32:.1e} | lerobot's BF16 = {lerobot_bfloat16_rms_to_float32:.1e} | "
        "lerobot's autocast = {lerobot_autocast_rms_to_float32:.1e}",
        [
            {"model": MODELS[kind] + (", small" if model.get("size") == "small" else ""), **case}
            for kind, model in result["models"].items()
            for case in model["cases"]
        ],
        "BF16: weights in BF16; autocast: weights and sums in FP32, as lerobot runs GR00T; rms difference from lerobot "
        f"in FP32. Compared with {'; '.join(sorted(versions))}. Ours: {machine(result)}.",
    )


SUMS = (
    "exact, rounded to BF16",
    "cuBLAS, fast accumulation, float32 out",
    "cuBLAS, without it, float32 out",
    "cuBLAS, fast accumulation, bfloat16 out",
    "cuBLAS, without it, bfloat16 out",
)
"""As `benchmarks.accumulation` names them."""


def fp8_sums(result: Row) -> str:
    """Sums in FP8 products, and their effect on the final actions."""
    errors = [{way["way"]: 1e3 * way["error"] for way in one["ways"]} for one in result["products"]]
    product = {"product": "{product}, {rows} × {n} × {k}", "operands": "{operands}", **of(SUMS, "{error[@]:.2f}")}
    return blocks(
        table(
            product,
            [{**one, "error": error} for one, error in zip(result["products"], errors, strict=True)],
            "Rms error of E4M3 products, in thousandths, compared with exact products of the same operands.",
        ),
        table(
            "in FP8 = {parts} | accumulation = {way} | cosine of the final actions = {judged_cosine:.5f} | "
            "flips = {flipped} of {chunks}",
            [{**row, "parts": ", ".join(row["fp8"])} for row in result["actions"]],
            f"The bundled checkpoint compared with FP32 on images of {result['images']}. {machine(result)}.",
        ),
    )
