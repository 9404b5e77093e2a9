"""Tables of GPUs, weights, engines built ahead of time, loop and attention kernels, and episodes an hour."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.tables.table import MODELS, Row, blocks, command, commit, filled, machine, machines, plural, table

# -- GPUs and the memory of weights -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A GPU. `memory`: GB, of each variant; `lower`: its 8-bit precision; `shared`: with the host."""

    name: str
    capability: str
    memory: tuple[int, ...]
    lower: str
    shared: bool = False


RECIPES = (
    Recipe("RTX 4090", "8.9", (24,), "fp8"),
    Recipe("RTX 5090", "12.0", (32,), "fp8"),
    Recipe("L40S", "8.9", (48,), "fp8"),
    Recipe("A100", "8.0", (40, 80), "int8"),
    Recipe("Jetson AGX Orin", "8.7", (32, 64), "int8", shared=True),
    Recipe("Jetson Thor", "11.0", (128,), "fp8", shared=True),
)


def gpus(results: Sequence[Any]) -> str:
    """What to start with on each GPU. `results`: the report of `benchmarks.memory`, and all stored results."""
    sizes, stored = results[0]["families"]["pi05"], [gpu for result in results[1] for gpu in _gpus_of(result)]
    rows = [
        {
            **vars(recipe),
            "memory": " or ".join(map(str, recipe.memory)) + (", shared with the host" if recipe.shared else ""),
            "bf16": _total(sizes["native-bf16"]),
            "low": _total(sizes[f"native-{recipe.lower}"]),
            "runs": sum(recipe.name.removeprefix("Jetson ") in gpu for gpu in stored) or "none",
        }
        for recipe in RECIPES
    ]
    return table(
        "GPU = {name} | compute capability = {capability} | memory GB = {memory} | "
        "start with = `native` ({bf16:.2f} GB) | then, with calibrated scales = `native_{lower}` ({low:.2f} GB) | "
        "stored runs = {runs}",
        rows,
        "In brackets: the size of the weights of π0.5. Buffers need some hundred MB more.",
    )


