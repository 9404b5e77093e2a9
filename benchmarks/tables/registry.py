"""Which table of a page is made from which stored result."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.diagrams import DIAGRAMS
from benchmarks.svg import draw_latency, draw_models, sources
from benchmarks.tables import agreement, attach, bench, flow, hardware, images, placed, server, shapes, success
from benchmarks.tables.families import families
from benchmarks.tables.lerobot_fields import FIELD_TABLES, steps
from eval.training import record_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = "training/"
"""Prefix of a source that is the training record of a bundled checkpoint."""
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_LINK = re.compile(r"\]\(((?:benchmarks|docs)/[^)#]+)")
"""A link in a table; tables write them relative to the repository."""

Source = str | tuple[str, ...]
"""A stored result by name, of the first of `GPUS` that has one for `{gpu}`, all that match a pattern with `*`, or
several of these; `()` for what the package knows."""
GPUS = ("h200", "h100")
BENCHED = ("bench_record_h200", "bench_pi0_h200", "bench_smolvla_h200", "bench_groot_h200")
"""Whole calls of each model at its published size, except π0-FAST, whose time depends on its tokens."""
CHARTED = (*BENCHED, "bench_compile_h200", "bench_portable_pi0_h200")
"""README's picture: of each model, and of other projects' code at the same shapes."""
EVIDENCE = ("openpi_parity_h200", "lerobot_parity_cpu", "libero_paired", "libero_paired_smolvla")
OTHERS = tuple(f"bench_{kind}_{{gpu}}" for kind in shapes.OTHERS)
MODEL_RUNS = (*BENCHED, "bench_pi0_fast_h200", *OTHERS, "bench_openvla_oft_reference_{gpu}", *EVIDENCE)
PAIRED = ("libero_paired", "libero_paired_portable_int8", "libero_stress", "libero_stress_elsewhere")
SUITES = ("libero_spatial_demo", "libero_object_demo")

TABLES: dict[str, tuple[Callable[[Any], str], Source]] = {
    "headline": (shapes.headline, (BENCHED[0], "libero_paired")),
    "models": (shapes.models, MODEL_RUNS),
    "models_detail": (shapes.models_detail, MODEL_RUNS),
    "models_sources": (sources, CHARTED),
    "quality": (agreement.quality, ("parity_*", *PAIRED)),
    "success": (success.success, SUITES),
    "tasks": (success.tasks, SUITES),
    "training": (success.training, f"{TRAINING}demo"),
    "training_smolvla": (success.training, f"{TRAINING}smolvla_demo"),
    "latency_cpu": (success.latency, "libero_spatial_quick_cpu"),
    "paired_libero": (success.paired, "libero_paired"),
    "paired_unseen": (success.paired, "libero_paired_unseen"),
    "paired_portable_int8": (success.paired, "libero_paired_portable_int8"),
    "paired_smolvla": (success.paired, "libero_paired_smolvla"),
    "paired_stress": (success.stressed, "libero_stress"),
    "schedules": (success.schedules, "libero_schedules*"),
    "paired_stress_elsewhere": (success.paired, "libero_stress_elsewhere"),
    "late": (success.late, ("libero_late_*", "bench_record_h200")),
    "flow_pi05": (flow.flow, "flow_pi05_demo_h200"),
    "flow_smolvla": (flow.flow, "flow_smolvla_demo_h200"),
    "tune_demo": (success.tune, "tune_demo_h100"),
    "tune_smolvla_demo": (success.tune, "tune_smolvla_demo_{gpu}"),
    "bench_pi05": (bench.bench, "bench_record_h200"),
    "bench_pi05_alone": (bench.bench, "bench_pi05_alone_h200"),
    "bench_pi05_profile": (bench.bench, "bench_pi05_profile_h200"),
    "bench_pi0": (bench.bench, "bench_pi0_h200"),
    "bench_compile": (bench.whole_calls, "bench_compile_h200"),
    "bench_smolvla": (bench.bench, "bench_smolvla_h200"),
    "bench_groot": (bench.bench, "bench_groot_h200"),
    "bench_pi0_fast": (bench.bench, "bench_pi0_fast_h200"),
    "bench_others": (bench.benches, OTHERS),
    "paced": (bench.paced, "bench_pi05_alone_h200"),
    "batches": (bench.batches, "bench_pi05_batches_h200"),
    "starts": (bench.starts, "start_pi05_h200"),
    "attach": (attach.attach, "attach_{gpu}"),
    "prompts": (attach.prompts, "prompts_fastwam_{gpu}"),
    "shapes": (shapes.shapes, "bench_*_h200"),
    "shapes_h100": (shapes.calls, "bench_*_h100"),
    "goals": (shapes.goals, "bench_*_h200"),
    "placed_goals": (placed.placed_goals, placed.RUNS),
    "openpi_agreement": (agreement.openpi_agreement, "openpi_parity_h200"),
    "lerobot_agreement": (agreement.lerobot_agreement, "lerobot_parity_cpu"),
    "parity_demo": (agreement.parity, "parity_*"),
    "fp8_sums": (agreement.fp8_sums, "fp8_accumulation_h200"),
    "attention": (hardware.attention, "attention_h200"),
    "loop_copies": (hardware.loop_copies, ("loop_copies_h100", "loop_order_h200")),
    "loop_rows": (hardware.loop_rows, "loop_rows_h100"),
    "denoise_loops": (hardware.denoise_loops, "persistent_loop_h200"),
    "gpus": (hardware.gpus, ("memory_counted", "*")),
    "memory": (hardware.memory, "memory_counted"),
    "builds_demo": (hardware.builds, "tensorrt_rtx_demo_cpu"),
    "builds_full": (hardware.builds, "tensorrt_rtx_full_width_cpu"),
    "builds_torch": (hardware.builds, "torch_tensorrt_h200"),
    "throughput": (hardware.throughput, "throughput_*"),
    "plan": (hardware.plan, "throughput_*"),
    "qwen_vae": (images.autoencoders, "qwen_vae_h200"),
    "qwen_vae_sizes": (images.autoencoder_sizes, "qwen_vae_sizes_h200"),
    "sd_unet": (images.unets, "sd_unet_h200"),
    "qwen_image": (images.qwen_images, "qwen_image_h200"),
    "precision": (images.precisions, "precision_*"),
    "bench_server": (server.server, "bench_server_cpu"),
    "bench_server_gpu": (server.server, "bench_server_h200"),
    "server_gpus": (server.server_gpus, "bench_server_*_h*00"),
    "server_faults": (server.faults, "server_faults_cpu"),
    "server_faults_gpus": (server.faults, "server_faults_h200"),
    **{name: (table, ()) for name, table in FIELD_TABLES.items()},
    "lerobot_steps": (steps, ()),
    "families": (families, ()),
}


def load(source: Source) -> Any:
    """The JSON of a source: one result, or a list for a pattern and for several names; None if no GPU has it. Raises
    FileNotFoundError."""
    if isinstance(source, tuple):
        return [load(one) for one in source]
    if "{gpu}" in source:
        paths = (RESULTS / f"{source.format(gpu=gpu)}.json" for gpu in GPUS)
        return next((json.loads(path.read_text()) for path in paths if path.is_file()), None)
    if "*" in source:
        paths = sorted(RESULTS.glob(f"{source}.json"))
        if not paths:
            raise FileNotFoundError(f"benchmarks/results: expected at least one {source}.json, found none")
        return [json.loads(path.read_text()) for path in paths]
    path: Path | None = RESULTS / f"{source}.json"
    if source.startswith(TRAINING):
        checkpoint = source.removeprefix(TRAINING)
        path = record_of(checkpoint)
        if path is None:
            raise FileNotFoundError(f"training: expected the record of a bundled checkpoint {checkpoint}, found none")
    return json.loads(path.read_text())


def pages() -> list[Path]:
    """The files that hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(text: str, page: Path = ROOT / "README.md") -> str:
    """The text of a page with every table generated again. Raises KeyError for an unknown table."""

    def relative(link: re.Match[str]) -> str:
        return f"]({os.path.relpath(ROOT / link[1], page.parent)}"

    def replace(match: re.Match[str]) -> str:
        make, source = TABLES[match[2]]
        return match[1] + _LINK.sub(relative, make(load(source))) + match[3]

    return _BLOCK.sub(replace, text)


def drawings() -> dict[Path, str]:
    """The SVG pictures: README's models, the components of a call, and the diagrams of docs/."""
    charted = load(CHARTED)
    drawn = {"models": draw_models(charted), "latency": draw_latency(charted[:2])} | DIAGRAMS
    return {RESULTS / f"{name}.svg": text for name, text in drawn.items()}
