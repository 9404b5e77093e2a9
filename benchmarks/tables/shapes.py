"""Tables over all stored `vla-accel bench` runs of published sizes: latency by shape, the goals, a row a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.memory import parameters
from benchmarks.svg import THEIRS, medians
from benchmarks.tables.bench import PI0_PARTS, batched, call, component_columns
from benchmarks.tables.table import (
    MODELS,
    PROJECTS,
    Cell,
    Row,
    blocks,
    doubt,
    machine,
    machines,
    picture,
    plural,
    steps_of,
    table,
)
from vla_accel.measure.bench import SCHEMA
from vla_accel.measure.systems import ORDINARY_TOKENS

SHAPES, BATCHES = "bench_shapes_h200.png", "bench_batches_h200.png"
OURS = ("native-", "portable-", "triton-", "realtime-vla")
"""Prefixes of the systems that these tables show; eager code of other projects has its own tables."""


def published(results: Sequence[Row]) -> list[Row]:
    """The reports of published sizes, those with the most batches first; of families with a denoising loop alone."""
    found = [r for r in results if r.get("schema") == SCHEMA and "denoise" in r.get("parts", PI0_PARTS)]
    return sorted((r for r in found if "views" in r["model"]), key=lambda r: -len(r["throughput"]))


def shape_of(result: Row) -> str:
    """The shape of a report's calls in words."""
    model, tokens, camera = result["model"], result.get("prompt_tokens"), result.get("camera")
    prompt = f", prompt of {tokens} tokens" if tokens else ""
    images = f", cameras of {camera[0]} × {camera[1]}" if camera else ""
    kind = MODELS.get(model["kind"], model["kind"])
    return f"{kind}, {plural(model['views'], 'view')}, {model['action_horizon']} actions{prompt}{images}"


def timed_calls(results: Sequence[Row]) -> Iterator[tuple[str, Row, Row]]:
    """(shape, report, row) of each shape and system once, at its most steps. Systems that were timed in turns come
    from one report, the one with the most of them."""

    def shown(result: Row) -> list[Row]:
        return [row for row in result["rows"] if row["system"].startswith(OURS)]

    def order(result: Row) -> tuple[Any, ...]:
        model, kinds = result["model"], list(MODELS)
        kind = kinds.index(model["kind"]) if model["kind"] in kinds else len(kinds)
        shape = (kind, model["action_horizon"], model["views"], result.get("prompt_tokens") or 0)
        return *shape, tuple(result.get("camera") or ()), -len({row["system"] for row in shown(result)})

    seen = set()
    for result in sorted(published(results), key=order):
        most = max(row["steps"] for row in result["rows"])
        for row in shown(result):
            key = (shape_of(result), row["system"])
            if row["steps"] == most and key not in seen:
                seen.add(key)
                yield key[0], result, row


def _with_floor(row: Row | None) -> str:
    if row is None:
        return "-"
    floor = (row["floors_ms"] or {}).get("total")
    return f"{row['median_ms']:.2f}" + (f" ({floor:.2f})" if floor else "")