def _gpus_of(result: Any) -> list[str]:
    """The GPUs that a result names, each once."""
    parts = (result, *(result.get("launches") or ()), *(result.get("policies") or {}).values())
    hardware = [part.get("hardware") for part in parts]
    names = [found.get("gpu") for found in hardware if isinstance(found, Mapping)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _total(one: Row) -> float:
    """GB of all components."""
    return sum(one["bytes"].values()) / 1e9


def memory(result: Row) -> str:
    """Weights of each model by configuration."""
    rows = []
    for model, label in MODELS.items():
        for one in result["families"].get(model, {}).values():
            first, *between, last = (size / 1e9 for size in one["bytes"].values())
            sizes = {"vision": first, "prefix": sum(between), "denoise": last, "total": _total(one)}
            rows.append({"model": label, "precision": _precision(one), **sizes})
    cells = "vision = {vision:.2f} | prefix = {prefix:.2f} | denoise = {denoise:.2f} | together = {total:.2f}"
    return table(f"weights, GB = {{model}} |  = {{precision}} | {cells}", rows)


def _precision(one: Row) -> str:
    """Which parts are in less than BF16, and what lies on the host."""
    parts: dict[str, list[str]] = {}
    for part, precision in one["low"].items():
        parts.setdefault(precision.upper(), []).append(part.replace("kv_cache", "prefix"))
    words = [f"{', '.join(names)} in {precision}" for precision, names in parts.items()] or ["BF16"]
    return ", ".join([*words, *(["embeddings on the host"] if one["on_host"] else [])])


# -- engines and kernels ------------------------------------------------------------------------------------------


def builds(result: Row) -> str:
    """Engines built ahead of time; those whose names differ in a number only share a row."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for engine in result["engines"]:
        name = re.sub(r"\d+$", "s", engine["name"])
        groups.setdefault((name, engine["target"], engine["precision"]), []).append(engine)
    rows = []
    for (name, target, precision), engines in groups.items():
        sizes = [engine["bytes"] / 1e6 for engine in engines]
        low, high = f"{min(sizes):.0f}", f"{max(sizes):.0f}"
        row = {
            "name": name,
            "targets": ", ".join(f"{t[2:-1]}.{t[-1]}" for t in target.split("+")),
            "precision": precision,
            "inside": sum(engine["coverage"]["in_engine"] for engine in engines),
            "operators": sum(engine["coverage"]["operators"] for engine in engines),
            "cosine": min((e["similarity"] for e in engines if e["similarity"] is not None), default=None),
            "count": len(engines),
            "size": low if max(sizes) - min(sizes) < 1 else f"{low} to {high}",
            "seconds": sum(s for engine in engines for kind, s in engine["seconds"].items() if kind != "verify"),
        }
        rows.append(row)
    host = result["machine"]
    place = host["gpu"] or f"no GPU, {plural(host['cpu_threads'], 'CPU thread')}"
    library = ", ".join(dict.fromkeys(engine["library"] for engine in result["engines"]))
    through = next((engine["torch_tensorrt"] for engine in result["engines"] if engine["torch_tensorrt"]), None)
    library += f" through torch-tensorrt {through}" if through else ""
    return table(
        "component = {name} | for = {targets} | precision = {precision} | operators = {inside}/{operators} | "
        "ONNX cosine = {cosine:.6f} | engines = {count} | MB each = {size} | s in all = {seconds:.0f}",
        rows,
        f"{library}, torch {result['software']['torch']}, {place}{commit(result)}; {result['checkpoint']}.",
    )


def denoise_loops(result: Row) -> str:
    """The persistent denoise loop and its variants, Triton's, and the errors of the persistent one."""
    loop, tuning = result["loop"], result["tuning"]
    return blocks(
        table(
            "kernels = {part} | variant = {variant} | median ms = {median:.2f} | least = {least:.2f} | "
            "p90 = {p90:.2f} | replays = {count}",
            result["loops_ms"],
            f"The denoise loop of {MODELS[loop['model']]} alone as a CUDA graph: {plural(loop['layers'], 'layer')}, "
            f"{plural(loop['rows'], 'row')}, {loop['prefix_tokens']} keys of the prefix, "
            f"{plural(loop['steps'], 'step')}, {loop['precision'].upper()}, random weights. As shipped: "
            f"{tuning['under_way_kb']} KB in flight, {tuning['loaded_chunks']} chunks loaded at once, "
            f"{tuning['stages']} stages of {tuning['stage_kb']} KB, {tuning['shared_kb']:.0f} KB of shared memory. "
            "Variants without reads or without waits show the cost of reads and waits; their results are wrong. "
            "So are those of the variants with stages of 8 KB. "
            f"{result['hardware']['gpu']}{commit(result)}.",
        ),
        table(
            "loop = {part}, {case} | actions = {actions:.1e} | worst phase = {worst_phase:.1e} | "
            "same bits in five runs = {same}",
            [{**one, "same": "yes" if one["repeats"] and one["finite"] else "no"} for one in result["errors"]],
            "Rms difference of the persistent kernel from a torch reference of the same phases, relative to the "
            "reference (for actions: to their change by the loop).",
        ),
    )


BACKENDS = {"own": "own", "sdpa": "torch's SDPA", "flash_attn": "flash-attn"}


def attention(result: Row) -> str:
    """Attention at the shapes of the models, with every backend."""
    flash = result["software"].get("flash_attn")
    built = f" flash-attn {flash}, built from its source package for this GPU." if flash else ""
    text = "µs of one call inside a CUDA graph (the largest difference from float32)."
    return table(
        {
            "attention": "{name}",
            "shape": "{batch} x {tokens}, {heads} heads of {head_dim}",
            **{label: lambda row, name=name: _attention(row["found"].get(name)) for name, label in BACKENDS.items()},
        },
        [{**shape, "found": {one["way"]: one for one in shape["ways"]}} for shape in result["shapes"]],
        f"{text}{built} {machine(result)}; {command(result)}.",
    )


def _attention(one: Row | None) -> str:
    if one is None:
        return "-"
    if "error" in one:
        return one["error"].partition(":")[0]
    wrong = "" if one["right"] else ", **wrong**"
    return filled("{us:.1f}", one) + f" ({one['worst']:.3f}){wrong}"


# -- the denoise loop ---------------------------------------------------------------------------------------------

FEW = "cache late if few rows"
COPIES = {
    "today": "all at once, the prefix's first",
    "no limit": "kernels with a limit that is not set",
    **{f"all {size}": f"at most {size} KiB of weights in flight per block" for size in (16, 32, 48, 64)},
    "attention 32": "at most 32 KiB, attention only",
    "output 16": "at most 16 KiB, output only",
    "gate_up 32": "at most 32 KiB, gate_up only",
    "down 16": "at most 16 KiB, down only",
    "cache late": "the prefix's after the rows",
    "late dependents": "the next kernel starts after a block's copies",
    FEW: "the prefix's after the rows if rows are few",
    f"{FEW}, late dependents": "also, the next kernel starts after a block's copies",
    **{
        f"{FEW}, L2 by {names}": f"also, copies to L2 for the next kernel: {names}"
        for names in ("attention", "output", "gate_up, down", "attention, gate_up, down")
    },
}
"""Variants that the table shows: how a kernel's copies are started."""
LOOPS = {"pi05 H=10": "π0.5, 10 actions", "pi05 H=50": "π0.5, 50", "pi0 H=50": "π0, 50", "smolvla": "SmolVLA, 50"}


def loop_copies(results: Sequence[Row]) -> str:
    """Layers of the streamed denoise loop with other orders of its copies."""
    rows = []
    for result in results:
        found: dict[str, dict[str, Row]] = {}
        for row in result["rows"]:
            found.setdefault(row["variant"], {})[row["case"]] = row
        gpu = result["hardware"]["gpu"]
        rows += [{"gpu": gpu, "copies": COPIES[name], **cases} for name, cases in found.items() if name in COPIES]
    replays = {row["replays"] for result in results for row in result["rows"]}
    return table(
        {
            "GPU": "{gpu}",
            "copies": "{copies}",
            **{name: f"{{{case}[us_a_layer]:.2f}} ({{{case}[change_percent]:+.1f}} %)" for case, name in LOOPS.items()},
        },
        rows,
        f"µs a layer: the median of {min(replays)} replays, variants alternating; random weights, results bit for bit "
        "equal. In brackets: the change from the first row of the same GPU.",
    )


MANY_ROWS = {
    "groot": "GR00T N1.7, 41 rows", "smolvla": "SmolVLA, 50", "pi05_50": "π0.5, 50", "pi0_50": "π0, 51",
    "pi05_10": "π0.5, 10",
}  # fmt: skip


def loop_rows(result: Row) -> str:
    """Layers of denoise loops of many rows, as before and with changes."""
    rows = [{**row, "loop": MANY_ROWS[row["case"]]} for row in result["rows"]]
    return table(
        {
            "loop": "{loop}",
            "variant": "{variant}",
            "µs a layer": "{us_a_layer:.1f}",
            "change": "{change_percent:+.1f} % ({least_percent:+.1f} to {most_percent:+.1f})",
            "difference": "{error_to_first:.1e}",
        },
        rows,
        f"Medians of at least {min(row['replays'] for row in rows)} replays, variants alternating; random weights. "
        "Change: from the loop before the changes, in the same run; in brackets the smallest and largest change of a "
        f"turn. Difference: relative rms difference of the actions from that loop's. {result['hardware']['gpu']}.",
    )


# -- episodes an hour ---------------------------------------------------------------------------------------------


def _cases(results: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for result in results:
        for row in result["rows"]:
            crashed = f", {row['errors']} crashed" if row.get("errors") else ""
            yield {
                **row,
                "steps": result["steps"],
                "cores": row["cores"] or result["cores"],
                "processes": "Ray" if row["ray"] else "worker processes",
                "played": "**failed**" if "error" in row else f"{row.get('episodes')}{crashed}",
                "busy": ", ".join(f"{100 * share:.0f} %" for share in row.get("gpu_busy", ())) or None,
            }


def throughput(results: Sequence[Row]) -> str:
    """Episodes an hour of many simulators."""
    cases = list(_cases(results))
    runs = [result for result in results for _ in result["rows"]]
    where = machines((case["processes"], result) for case, result in zip(cases, runs, strict=True))
    return table(
        "simulators = {simulators}, {processes} | GPUs = {gpus} | cores = {cores} | steps = {steps} | "
        "episodes = {played} | an hour = **{per_hour}** | waiting for answers = {waiting:.0%} | "
        "an answer ms = {call_ms:.1f} | policy ms = {policy_ms:.1f} | cores busy = {cores_busy:.1f} | "
        "GPUs busy = {busy} | policy's process = {policy_core:.0%}",
        cases,
        "Episodes an hour while all simulators play. Waiting: the share of a simulator's time in which it waits for an "
        "answer; policy ms: the part of an answer that the policy takes; cores busy: of all processes; policy's "
        f"process: the share of a core that it uses, at most 100 % where one thread does the work. {where}.",
    )


NODES, SUITE = 64, 500
"""Machines of the projection, and episodes of a suite of LIBERO."""


def plan(results: Sequence[Row]) -> str:
    """A projection of each Ray case that did not fail to `NODES` machines, the most episodes for each GPU first."""
    cases = [row for row in _cases(results) if row["ray"] and row["gpus"] and "error" not in row]
    rows = []
    for row in sorted(cases, key=lambda row: -row["per_hour"] / row["gpus"]):
        every = NODES * row["per_hour"]
        # A simulator plays at most one episode of so small a run, which takes as long as one episode.
        suite = max(3600 * SUITE / every, 3600 * row["simulators"] / row["per_hour"])
        rows.append({**row, "all": every, "second": every / 3600, "suite": suite})
    return table(
        "a node: GPUs, simulators = {gpus}, {simulators} | an hour, measured = {per_hour} | "
        f"{NODES} nodes, an hour = {{all:,}} | results a second = {{second:.0f}} | "
        f"one suite, {SUITE} episodes = {{suite:.0f}} s | start of a node = {{start_s:.0f}} s",
        rows,
        "Computed from the measured rows, not run. Results a second: how many results the command would "
        "receive; it writes each to disk before the next. One suite takes at least as long as one episode. Start: the "
        "time until the first result.",
    )
