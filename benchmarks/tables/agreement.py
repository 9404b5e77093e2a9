"""Tables of agreement: with FP32 eager, and with the original code of openpi and lerobot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.tables.success import stress_of
from benchmarks.tables.table import (
    MODELS,
    Row,
    Table,
    blocks,
    columns,
    doubts,
    filled,
    machine,
    machines,
    of,
    with_interval,
)
from vla_accel.measure.proportion import wilson
from vla_accel.report.conditions import fell_back


def _chunks(report: Row) -> int:
    return report["observations"] * report["draws"]


# -- what each configuration keeps --------------------------------------------------------------------------------


def _split(results: Sequence[Any]) -> tuple[list[Row], list[Row], list[Row]]:
    """Parity reports of the bundled checkpoint, paired runs, and paired runs under stress."""
    demo = list({report["name"]: report for report in results[0] if report["weights"] == "demo"}.values())
    plain, stressed = ([run for run in results[1:] if bool(stress_of(run)) is hard] for hard in (False, True))
    return demo, plain, stressed


def _quality(results: Sequence[Any]) -> Iterator[dict[str, str]]:
    """`results`: a list of the `vla-accel parity` reports, and runs of `python -m eval.paired` whose policies are named
    like the reports; the first of them is not under stress."""
    demo, *played = _split(results)
    found = [{row["name"]: row for run in runs for row in run["rows"]} for runs in played]
    references = [next(iter(rows.values()))["reference"] if rows else None for rows in found]
    first = played[0][0]["reference"]
    yield {"name": first, "cosine": "1", "flips": "0", **_rates(references, [None, None])}
    for report in demo:
        cosine = filled("{rest_cosine:.4f}", report) + f", {report['threshold']:g} needed"
        mine = [rows.get(report["name"]) for rows in found]
        yield {
            "name": report["name"],
            "cosine": cosine + ("" if report["passed"] else ", **too little**"),
            "flips": f"{report['flipped']} of {_chunks(report)}",
            **_rates([row and row["other"] for row in mine], mine),
        }


def _rates(rates: Sequence[Row | None], pairs: Sequence[Row | None]) -> dict[str, str]:
    return {
        **{f"rate{i}": with_interval(rate) if rate else "-" for i, rate in enumerate(rates)},
        **{f"pairs{i}": filled("{lost} / {gained} of {pairs}", row or {}) for i, row in enumerate(pairs)},
    }


def _quality_note(results: Sequence[Any]) -> str:
    demo, plain, stressed = _split(results)
    reference, suite = plain[0]["reference"], plain[0]["protocol"]["suite"]
    text = (
        f"The bundled checkpoint, compared with {reference}. Flips: chunks of actions in which the command of the "
        f"gripper is the opposite; the cosine leaves them out. Success: on equal episodes of {suite}; lost: episodes "
        f"that only {reference} won, gained: episodes that only the configuration won"
    )
    text += f"; stress: {stress_of(stressed[0])}" if stressed else ""
    text += "; portable: kernels for GPUs other than Hopper" if any("portable" in r["name"] for r in demo) else ""
    made = [("agreement", "demo", report.get("fingerprint")) for report in demo]
    runs = [run for result in results[1:] for run in result["policies"].values()]
    made += [("success", run["policy"], run.get("weights")) for run in runs]
    return f"{text}. [Results](docs/results.md) has the runs.{doubts(made)}"


quality = Table(
    "configuration = `{name}` | cosine of the final actions = {cosine} | flips = {flips} | "
    "success (95 %) = {rate0} | lost / gained = {pairs0} | under stress (95 %) = {rate1} | "
    "lost / gained under stress = {pairs1}",
    _quality,
    _quality_note,
)

# -- parity reports -----------------------------------------------------------------------------------------------


def _parity(results: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for report in sorted(results, key=lambda r: (r["weights"], r["name"], -r["num_steps"])):
        draws = f" × {report['draws']}" if report.get("draws", 1) > 1 else ""
        low, high = wilson(report["flipped"], _chunks(report))
        yield {
            **report,
            "name": report["name"] + fell_back(report["engines"]),
            "count": f"{report['observations']} {'recorded' if report['recorded'] else 'random'}{draws}",
            "flips": f"{report['flipped']} ({100 * low:.1f} to {100 * high:.1f} %)",
            "agrees": "yes" if report["passed"] else "**no**",
        }


def _parity_note(results: Sequence[Row]) -> str:
    where = machines((f"{r['name']} ({r['weights']})", r) for r in results)
    old = doubts((r["name"], r["weights"], r.get("fingerprint")) for r in results)
    return (
        "Cosine of the final actions with FP32 eager: over the chunks in which no command (of the gripper) flipped, "
        "which is what must reach the threshold; with the flipped chunks; of the median chunk and of the worst. Max "
        "error: in the robot's units. Sensitivity: how much another observation changes the reference's actions, as a "
        "share of their norm; the error is on the same scale. Flipped: chunks in which a command is the opposite, with "
        "the 95 % interval of their share, of which at most 1 % is allowed, as far as the interval can tell. "
        f"{where}.{old}"
    )


parity = Table(
    "configuration = {name} | weights = {weights} | observations = {count} | steps = {num_steps} | "
    "cosine = {rest_cosine:.6f} | needed = {threshold:g} | with flips = {actions[cosine]:.6f} | "
    "median = {actions[median_cosine]:.6f} | worst = {actions[worst_cosine]:.6f} | "
    "max error = {robot_actions[max_error]:.1e} | sensitivity = {sensitivity:.1%} | "
    "error = {relative_error:.1%} | flipped = {flips} | agrees = {agrees}",
    _parity,
    _parity_note,
)

# -- the code of others -------------------------------------------------------------------------------------------

openpi_agreement = Table(
    "model = {kind} | batch = {batch} | rms of the actions = {actions_rms:.2f} | "
    "FP32, largest difference = {float32_max:.1e} | our BF16 = {bfloat16_rms_to_float32:.1e} | "
    "openpi's BF16 = {openpi_bfloat16_rms_to_float32:.1e}",
    lambda result: [
        {"kind": kind, "batch": batch, **result[kind][f"batch{batch}"]} for kind in ("pi0", "pi05") for batch in (1, 3)
    ],
    lambda result: f"BF16: rms difference from FP32. {result['gpu']}; {result['software']}.",
)


def _lerobot_note(result: Row) -> str:
    models = result["models"].values()
    versions = {", ".join(f"{name} {v}" for name, v in sorted(model["versions"].items())) for model in models}
    return (
        "BF16: weights in BF16; autocast: weights and sums in FP32, as lerobot runs GR00T; rms difference from lerobot "
        f"in FP32. Compared with {'; '.join(sorted(versions))}. Ours: {machine(result)}."
    )


lerobot_agreement = Table(
    {
        "model": "{model}",
        **of(("case", "batch", "views", "steps"), "{@}"),
        **columns(
            "rms of the actions = {actions_rms:.2f} | FP32, largest difference = {float32_max:.1e} | "
            "our BF16 = {bfloat16_rms_to_float32:.1e} | lerobot's BF16 = {lerobot_bfloat16_rms_to_float32:.1e} | "
            "lerobot's autocast = {lerobot_autocast_rms_to_float32:.1e}"
        ),
    },
    lambda result: [
        {"model": MODELS[kind] + (", small" if model.get("size") == "small" else ""), **case}
        for kind, model in result["models"].items()
        for case in model["cases"]
    ],
    _lerobot_note,
)

# -- accumulation in FP8 ------------------------------------------------------------------------------------------

SUMS = (
    "exact, rounded to BF16",
    "cuBLAS, fast accumulation, float32 out",
    "cuBLAS, without it, float32 out",
    "cuBLAS, fast accumulation, bfloat16 out",
    "cuBLAS, without it, bfloat16 out",
)
"""As `benchmarks.accumulation` names them."""

fp8_sums = blocks(
    Table(
        {
            "product": "{product}, {rows} × {n} × {k}",
            "operands": "{operands}",
            **of(SUMS, "{error[@]:.2f}"),
        },
        lambda result: [
            {**one, "error": {way["way"]: 1e3 * way["error"] for way in one["ways"]}} for one in result["products"]
        ],
        "Rms error of E4M3 products, in thousandths, compared with exact products of the same operands.",
    ),
    Table(
        {
            "in FP8": lambda row: ", ".join(row["fp8"]),
            **columns(
                "accumulation = {way} | cosine of the final actions = {judged_cosine:.5f} | "
                "flips = {flipped} of {chunks}"
            ),
        },
        lambda result: result["actions"],
        lambda result: f"The bundled checkpoint compared with FP32 on images of {result['images']}. {machine(result)}.",
    ),
)
