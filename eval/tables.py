"""README's tables from eval/results: `python -m eval.tables` rewrites them, `--check` fails if they are stale.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; no figure in README is typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"
TRAINING = ROOT / "vla_accel" / "assets" / "pi05_demo" / "training.json"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """Rewrite the tables in README.md."""

    check: bool = False
    """Change nothing; exit with 1 if a table differs from the stored results."""


def load(name: str) -> dict[str, Any]:
    """A stored result."""
    path = TRAINING if name == "training" else RESULTS / f"{name}.json"
    return json.loads(path.read_text())


def rows(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def success(result: dict[str, Any]) -> str:
    """Success over denoising steps."""
    body = []
    for row in sorted(result["summary"]["rows"], key=lambda r: r["steps"]):
        s = row["success"]
        interval = f"{100 * s['wilson_95_low']:.1f} to {100 * s['wilson_95_high']:.1f} %"
        count = f"{s['successes']}/{s['episodes']}"
        body.append([str(row["steps"]), f"**{100 * s['rate']:.1f} %**", count, interval, str(s["errors"])])
    return rows(["steps", "success", "episodes", "Wilson 95 %", "errors"], body) + "\n" + _where(result)


def tasks(result: dict[str, Any]) -> str:
    """Success per task, a column a step count."""
    ordered = sorted(result["summary"]["rows"], key=lambda r: r["steps"])
    header = ["task", *(f"{r['steps']} step{'s' * (r['steps'] > 1)}" for r in ordered)]
    body = [
        [t["task"], *(f"{r['tasks'][i]['successes']}/{r['tasks'][i]['episodes']}" for r in ordered)]
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
    nearest = min(t["min_distance_m"] for t in states["tasks"].values())
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
        ["start states", f"{sum(t['count'] for t in states['tasks'].values())}, seeds from {states['seed']}"],
        ["nearest shipped evaluation state", f"{nearest * 1e3:.1f} mm (the object that moved most)"],
        ["success while collecting, at the end", f"{won}/{played} (training start states, with bursts of noise)"],
    ]
    return rows(["demo checkpoint", ""], body)


def _where(result: dict[str, Any]) -> str:
    launch = result["launches"][-1]
    hardware = launch["hardware"]
    machine = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['threads']} threads"
    note = f" {result['note']}" if result.get("note") else ""
    limit = result["protocol"]["max_steps"]
    return (
        f"{machine}; {result['episodes_s'] / 60:.0f} minutes of episodes, {limit} actions at most; "
        f"`{' '.join(result['command'])}`.{note}\n"
    )


TABLES: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "success": (success, "libero_spatial_demo_h200"),
    "tasks": (tasks, "libero_spatial_demo_h200"),
    "training": (training, "training"),
    "latency_cpu": (latency, "libero_spatial_quick_cpu"),
}


def render(text: str) -> str:
    """README with every table made anew. Raises KeyError for a table nobody makes."""

    def replace(match: re.Match[str]) -> str:
        make, source = TABLES[match[2]]
        return match[1] + make(load(source)) + match[3]

    return _BLOCK.sub(replace, text)


def main(arguments: Arguments) -> int:
    """Rewrite or check; returns the exit code."""
    path = ROOT / "README.md"
    before = path.read_text()
    after = render(before)
    if arguments.check:
        if before != after:
            print("README.md: tables differ from eval/results; run `make tables`", file=sys.stderr)
        return int(before != after)
    path.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