def calls(results: Sequence[Row]) -> str:
    """A row for each shape, with the time of each system."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    systems: dict[str, Cell] = {}
    for shape, result, row in timed_calls(results):
        # π0 has one more row in its loop: the state.
        rows = result["model"]["action_horizon"] + (result["model"]["kind"] == "pi0")
        line = found.setdefault((shape, row["steps"], rows), {"call": shape, "steps": row["steps"], "rows": rows})
        line[row["system"]] = row
        systems[row["system"]] = lambda line, name=row["system"]: _with_floor(line.get(name))
    where = "; ".join(dict.fromkeys(machine(result) for _, result, _ in timed_calls(results)))
    note = f"Median ms of a whole call (its floor); rows: of the denoising loop at every step. {where}."
    return table({"call": "{call}", "steps": "{steps}", "rows": "{rows}", **systems}, found.values(), note)


def shapes(results: Sequence[Row]) -> str:
    """`calls`, with pictures."""
    return blocks(
        calls(results),
        picture("Parts of a call by shape and system, with the floor", SHAPES),
        picture("Ms per observation against the batch, with the floor", BATCHES),
    )


# -- goals --------------------------------------------------------------------------------------------------------

SHORT = ("pi05", 2, 10)
GOALS: dict[tuple[str, int, int], dict[str, float]] = {
    SHORT: {"portable-bf16": 11.5, "portable-fp8": 10.0},
    ("pi05", 3, 50): {"native-bf16": 10.5, "native-fp8": 8.8, "portable-bf16": 15.0, "portable-fp8": 13.0},
    ("pi0", 3, 50): {"native-bf16": 10.3, "native-fp8": 8.6, "portable-bf16": 15.0, "portable-fp8": 13.0},
}
"""Ms of a call of ten steps on an H200, by model, views, actions and system."""
INT8_OVER_FP8 = 1.05
"""Longest call of `SHORT` in portable INT8, relative to portable FP8."""
PER_SECOND = {1: 135, 4: 220, 8: 280, 16: 330, 32: 360}
"""Observations a second by batch, for `SHORT` in `native-fp8`."""
LONGER_PROMPT = 1.1
"""Longest call with a longer prompt, relative to its share of the prefix's tokens."""
IMAGE_TOKENS = 256
"""Tokens of a view of π0 and π0.5."""


def _sizes(result: Row) -> tuple[str, int, int]:
    model = result["model"]
    return model["kind"], model["views"], model["action_horizon"]


def _goals(results: Sequence[Row]) -> Iterator[dict[str, Any]]:
    shown = list(timed_calls(results))
    median = {(shape, row["system"]): row["median_ms"] for shape, _, row in shown}
    for shape, result, row in shown:
        system, tokens = row["system"], result.get("prompt_tokens")
        goal = GOALS.get(_sizes(result), {}).get(system)
        if tokens:
            ordinary = median.get((shape_of({"model": result["model"]}), system))
            images = IMAGE_TOKENS * result["model"]["views"]
            share = (images + tokens) / (images + ORDINARY_TOKENS)
            goal = None if ordinary is None else LONGER_PROMPT * share * ordinary
        elif system == "portable-int8" and _sizes(result) == SHORT:
            fp8 = median.get((shape, "portable-fp8"))
            goal = None if fp8 is None else INT8_OVER_FP8 * fp8
        if goal is not None and row["parts_ms"] and not result.get("camera"):
            yield {**row, "call": shape, "goal": goal}
    short = [r for r in published(results) if _sizes(r) == SHORT and not r.get("prompt_tokens") and not r.get("camera")]
    for row in batched(short[0]) if short else ():
        if row["system"] == "native-fp8" and row["batch"] in PER_SECOND:
            goal = 1e3 * row["batch"] / PER_SECOND[row["batch"]]
            yield {**row, "call": f"{shape_of(short[0])}, batch {row['batch']}", "goal": goal}


def _met(row: Row) -> str:
    over = row["median_ms"] / row["goal"] - 1
    return f"{row['goal']:.1f}, " + ("met" if over <= 0 else f"missed by {100 * over:.0f} %")


def goals(results: Sequence[Row]) -> str:
    """The goals, and whether they are met."""
    first: dict[str, Cell] = {"call": "{call}", "system": "{system}", "ms": "{median_ms:.2f}", "goal": _met}
    return table(
        first | component_columns(PI0_PARTS),
        _goals(results),
        "Median ms of a whole call of ten steps and of its components (their floors). The goals are for an H200. "
        f"Portable INT8 may take {100 * INT8_OVER_FP8 - 100:.0f} % longer than portable FP8; a call with a longer "
        f"prompt may take {100 * LONGER_PROMPT - 100:.0f} % longer than its share of the prefix's tokens; the goals of "
        "batches are observations a second. With Hopper's kernels the first step of the loop counts as time of the KV "
        "cache.",
    )


# -- a row a model ------------------------------------------------------------------------------------------------

OTHERS = tuple(kind for kind in MODELS if kind not in ("pi05", "pi0", "smolvla", "groot", "pi0_fast"))
"""Families whose stored run, if there is one, comes from any GPU of `registry.GPUS`."""
BUNDLED = {"demo": "pi05", "smolvla_demo": "smolvla"}
"""The family of a bundled checkpoint."""


