"""Tables of README and docs/ from eval/results: `python -m eval.tables` rewrites them, `--check` fails if one is stale.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; no measured figure is typed by hand. The picture
of README is drawn anew with them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from eval.attention_table import attention
from eval.bench_tables import bench, fell_back, whole_calls
from eval.gpu_table import gpus, memory
from eval.harness.statistics import smallest_difference
from eval.image_tables import autoencoder_sizes, autoencoders, precisions, qwen_images, unets
from eval.late_table import late
from eval.latency_picture import draw
from eval.markdown import MODELS, bare_command, commit, machine, machines, rows
from eval.model_table import models
from eval.paired_picture import PICTURE as STRESS_PICTURE
from eval.server_tables import faults, server, server_gpus
from eval.shapes_table import shapes
from eval.throughput_table import plan, throughput
from eval.tune_table import tune
from vla_accel.measure.proportion import wilson

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"
PICTURE = RESULTS / "latency.svg"
TRAINING = ROOT / "vla_accel" / "assets" / "pi05_demo" / "training.json"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """Rewrite the tables in README.md and docs/, and the picture of README."""

    check: bool = False
    """Change nothing; exit with 1 if a table or the picture differs from the stored results."""


def load(name: str | tuple[str, ...]) -> Any:
    """A stored result; with a * in its name, a list of all that match, and of several names, a list of theirs; with a ?
    behind it, None if it is not stored. Raises FileNotFoundError if none matches."""
    if isinstance(name, tuple):
        return [load(one) for one in name]
    if name.endswith("?"):
        name = name[:-1]
        return load(name) if (RESULTS / f"{name}.json").is_file() else None
    if "*" in name:
        paths = sorted(RESULTS.glob(f"{name}.json"))
        if not paths:
            raise FileNotFoundError(f"eval/results: expected at least one {name}.json, found none")
        return [json.loads(path.read_text()) for path in paths]
    path = TRAINING if name == "training" else RESULTS / f"{name}.json"
    return json.loads(path.read_text())


def success(result: dict[str, Any]) -> str:
    """Success over denoising steps."""
    body = []
    for row in sorted(result["summary"]["rows"], key=lambda r: r["steps"]):
        s = row["success"]
        interval = f"{100 * s['wilson_95_low']:.1f} to {100 * s['wilson_95_high']:.1f} %"
        count = f"{s['successes']}/{s['episodes']}"
        body.append([str(row["steps"]), f"**{100 * s['rate']:.1f} %**", count, interval, str(s["errors"])])
        body += [[f"{row['steps']}, {s['suite']}", *_suite(s)] for s in row.get("suites", ())]
    return rows(["steps", "success", "episodes", "Wilson 95 %", "errors"], body) + "\n" + _where(result)


def _suite(rate: dict[str, Any]) -> list[str]:
    interval = f"{100 * rate['wilson_95_low']:.1f} to {100 * rate['wilson_95_high']:.1f} %"
    share = "-" if rate["rate"] is None else f"{100 * rate['rate']:.1f} %"
    return [share, f"{rate['successes']}/{rate['episodes']}", interval, str(rate["errors"])]


def tasks(result: dict[str, Any]) -> str:
    """Success per task, a column a step count."""
    ordered = sorted(result["summary"]["rows"], key=lambda r: r["steps"])
    header = ["task", *(f"{r['steps']} step{'s' * (r['steps'] > 1)}" for r in ordered)]
    body = [
        [
            " ".join(filter(None, (t.get("suite"), t["task"]))),
            *(f"{r['tasks'][i]['successes']}/{r['tasks'][i]['episodes']}" for r in ordered),
        ]
        for i, t in enumerate(ordered[0]["tasks"])
    ]
    return rows(header, body)


def latency(result: dict[str, Any]) -> str:
    """Components of a call over denoising steps."""
    body = []
    for row in sorted(result["summary"]["rows"], key=lambda r: r["steps"]):
        parts = row["breakdown"]["components"]
        cells = [
            f"{parts[n]['mean_ms']:.1f} ({100 * parts[n]['share']:.0f} %)" for n in ("vision", "kv_cache", "denoise")
        ]
        total = parts["total"]
        hz = f"{1e3 / total['mean_ms']:.1f}"
        body.append([str(row["steps"]), f"{total['mean_ms']:.1f}", f"{total['p50_ms']:.1f}", hz, *cells])
    header = ["steps", "mean ms", "median ms", "Hz", "vision ms", "KV cache ms", "denoise ms"]
    return rows(header, body) + "\n" + _where(result)


def training(record: dict[str, Any]) -> str:
    """How the demo checkpoint was trained, and how far its start states are from the evaluation's."""
    settings, states = record["settings"], record["start_states"]
    last = record["history"][-10:]
    won, played = (sum(line["episodes"]["policy"][i] for line in last) for i in (0, 1))
    manifests = [states] if "tasks" in states else list(states.values())
    started = [task for manifest in manifests for task in manifest["tasks"].values()]
    nearest = min(t["min_distance_m"] for t in started)
    body = [
        [
            "GPUs, wall clock",
            f"{record['gpus']} NVIDIA H200, {record['seconds'] / 60:.1f} minutes, one run from scratch",
        ],
        [
            "steps, batch",
            f"{record['steps']}, {record['gpus'] * settings['batch']} observations x {settings['samples']} draws",
        ],
        ["observations collected", f"about {record['gpus'] * record['history'][-1]['store']}"],
        ["start states", f"{sum(t['count'] for t in started)}, seeds from {min(m['seed'] for m in manifests)}"],
        ["nearest shipped evaluation state", f"{nearest * 1e3:.1f} mm (the object that moved most)"],
        ["success while collecting, at the end", f"{won}/{played} (training start states, with bursts of noise)"],
    ]
    return rows(["demo checkpoint", ""], body)


