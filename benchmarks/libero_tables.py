"""Tables of success in LIBERO: a run of the bundled checkpoint, its training, and policies on the same episodes."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import bare_command, doubts, machine, machines, percent, rows
from benchmarks.paired_picture import PICTURE as STRESS_PICTURE
from eval.harness.statistics import smallest_difference
from eval.training import UNTOLD, runs_of
from vla_accel.report.conditions import fell_back


def success(results: list[dict[str, Any]]) -> str:
    """Success over denoising steps, of runs on a suite each."""
    body = [
        [result["protocol"]["suite"], str(row["steps"]), *_rate(row["success"])]
        for result in results
        for row in sorted(result["summary"]["rows"], key=lambda r: -r["steps"])
    ]
    return rows(["suite", "steps", "success", "episodes", "Wilson 95 %", "errors"], body) + "\n" + _where(*results)


def _rate(rate: dict[str, Any]) -> list[str]:
    interval = f"{100 * rate['wilson_95_low']:.1f} to {100 * rate['wilson_95_high']:.1f} %"
    share = "-" if rate["rate"] is None else f"**{100 * rate['rate']:.1f} %**"
    return [share, f"{rate['successes']}/{rate['episodes']}", interval, str(rate["errors"])]


def tasks(results: list[dict[str, Any]]) -> str:
    """Success per task, a column a step count, a table a suite."""
    return "\n".join(_tasks(result) for result in results)


def _tasks(result: dict[str, Any]) -> str:
    ordered = sorted(result["summary"]["rows"], key=lambda r: -r["steps"])
    header = [result["protocol"]["suite"], *(f"{r['steps']} step{'s' * (r['steps'] > 1)}" for r in ordered)]
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
    started = [task for manifest in states.values() for task in manifest["tasks"].values()]
    nearest = min(t["min_distance_m"] for t in started)
    trained = runs_of(record)
    towers = [run for run in trained if "tower_of" in run]
    whole = [run for run in trained if "tower_of" not in run]
    before = ", all but the tower from scratch" if towers else ", from scratch"
    names = [f"the vision tower, in {run['tower_of']}" for run in towers]
    names += [f"run {i} of {len(whole)}{before if i == 1 else ''}" for i in range(1, 1 + len(whole))]
    runs = [
        [
            name,
            f"{', '.join(run['suites'])}; {run['gpus']} {run.get('gpu', UNTOLD)}, {run['seconds'] / 60:.1f} minutes; "
            f"{run['steps']} steps of {run['batch']} observations x {settings['samples']} draws",
        ]
        for name, run in zip(names, [*towers, *whole], strict=True)
    ]
    body = [
        *runs,
        ["observations collected", f"about {record['gpus'] * record['history'][-1]['store']}"],
        [
            "start states",
            f"{sum(t['count'] for t in started)}, seeds from {' and '.join(str(m['seed']) for m in states.values())}",
        ],
        ["nearest shipped evaluation state", f"{nearest * 1e3:.1f} mm (the object that moved most)"],
        ["success while collecting, at the end", f"{won}/{played} (training start states, with bursts of noise)"],
    ]
    return rows(["demo checkpoint", ""], body)


def paired(result: dict[str, Any]) -> str:
    """One `python -m eval.paired`: success of several policies on the same episodes."""
    body = []
    for row in sorted(result["rows"], key=lambda r: r["steps"] or 0):
        steps, name = str(row["steps"] or "-"), row["name"]
        first, second = row["reference"], row["other"]
        body.append([
            name + fell_back(result["policies"][name]["engines"]),
            steps,
            with_interval(second),
            with_interval(first),
            str(row["pairs"]),
            f"{row['lost']} / {row['gained']}",
            f"{p:.3f}" if (p := row["mcnemar_exact_p"]) >= 0.001 else "< 0.001",
            percent(smallest_difference(row["pairs"], row["lost"] + row["gained"])),
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
    old = doubts((name, run.get("policy"), run.get("weights")) for name, run in result["policies"].items())
    note = f" {result['note']}" if result.get("note") else ""
    text = (
        f"Same tasks, initial states and seeds. Lost: pairs that only {reference} won; gained: pairs that only the run "
        "did; p: McNemar's exact test, two-sided; could see: the smallest true difference that such a run finds at 5 % "
        "in four of five cases; intervals: Wilson. A pair with a crash is an error, not compared."
    )
    return rows(header, body) + f"\n{text} {where}; `{bare_command(result['command'])}`.{note}{old}\n"


def stressed(result: dict[str, Any]) -> str:
    """`paired` under stress, which it names, and its picture."""
    suites = result["protocol"]["suite"].replace(",", " and ")
    return (
        f"{paired(result)}\nStress: {stress_of(result) or 'none'}, on {suites}.\n\n"
        f"![Success of each policy under stress, with intervals](../benchmarks/results/{STRESS_PICTURE})\n"
    )


def stress_of(result: dict[str, Any]) -> str:
    """The disturbances of a run in words; empty without any."""
    return ", ".join(f"{name} {value:g}" for name, value in result["protocol"].get("stress", {}).items())


def _where(*results: dict[str, Any]) -> str:
    """Machine, length and command of runs, a paragraph each, and what a reader must know beside them."""
    told = []
    for result in results:
        policy, limit = result["policy"], result["protocol"]["max_steps"]
        limit = limit if isinstance(limit, int) else " and ".join(map(str, limit))
        ran = policy["metadata"]
        engines = " and ".join(dict.fromkeys(e["used"] for e in ran["engines"] if e["component"] != "call"))
        note = f" {result['note']}" if result.get("note") else ""
        old = doubts([(result["protocol"]["suite"], policy.get("name"), policy.get("weights"))])
        told.append(
            f"{machine(result['launches'][-1])}; {engines} engines in {ran['dtype']}; {result['episodes_s'] / 60:.0f} "
            f"minutes of episodes, {limit} actions at most; `{bare_command(result['command'])}`.{note}{old}\n"
        )
    return "\n".join(told)


def with_interval(rate: dict[str, Any]) -> str:
    """A rate of success and its Wilson interval."""
    if rate["rate"] is None:
        return "-"
    low, high = 100 * rate["wilson_95_low"], 100 * rate["wilson_95_high"]
    return f"{100 * rate['rate']:.1f} % ({low:.1f} to {high:.1f})"