def _agreement(result: Row) -> dict[str, tuple[int, str]]:
    """By family: parameters, and the largest difference over all cases, of the models compared at published size."""
    found = result.get("models") or {kind: result[kind] for kind in ("pi0", "pi05")}
    large = {kind: one for kind, one in found.items() if one.get("size") != "small"}
    cases = {kind: one.get("cases") or [one["batch1"], one["batch3"]] for kind, one in large.items()}
    return {k: (one["parameters"], f"{max(c['float32_max'] for c in cases[k]):.1e}") for k, one in large.items()}


def _played(pairs: Row) -> Iterator[tuple[str, str]]:
    """Success of the bundled checkpoints in `native`, by family."""
    for row in pairs["rows"]:
        run = pairs["policies"].get(row["name"], {})
        kind, rate = BUNDLED.get(run.get("policy")), row["other"]
        if kind and row["name"] == "native" and rate["rate"] is not None:
            warning = doubt(run["policy"], run.get("weights"))
            yield kind, f"{100 * rate['rate']:.1f} % of {rate['episodes']}" + (f" ({warning})" if warning else "")


def _systems(bench: Row) -> dict[str, Row]:
    """Its rows by system, at its first number of steps."""
    return {row["system"]: row for row in bench["rows"] if row["steps"] == bench["rows"][0]["steps"]}


def _originals(bench: Row) -> dict[str, Row]:
    """The rows of other projects' code."""
    return {name: row for name, row in _systems(bench).items() if name.partition("-")[0] in PROJECTS}


def _model(
    bench: Row, compared: Row, agreement: Mapping[str, tuple[int, str]], played: Mapping[str, str]
) -> dict[str, Any]:
    """A row; `compared`: the model's run with other projects' code, which may be `bench` itself."""
    model, kind, steps = bench["model"], bench["model"]["kind"], bench["rows"][0]["steps"]
    found, others = _systems(bench), _originals(compared)
    if not others and "eager" in found:
        others = {"ours-eager": found["eager"]}
    count, difference = agreement.get(kind) or (parameters(kind), None)
    bf16, timed = found.get("native-bf16", {}), _systems(compared).get("native-bf16")
    fp8 = found.get("native-fp8")
    if fp8 and compared is not bench:
        fp8 = {**fp8, "speedup": None}  # over another system than the reference
    memory = bf16.get("memory") or {}
    base = min((name for name in others if "eager" in name), key=lambda name: others[name]["median_ms"], default=None)
    return {
        "model": MODELS[kind],
        "size": _size(count),
        "call": f"{plural(model['views'], 'view')}, {model['action_horizon']} actions, {steps_of(kind, steps)}",
        "reference": "; ".join(f"{row['median_ms']:.2f} ({_named(name)})" for name, row in others.items()) or None,
        "ms": bf16.get("median_ms"),
        "speedup": others[base]["median_ms"] / timed["median_ms"] if base and timed else None,
        "code": PROJECTS.get(base.partition("-")[0], "eager") if base else None,
        "bf16": call(timed),
        "fp8": call(fp8),
        "memory": memory.get("peak_running", memory["total"]) / 1e9 if memory else None,
        "difference": difference,
        "success": played.get(kind),
    }


def _named(system: str) -> str:
    """The project and the mode of a system, such as "openpi, eager"."""
    project, _, mode = system.partition("-")
    return f"{PROJECTS.get(project, project)}, {mode}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _models(results: Iterable[Row | None]) -> tuple[list[Row], list[dict[str, Any]]]:
    """The first bench of each model among the stored runs, and a row for each, completed from the other runs. None: no
    run is stored."""
    agreement: dict[str, tuple[int, str]] = {}
    played: dict[str, str] = {}
    benches: list[Row] = []
    for result in filter(None, results):
        if "policies" in result:
            played |= dict(_played(result))
        elif "rows" in result:
            benches.append(result)
        else:
            agreement |= _agreement(result)
    by_kind: dict[str, list[Row]] = {}
    for bench in benches:
        by_kind.setdefault(bench["model"]["kind"], []).append(bench)
    compared = (next((bench for bench in runs if _originals(bench)), runs[0]) for runs in by_kind.values())
    firsts = [runs[0] for runs in by_kind.values()]
    return firsts, [_model(bench, other, agreement, played) for bench, other in zip(firsts, compared, strict=True)]