def builds(result: dict[str, Any]) -> str:
    """The engines of one `vla-accel build`: what they cover, how large and how long. Parts of one name are one row."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for engine in result["engines"]:
        name = re.sub(r"\d+$", "s", engine["name"])
        groups.setdefault((name, engine["target"], engine["precision"]), []).append(engine)
    body = []
    for (name, target, precision), engines in groups.items():
        inside, all_of = (sum(e["coverage"][k] for e in engines) for k in ("in_engine", "operators"))
        seconds = [sum(v for k, v in e["seconds"].items() if k != "verify") for e in engines]
        sizes = [e["bytes"] / 1e6 for e in engines]
        spread = f"{min(sizes):.0f}" if max(sizes) - min(sizes) < 1 else f"{min(sizes):.0f} to {max(sizes):.0f}"
        compared = [e["similarity"] for e in engines if e["similarity"] is not None]
        similar = f"{min(compared):.6f}" if compared else "-"
        targets = ", ".join(f"{t[2:-1]}.{t[-1]}" for t in target.split("+"))
        took = f"{sum(seconds):.0f}"
        body.append([name, targets, precision, f"{inside}/{all_of}", similar, str(len(engines)), spread, took])
    header = ["component", "for", "precision", "operators", "ONNX cosine", "engines", "MB each", "s in all"]
    built_on = result["machine"]
    threads = built_on["cpu_threads"]
    place = built_on["gpu"] or f"no GPU, {threads} CPU thread{'s' * (threads > 1)}"
    library = ", ".join(dict.fromkeys(e["library"] for e in result["engines"]))
    through = next((e["torch_tensorrt"] for e in result["engines"] if e["torch_tensorrt"]), None)
    library += f" through torch-tensorrt {through}" if through else ""
    where = f"{library}, torch {result['software']['torch']}, {place}{commit(result)}; {result['checkpoint']}."
    return rows(header, body) + f"\n{where}\n"


def quality(results: list[Any]) -> str:
    """What each configuration keeps of the bundled checkpoint: agreement of its actions, and success on equal episodes.

    `results`: the `vla-accel parity` reports, and one `python -m eval.paired` of the same configurations' names.
    """
    reports, pairs = results
    demo = {r["name"]: r for r in reports if r["weights"] == "demo"}
    played = {r["name"]: r for r in pairs["rows"]}
    reference = pairs["reference"]
    body = [[f"`{reference}`", "1", _rate(next(iter(played.values()))["reference"]), "-"]]
    for name, report in demo.items():
        agrees = "" if report["passed"] else ", **too little**"
        row = played.get(name)
        episodes = "-" if row is None else f"{row['lost']} / {row['gained']} of {row['pairs']}"
        cosine = f"{report['actions']['cosine']:.4f}, {report['threshold']:g} needed{agrees}"
        body.append([f"`{name}`", cosine, "-" if row is None else _rate(row["other"]), episodes])
    header = ["configuration", "cosine of the final actions", "success (95 %)", "lost / gained"]
    text = f"The bundled checkpoint, beside {reference}; success on the same episodes of {pairs['protocol']['suite']}"
    return rows(header, body) + f"\n{text}. [Results](docs/results.md) has the runs.\n"


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
    """`tests/parity/compare_with_lerobot.py` at the published size: final actions of both codes on the same weights."""
    body = [
        [MODELS[kind], row["case"], str(row["batch"]), str(row["views"]), str(row["steps"]),
         f"{row['actions_rms']:.2f}", f"{row['float32_max']:.1e}"]
        for kind, model in result["models"].items() for row in model["cases"]
    ]  # fmt: skip
    header = ["model", "case", "batch", "views", "steps", "rms of the actions", "FP32, largest difference"]
    beside = {", ".join(f"{n} {v}" for n, v in sorted(m["versions"].items())) for m in result["models"].values()}
    return rows(header, body) + f"\nBeside {'; '.join(sorted(beside))}. Ours: {machine(result)}.\n"


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
            f"{r['actions']['cosine']:.6f}",
            f"{r['threshold']:g}",
            f"{r['actions']['median_cosine']:.6f}",
            f"{r['actions']['worst_cosine']:.6f}",
            f"{r['robot_actions']['max_error']:.1e}",
            *(_percent(r.get(key)) for key in ("sensitivity", "relative_error")),
            *(("-", "-") if "flipped" not in r else (_flips(r), _rest(r))),
            "yes" if r["passed"] else "**no**",
        ])  # fmt: skip
    cosines = ["cosine", "needed", "median", "worst"]
    more = ["another observation", "error beside that", "flipped", "cosine of the rest"]
    header = ["configuration", "weights", "observations", "steps", *cosines, "max error", *more, "agrees"]
    where = machines((f"{r['name']} ({r['weights']})", r) for r in results)
    text = (
        "Cosine of the final actions with FP32 eager, over all observations, of the median one and of the worst; "
        "largest error in the robot's units; another observation: how much it changes the reference's actions, as a "
        "share of their norm; flipped: chunks in which a command (the gripper's) fell the other way, with the 95 % "
        "interval of their share."
    )
    return rows(header, body) + f"\n{text} {where}.\n"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _flips(report: dict[str, Any]) -> str:
    low, high = wilson(report["flipped"], report["observations"] * report.get("draws", 1))
    return f"{report['flipped']} ({100 * low:.1f} to {100 * high:.1f} %)"


def _rest(report: dict[str, Any]) -> str:
    return "-" if report["rest_cosine"] is None else f"{report['rest_cosine']:.6f}"


def paired(result: dict[str, Any]) -> str:
    """One `python -m eval.paired`: success of several policies on the same episodes."""
    body = []
    for row in sorted(result["rows"], key=lambda r: r["steps"] or 0):
        steps, name = str(row["steps"] or "-"), row["name"]
        first, second = row["reference"], row["other"]
        body.append([
            name + fell_back(result["policies"][name]["engines"]),
            steps,
            _rate(second),
            _rate(first),
            str(row["pairs"]),
            f"{row['lost']} / {row['gained']}",
            f"{p:.3f}" if (p := row["mcnemar_exact_p"]) >= 0.001 else "< 0.001",
            _percent(smallest_difference(row["pairs"], row["lost"] + row["gained"])),
            f"{second['errors']}, {first['errors']}",
        ])  # fmt: skip
    reference = result["reference"]
    header = [
        "run",
        "steps",
        "success (95 %)",
        f"{reference} (95 %)",
        "pairs",
        "lost / gained",
        "p",
        "could see",
        "errors",
    ]
    where = machines(result["policies"].items())
    note = f" {result['note']}" if result.get("note") else ""
    text = (
        f"Same tasks, initial states and seeds. Lost: pairs that only {reference} won; gained: pairs that only the run "
        "did; p: McNemar's exact test, two-sided; could see: the smallest true difference that such a run finds at 5 % "
        "in four of five cases; intervals: Wilson. A pair with a crash is an error, not compared."
    )
    return rows(header, body) + f"\n{text} {where}; `{bare_command(result['command'])}`.{note}\n"


def stressed(result: dict[str, Any]) -> str:
    """`paired` under stress, which it names, and its picture."""
    stress = ", ".join(f"{name} {value:g}" for name, value in result["protocol"].get("stress", {}).items())
    suites = result["protocol"]["suite"].replace(",", " and ")
    return (
        f"{paired(result)}\nStress: {stress or 'none'}, on {suites}.\n\n"
        f"![Success of each policy under stress, with intervals](../eval/results/{STRESS_PICTURE})\n"
    )


def _rate(rate: dict[str, Any]) -> str:
    if rate["rate"] is None:
        return "-"
    low, high = 100 * rate["wilson_95_low"], 100 * rate["wilson_95_high"]
    return f"{100 * rate['rate']:.1f} % ({low:.1f} to {high:.1f})"


def _where(result: dict[str, Any]) -> str:
    note = f" {result['note']}" if result.get("note") else ""
    limit = result["protocol"]["max_steps"]
    limit = limit if isinstance(limit, int) else " and ".join(map(str, limit))
    return (
        f"{machine(result['launches'][-1])}; {result['episodes_s'] / 60:.0f} minutes of episodes, "
        f"{limit} actions at most; "
        f"`{' '.join(result['command'])}`.{note}\n"
    )


TABLES: dict[str, tuple[Callable[[Any], str], str | tuple[str, ...]]] = {
    "models": (
        models,
        (
            *("bench_pi05_h200", "bench_pi0_h200", "bench_smolvla_h200?", "bench_groot_h200?"),
            *("openpi_parity_h200", "lerobot_parity_cpu?", "libero_paired_h200", "libero_paired_smolvla_h200?"),
        ),
    ),
    "quality": (quality, ("parity_*", "libero_paired_h200")),
    "success": (success, "libero_spatial_demo_h200"),
    "tasks": (tasks, "libero_spatial_demo_h200"),
    "training": (training, "training"),
    "latency_cpu": (latency, "libero_spatial_quick_cpu"),
    "builds_demo": (builds, "tensorrt_rtx_demo_cpu"),
    "builds_full": (builds, "tensorrt_rtx_full_width_cpu"),
    "builds_torch": (builds, "torch_tensorrt_h200"),
    "bench_pi05": (bench, "bench_pi05_h200"),
    "bench_pi0": (bench, "bench_pi0_h200"),
    "bench_compile": (whole_calls, "bench_compile_h200"),
    "bench_smolvla": (bench, "bench_smolvla_h200"),
    "bench_groot": (bench, "bench_groot_h200"),
    "openpi_agreement": (openpi_agreement, "openpi_parity_h200"),
    "lerobot_agreement": (lerobot_agreement, "lerobot_parity_cpu"),
    "parity_demo": (parity, "parity_*"),
    "paired_libero": (paired, "libero_paired_h200"),
    "paired_stress": (stressed, "libero_stress_h200"),
    "late": (late, ("libero_late*_h200", "bench_pi05_h200")),
    "tune_demo": (tune, "tune_demo_h200"),
    "shapes": (shapes, "bench_*_h200"),
    "attention": (attention, "attention_h200"),
    "gpus": (gpus, ("memory_counted", "*")),
    "memory": (memory, "memory_counted"),
    "memory_pi05": (partial(memory, models=("pi05",)), "memory_counted"),
    "qwen_vae": (autoencoders, "qwen_vae_h200"),
    "qwen_vae_sizes": (autoencoder_sizes, "qwen_vae_sizes_h200"),
    "sd_unet": (unets, "sd_unet_h200"),
    "qwen_image": (qwen_images, "qwen_image_h200"),
    "precision": (precisions, "precision_*"),
    "bench_server": (server, "bench_server_cpu"),
    "server_faults": (faults, "server_faults_cpu"),
    "server_gpus": (server_gpus, "bench_server_*_h200"),
    "server_faults_gpus": (faults, "server_faults_h200"),
    "throughput": (throughput, "throughput_*"),
    "plan": (plan, "throughput_*"),
}
"""Table to what makes it and the stored result, or several of them (*), that it is made from."""

NOT_YET = frozenset({
    "server_gpus", "server_faults_gpus", "plan", "throughput", "paired_stress", "late", "tune_demo", "attention",
    "bench_smolvla", "bench_groot", "lerobot_agreement",
})  # fmt: skip
"""Tables whose runs may be absent: their place says so."""


def pages() -> list[Path]:
    """The files that hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(text: str) -> str:
    """A page with every table made anew. Raises KeyError for a table nobody makes."""

    def replace(match: re.Match[str]) -> str:
        make, source = TABLES[match[2]]
        try:
            results = load(source)
        except FileNotFoundError:
            if match[2] not in NOT_YET:
                raise
            return f"{match[1]}Not measured so far.\n{match[3]}"
        return match[1] + make(results) + match[3]

    return _BLOCK.sub(replace, text)


def picture() -> str:
    """README's picture, an SVG: what a call of openpi's code and of ours costs, by component."""
    return draw([load("bench_pi05_h200"), load("bench_pi0_h200")])


def main(arguments: Arguments) -> int:
    """Rewrite or check; returns the exit code."""
    after = {page: render(page.read_text()) for page in pages()} | {PICTURE: picture()}
    stale = [path for path, text in after.items() if not path.is_file() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: differs from eval/results; run `make tables`", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(after[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
