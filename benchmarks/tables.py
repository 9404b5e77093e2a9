"""Tables of README and docs/ from benchmarks/results. `python -m benchmarks.tables` rewrites them.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; no measured figure is typed by hand. Pictures in SVG
are drawn anew with them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agreement_tables import lerobot_agreement, openpi_agreement, parity, quality, sums
from benchmarks.attention_table import attention
from benchmarks.bench_tables import batches, bench, paced, starts, whole_calls
from benchmarks.goals_table import goals
from benchmarks.gpu_table import gpus, memory
from benchmarks.image_tables import autoencoder_sizes, autoencoders, precisions, qwen_images, unets
from benchmarks.late_table import late
from benchmarks.latency_picture import draw
from benchmarks.lerobot_table import FIELD_TABLES, steps
from benchmarks.libero_tables import latency, paired, stressed, success, tasks, training
from benchmarks.markdown import commit, rows
from benchmarks.model_table import models
from benchmarks.models_picture import draw_models, sources
from benchmarks.server_tables import faults, server, server_gpus
from benchmarks.shapes_table import calls, shapes
from benchmarks.throughput_table import plan, throughput
from benchmarks.tune_table import tune
from eval.script import concluded
from eval.training import record_of
from vla_accel.cli.options import read

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = "training/"
"""Before a bundled checkpoint's name: the record of how it was trained."""
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """Rewrite the tables in README.md and docs/, and the pictures in SVG."""

    check: bool = False
    """Change nothing; exit with 1 if a table or a picture differs from the stored results."""


def load(name: str | tuple[str, ...]) -> Any:
    """A stored result; with a * in its name, a list of all that match, and of several names, a list of theirs. Raises
    FileNotFoundError if none matches."""
    if isinstance(name, tuple):
        return [load(one) for one in name]
    if "*" in name:
        paths = sorted(RESULTS.glob(f"{name}.json"))
        if not paths:
            raise FileNotFoundError(f"benchmarks/results: expected at least one {name}.json, found none")
        return [json.loads(path.read_text()) for path in paths]
    path = RESULTS / f"{name}.json"
    if name.startswith(TRAINING):
        checkpoint = name.removeprefix(TRAINING)
        path = record_of(checkpoint)
        if path is None:
            raise FileNotFoundError(f"training: expected the record of a bundled checkpoint {checkpoint}, found none")
    return json.loads(path.read_text())


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


BENCHED = ("bench_record_h200", "bench_pi0_h200", "bench_smolvla_h200", "bench_groot_h200")
"""Whole calls of each model at its published size, but for π0-FAST, whose time is its tokens'."""

TABLES: dict[str, tuple[Callable[[Any], str], str | tuple[str, ...]]] = {
    "models": (
        models,
        (
            *BENCHED,
            "bench_pi0_fast_h200",
            "openpi_parity_h200",
            "lerobot_parity_cpu",
            "libero_paired",
            "libero_paired_smolvla",
        ),
    ),
    "models_sources": (sources, BENCHED),
    "quality": (
        quality,
        (
            "parity_*",
            "libero_paired",
            "libero_paired_portable_int8",
            "libero_stress",
            "libero_stress_elsewhere",
        ),
    ),
    "success": (success, ("libero_spatial_demo", "libero_object_demo")),
    "tasks": (tasks, ("libero_spatial_demo", "libero_object_demo")),
    "training": (training, f"{TRAINING}demo"),
    "training_smolvla": (training, f"{TRAINING}smolvla_demo"),
    "latency_cpu": (latency, "libero_spatial_quick_cpu"),
    "builds_demo": (builds, "tensorrt_rtx_demo_cpu"),
    "builds_full": (builds, "tensorrt_rtx_full_width_cpu"),
    "builds_torch": (builds, "torch_tensorrt_h200"),
    "bench_pi05": (bench, "bench_record_h200"),
    "bench_pi05_alone": (bench, "bench_pi05_alone_h200"),
    "bench_pi05_profile": (bench, "bench_pi05_profile_h200"),
    "paced": (paced, "bench_pi05_alone_h200"),
    "bench_pi0": (bench, "bench_pi0_h200"),
    "bench_compile": (whole_calls, "bench_compile_h200"),
    "bench_smolvla": (bench, "bench_smolvla_h200"),
    "bench_groot": (bench, "bench_groot_h200"),
    "bench_pi0_fast": (bench, "bench_pi0_fast_h200"),
    "openpi_agreement": (openpi_agreement, "openpi_parity_h200"),
    "lerobot_agreement": (lerobot_agreement, "lerobot_parity_cpu"),
    "parity_demo": (parity, "parity_*"),
    "fp8_sums": (sums, "fp8_accumulation_h200"),
    "paired_libero": (paired, "libero_paired"),
    "paired_portable_int8": (paired, "libero_paired_portable_int8"),
    "paired_smolvla": (paired, "libero_paired_smolvla"),
    "paired_stress": (stressed, "libero_stress"),
    "paired_stress_elsewhere": (paired, "libero_stress_elsewhere"),
    "late": (late, ("libero_late_*", "bench_record_h200")),
    "tune_demo": (tune, "tune_demo_h100"),
    "shapes": (shapes, "bench_*_h200"),
    "goals": (goals, "bench_*_h200"),
    "shapes_h100": (calls, "bench_*_h100"),
    "batches": (batches, "bench_pi05_batches_h200"),
    "starts": (starts, "start_pi05_h200"),
    "attention": (attention, "attention_h200"),
    "gpus": (gpus, ("memory_counted", "*")),
    "memory": (memory, "memory_counted"),
    "qwen_vae": (autoencoders, "qwen_vae_h200"),
    "qwen_vae_sizes": (autoencoder_sizes, "qwen_vae_sizes_h200"),
    "sd_unet": (unets, "sd_unet_h200"),
    "qwen_image": (qwen_images, "qwen_image_h200"),
    "precision": (precisions, "precision_*"),
    "bench_server": (server, "bench_server_cpu"),
    "bench_server_gpu": (server, "bench_server_h200"),
    "server_faults": (faults, "server_faults_cpu"),
    "server_gpus": (server_gpus, "bench_server_*_h200"),
    "server_faults_gpus": (faults, "server_faults_h200"),
    "throughput": (throughput, "throughput_*"),
    "plan": (plan, "throughput_*"),
    **{name: (make, ()) for name, make in FIELD_TABLES.items()},
    "lerobot_steps": (steps, ()),
}
"""Table to what makes it and the stored result, or several of them (*), that it is made from; () for what the package
itself knows."""


def pages() -> list[Path]:
    """The files that hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(text: str) -> str:
    """A page with every table made anew. Raises KeyError for a table nobody makes."""

    def replace(match: re.Match[str]) -> str:
        make, source = TABLES[match[2]]
        return match[1] + make(load(source)) + match[3]

    return _BLOCK.sub(replace, text)


def drawings() -> dict[Path, str]:
    """The pictures in SVG: README's, and the components of a call for docs/results.md."""
    benched = load(BENCHED)
    return {RESULTS / "models.svg": draw_models(benched), RESULTS / "latency.svg": draw(benched[:2])}


def main(arguments: Arguments) -> int:
    """Rewrite or check; returns the exit code."""
    after = {page: render(page.read_text()) for page in pages()} | drawings()
    stale = [path for path, text in after.items() if not path.is_file() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: differs from benchmarks/results; run `make tables`", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(after[path])
    return 0


if __name__ == "__main__":
    sys.exit(concluded(lambda: main(read(Arguments, None, "python -m benchmarks.tables"))))