def _where(benches: Iterable[Row], described: Callable[[Row], str]) -> str:
    return machines(((MODELS[bench["model"]["kind"]], bench) for bench in benches), described)


def models(results: Iterable[Row | None]) -> str:
    """README's table: a row for each model, from all its stored runs."""
    benches, rows = _models(results)
    return table(
        "model = {model} ({size}) | ms = {ms:.2f} | GPU memory = {memory:.1f} GB | "
        "speed-up = {speedup:.1f}× over {code} | success = {success}",
        rows,
        "BF16, batch 1, random weights of the published size. Ms: median of a whole call, from NumPy observation to "
        "NumPy actions. Speed-up: compared with the eager PyTorch code of openpi, lerobot (the faster one) or "
        "openvla-oft, or of this package (eager), timed in the same run. Success: share of LIBERO episodes that a "
        "small bundled checkpoint of that model solves; it is not measured with the published weights. "
        f"{_where(benches, lambda bench: bench['hardware']['gpu'])}.",
    )


def models_detail(results: Iterable[Row | None]) -> str:
    """A row for each model, with sizes, both precisions and the agreement with the original code; for a model without
    a stored run a row that says so."""
    benches, rows = _models(results)
    timed = {bench["model"]["kind"] for bench in benches}
    absent = [kind for kind in OTHERS if kind not in timed]
    rows += [{"model": MODELS[kind], "size": _size(parameters(kind)), "call": "not measured"} for kind in absent]
    return table(
        "model = {model} | parameters = {size} | a call = {call} | reference = {reference} | native, BF16 = {bf16} | "
        "FP8 = {fp8} | GPU memory = {memory:.1f} GB | difference in FP32 = {difference} | success = {success}",
        rows,
        "Median ms of a whole call at the published size with random weights, and the speed-up over the reference: the "
        "original PyTorch code in the same run, or our own in eager mode. FP8: the configuration `native_fp8`, or "
        "`native_fp8_denoise` for models whose prefix has no FP8. Difference in FP32: the largest difference "
        "of the final actions from the original code on equal weights. Success: of the small bundled checkpoint in "
        f"BF16. {_where(benches, machine)}.",
    )


FP8 = {"native-fp8": "the prefix", "native-fp8-vision": "vision and prefix"}
"""Systems with components in FP8, and those components."""


def headline(results: Sequence[Row]) -> str:
    """README's first sentences: a call in BF16 at its first step count, the fastest other code in the same run, and
    success next to FP32. `results`: a `vla-accel bench` and an `eval.paired`."""
    bench, pairs = results
    steps, gpu = bench["rows"][0]["steps"], bench["hardware"]["gpu"].removeprefix("NVIDIA ")
    found = medians(bench, steps)
    ours, kind = found["native-bf16"], MODELS[bench["model"]["kind"]]
    fastest = min((name for name in found if name in FP8), key=found.__getitem__)
    other = min((name for name in found if name in THEIRS), key=found.__getitem__)
    times = found[other] / ours
    played = next(row for row in pairs["rows"] if row["name"] == "native")
    return (
        "Run vision-language-action (VLA) policies in real time on NVIDIA GPUs: "
        f"**a call of {kind} takes {ours:.1f} ms on an {gpu} in BF16 and {found[fastest]:.1f} ms "
        f"with {FP8[fastest]} in FP8. The fastest other code on the same GPU, {THEIRS[other]}, takes "
        f"{found[other]:.1f} ms, {times:.1f} times as long.** "
        f"A small {kind} in BF16 solves {played['other']['rate']:.1%} of {played['pairs']} LIBERO episodes, and "
        f"{played['reference']['rate']:.1%} in FP32.\n"
    ).replace("%", " %")
