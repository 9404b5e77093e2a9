"""Tables of agreement: with FP32 eager, and with openpi's and lerobot's own code."""

from __future__ import annotations

from typing import Any

from benchmarks.libero_tables import stress_of, with_interval
from benchmarks.markdown import MODELS, doubts, machine, machines, percent, rows
from vla_accel.measure.proportion import wilson
from vla_accel.report.conditions import fell_back


def quality(results: list[Any]) -> str:
    """What each configuration keeps of the bundled checkpoint: agreement of its actions, and success on equal episodes.

    `results`: the `vla-accel parity` reports, and runs of `python -m eval.paired` of the same configurations' names,
    the first not under stress.
    """
    reports, runs = results[0], results[1:]
    pairs, under_stress = ([r for r in runs if bool(stress_of(r)) is hard] for hard in (False, True))
    demo = {r["name"]: r for r in reports if r["weights"] == "demo"}
    reference = pairs[0]["reference"]
    played = [{r["name"]: r for run in runs for r in run["rows"]} for runs in (pairs, under_stress)]
    body = [[f"`{reference}`", "1", "0"]]
    for found in played:
        body[0] += [with_interval(next(iter(found.values()))["reference"]) if found else "-", "-"]
    for name, report in demo.items():
        agrees = "" if report["passed"] else ", **too little**"
        cosine = f"{_rest(report, digits=4)}, {report['threshold']:g} needed{agrees}"
        body.append([f"`{name}`", cosine, f"{report['flipped']} of {_chunks(report)}"])
        for found in played:
            row = found.get(name)
            episodes = "-" if row is None else f"{row['lost']} / {row['gained']} of {row['pairs']}"
            body[-1] += ["-" if row is None else with_interval(row["other"]), episodes]
    header = ["configuration", "cosine of the final actions", "flips"]
    header += ["success (95 %)", "lost / gained", "under stress (95 %)", "lost / gained"]
    text = f"The bundled checkpoint, beside {reference}; flips: chunks of actions in which the gripper's command fell "
    suite = pairs[0]["protocol"]["suite"]
    text += f"the other way, which the cosine leaves out; success on the same episodes of {suite}; lost: those that "
    text += f"only {reference} won, gained: those that only the configuration won"
    text += f"; stress: {stress_of(under_stress[0])}" if under_stress else ""
    text += "; portable: with the kernels of GPUs other than Hopper's" if any("portable" in n for n in demo) else ""
    made = [("agreement", "demo", r.get("fingerprint")) for r in demo.values()]
    made += [("success", p["policy"], p.get("weights")) for run in runs for p in run["policies"].values()]
    return rows(header, body) + f"\n{text}. [Results](docs/results.md) has the runs.{doubts(made)}\n"


def openpi_agreement(result: dict[str, Any]) -> str:
    """`tests/parity/compare_with_openpi.py` at full size: final actions of both codes on the same weights."""
    body = []
    for kind in ("pi0", "pi05"):
        for name in ("batch1", "batch3"):
            one, batch = result[kind][name], name.removeprefix("batch")
            errors = ("float32_max", "bfloat16_rms_to_float32", "openpi_bfloat16_rms_to_float32")
            body.append([kind, batch, f"{one['actions_rms']:.2f}", *(f"{one[e]:.1e}" for e in errors)])
    header = ["model", "batch", "rms of the actions", "FP32, largest difference", "our BF16", "openpi's BF16"]
    return rows(header, body) + f"\nBF16: rms difference from FP32. {result['gpu']}; {result['software']}.\n"


def lerobot_agreement(result: dict[str, Any]) -> str:
    """`tests/parity/compare_with_lerobot.py`: final actions of both codes on the same weights."""
    low = [f"{whose}_rms_to_float32" for whose in ("bfloat16", "lerobot_bfloat16", "lerobot_autocast")]
    body = []
    for kind, model in result["models"].items():
        name = MODELS[kind] + (", small" if model.get("size") == "small" else "")
        for row in model["cases"]:
            about = (name, row["case"], row["batch"], row["views"], row["steps"], f"{row['actions_rms']:.2f}")
            rounded = [f"{row[n]:.1e}" if n in row else "-" for n in low]
            body.append([*map(str, about), f"{row['float32_max']:.1e}", *rounded])
    header = ["model", "case", "batch", "views", "steps", "rms of the actions", "FP32, largest difference"]
    header += ["our BF16", "lerobot's BF16", "lerobot's autocast"]
    beside = {", ".join(f"{n} {v}" for n, v in sorted(m["versions"].items())) for m in result["models"].values()}
    text = "BF16: with weights in BF16; autocast: with weights and sums in FP32, as lerobot's policy runs GR00T; rms "
    text += f"difference from lerobot's FP32. Beside {'; '.join(sorted(beside))}. Ours: {machine(result)}."
    return rows(header, body) + f"\n{text}\n"


def parity(results: list[dict[str, Any]]) -> str:
    """Several `vla-accel parity` reports, a row each."""
    body = []
    for r in sorted(results, key=lambda r: (r["weights"], r["name"], -r["num_steps"])):
        body.append([
            r["name"] + fell_back(r["engines"]),
            r["weights"],
            f"{r['observations']} {'recorded' if r['recorded'] else 'random'}"
            + (f" × {r['draws']}" if r.get("draws", 1) > 1 else ""),
            str(r["num_steps"]),
            _rest(r),
            f"{r['threshold']:g}",
            f"{r['actions']['cosine']:.6f}",
            f"{r['actions']['median_cosine']:.6f}",
            f"{r['actions']['worst_cosine']:.6f}",
            f"{r['robot_actions']['max_error']:.1e}",
            *(percent(r.get(key)) for key in ("sensitivity", "relative_error")),
            _flips(r),
            "yes" if r["passed"] else "**no**",
        ])  # fmt: skip
    cosines = ["cosine", "needed", "with flips", "median", "worst"]
    more = ["another observation", "error beside that", "flipped"]
    header = ["configuration", "weights", "observations", "steps", *cosines, "max error", *more, "agrees"]
    where = machines((f"{r['name']} ({r['weights']})", r) for r in results)
    text = (
        "Cosine of the final actions with FP32 eager: of the chunks in which no command (the gripper's) fell the other "
        "way, which is what is judged; with the others; of the median one and of the worst. Largest error in the "
        "robot's units; another observation: how much it changes the reference's actions, as a share of their norm; "
        "flipped: chunks in which a command fell the other way, with the 95 % interval of their share, at most 1 % of "
        "them as far as the interval can tell."
    )
    old = doubts((r["name"], r["weights"], r.get("fingerprint")) for r in results)
    return rows(header, body) + f"\n{text} {where}.{old}\n"


def _chunks(report: dict[str, Any]) -> int:
    return report["observations"] * report["draws"]


def _flips(report: dict[str, Any]) -> str:
    low, high = wilson(report["flipped"], _chunks(report))
    return f"{report['flipped']} ({100 * low:.1f} to {100 * high:.1f} %)"


def _rest(report: dict[str, Any], digits: int = 6) -> str:
    return "-" if report["rest_cosine"] is None else f"{report['rest_cosine']:.{digits}f}"


def sums(result: dict[str, Any]) -> str:
    """Of `benchmarks.accumulation`: what FP8 products lose by how they are summed, and what that does to actions."""
    ways = ("exact, rounded to BF16", "cuBLAS, fast accumulation, float32 out", "cuBLAS, without it, float32 out",
            "cuBLAS, fast accumulation, bfloat16 out", "cuBLAS, without it, bfloat16 out")  # fmt: skip
    body = []
    for one in result["products"]:
        errors = {way["way"]: way["error"] for way in one["ways"]}
        cells = (f"{1e3 * errors[way]:.2f}" for way in ways)
        body.append([f"{one['product']}, {one['rows']} × {one['n']} × {one['k']}", one["operands"], *cells])
    text = rows(["product", "operands", *ways], body)
    text += "\nrms error of E4M3 products beside exact ones of the same operands, in thousandths.\n\n"
    body = [
        [", ".join(one["fp8"]), one["way"], f"{one['judged_cosine']:.5f}", f"{one['flipped']} of {one['chunks']}"]
        for one in result["actions"]
    ]
    text += rows(["in FP8", "summed", "cosine of the final actions", "flips"], body)
    return f"{text}\nThe bundled checkpoint beside FP32 on images of {result['images']}. {machine(result)}.\n"
