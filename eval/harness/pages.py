"""Reports of evaluations, as pages that open offline: one run, and runs compared episode by episode.

Made from the result JSON and the videos that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.harness.protocol import EpisodeKey
from eval.harness.report import mean_parts, policy_name
from vla_accel.report import charts
from vla_accel.report.conditions import conditions, ledger, machine
from vla_accel.report.page import FILMS, MOST_FILMS, Cell, Films, Number, Page, Picture, Section, Table, Text

Result = Mapping[str, Any]


def run_page(result: Result, others: Mapping[str, Result] | None = None) -> Page:
    """The page of one run. `others`: runs by name, whose latencies are shown for comparison."""
    rows, protocol = result["summary"]["rows"], result["protocol"]
    launch = result["launches"][-1]
    rates = "; ".join(f"{_rate(row['success'])}{_at(row['steps'])}" for row in rows)
    sections = [
        Section("Success", [_success([(_steps(row["steps"]), row["success"]) for row in rows], "denoising steps"),
                            _tasks([(_steps(row["steps"]), row) for row in rows])]),
        Section("Latency", latency_items({"this run": result, **(others or {})})),
        Section("Films", _own_films(result)),
        ledger((_steps(row["steps"]), row["breakdown"]["engines"]) for row in rows if row["breakdown"]),
        Section("Warnings", [Text(warning) for warning in result["summary"]["warnings"]]),
        conditions(result["command"], launch["hardware"], launch["software"], **_rules(protocol)),
    ]  # fmt: skip
    return Page(f"{policy_name(result)} on {protocol['suite']}", f"Success: {rates}.", sections)


def paired_page(report: Mapping[str, Any], results: Mapping[str, Result]) -> Page:
    """The page of a comparison. `report`: of `eval.harness.pairs.compare`; `results`: by name, the reference first."""
    reference, rows = report["reference"], report["rows"]
    summary = "; ".join(
        f"{row['name']}{_at(row['steps'])} lost {row['lost']} and gained {row['gained']} of {row['pairs']} pairs "
        f"(McNemar, exact: p = {row['mcnemar_exact_p']:.3g})"
        for row in rows
    )
    rates = [(f"{reference}{_at(row['steps'])}", row["reference"]) for row in rows]
    rates = [*dict(rates).items(), *((f"{row['name']}{_at(row['steps'])}", row["other"]) for row in rows)]
    films = _lost_films(rows, results, reference)
    runs = [(f"{name}{_at(row['steps'])}", row) for name, r in results.items() for row in r["summary"]["rows"]]
    last = report["policies"][reference]
    sections = [
        Section("Success", [_success(rates, "policy"), _pairs(rows), _tasks(runs)]),
        Section("Latency", latency_items(results)),
        Section("Episodes that only one of them won", [_discordant(rows), *films]),
        ledger((name, policy["engines"]) for name, policy in report["policies"].items()),
        conditions(report["command"], last["hardware"], last["software"], note=report.get("note"),
                   **_rules(report["protocol"])),
    ]  # fmt: skip
    return Page(f"Compared with {reference}", f"{summary}.", sections)


def latency_items(results: Mapping[str, Result]) -> list[Picture]:
    """Mean latencies of named runs over steps, stacked by part; nothing where nothing was timed."""
    timed = [(name, row) for name, r in results.items() for row in r["summary"]["rows"] if row["breakdown"]]
    if not timed:
        return []
    bars = bars_of(results)
    names = list(dict.fromkeys(part for bar in bars for part in bar.parts))
    body: list[list[Cell]] = []
    for bar, (_, row) in zip(bars, timed, strict=True):
        parts = row["breakdown"]["components"]
        total = parts["total"]
        # The unexplained rest is no measured part; all others are the JSON's own figures.
        body.append([
            bar.label, Number(total["mean_ms"]), Number(total["p50_ms"]), Number(total["p99_ms"]),
            Number(row["breakdown"]["hz"], "{:.1f}"), *(Number(bar.parts.get(name)) for name in names),
        ])  # fmt: skip
    target = timed[0][1]["target"]
    limit = (1e3 / target["target_hz"], f"{target['target_hz']:g} Hz")
    where = ", ".join(dict.fromkeys(machine(row["breakdown"]["hardware"]) for _, row in timed))
    words = "; ".join(f"{bar.label}: {sum(bar.parts.values()):.1f} ms" for bar in bars)
    return [Picture(
        f"Mean latency of a call over denoising steps, stacked by part ({where})",
        f"Stacked bars: {words}.",
        lambda narrow: charts.stacked(bars, unit="mean of one call [ms]", narrow=narrow, limit=limit),
        Table("Latency of a call", ["run", "mean ms", "median ms", "p99 ms", "Hz", *(f"{n} ms" for n in names)], body),
    )]  # fmt: skip


def bars_of(results: Mapping[str, Result]) -> list[charts.Bar]:
    """A bar for each named run and step count that was timed."""
    several = len(results) > 1
    found = []
    for name, result in results.items():
        for row in result["summary"]["rows"]:
            if row["breakdown"]:
                parts = mean_parts(row["breakdown"])
                total = sum(parts.values())
                text = f"{total:.1f} ms, {1e3 / total:.1f} Hz" if total else ""
                found.append(charts.Bar(f"{name}{_at(row['steps'])}" if several else _steps(row["steps"]), parts, text))
    return found


def _success(rates: Sequence[tuple[str, Mapping[str, Any]]], first: str) -> Picture:
    labels = [label for label, _ in rates]
    values = [(r["rate"], r["wilson_95_low"], r["wilson_95_high"]) for _, r in rates]
    body = [
        [label, Number(r["successes"], "{}"), Number(r["episodes"], "{}"), Number(r["rate"], "{:.1%}"),
         Number(r["wilson_95_low"], "{:.1%}"), Number(r["wilson_95_high"], "{:.1%}"), Number(r["errors"], "{}")]
        for label, r in rates
    ]  # fmt: skip
    header = (first, "successes", "episodes", "rate", "from (95 %)", "to (95 %)", "errors")
    return Picture(
        "Success with Wilson's 95 % interval",
        f"Points with intervals: {'; '.join(f'{label}: {_rate(r)}' for label, r in rates)}.",
        lambda narrow: charts.intervals(labels, values, narrow=narrow),
        Table("Success", header, body),
    )


def _tasks(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Picture:
    """Success by task; the tasks of all runs are the same."""
    tasks = [task["task"] for task in runs[0][1]["tasks"]]
    columns = [label for label, _ in runs]
    values = [[row["tasks"][i]["rate"] for _, row in runs] for i in range(len(tasks))]
    body: list[list[Cell]] = [
        [task, *(Number(row["tasks"][i]["rate"], f"{{:.0%}} ({_count(row['tasks'][i])})") for _, row in runs)]
        for i, task in enumerate(tasks)
    ]
    worst = min((v, task) for line, task in zip(values, tasks, strict=True) for v in line if v is not None) if any(
        v is not None for line in values for v in line
    ) else None  # fmt: skip
    return Picture(
        "Success by task; light cells are the failures",
        "A map of success by task" + (f"; the lowest is {100 * worst[0]:.0f} % at: {worst[1]}." if worst else "."),
        lambda narrow: charts.heat(tasks, columns, values, narrow=narrow),
        Table("Success by task", ("task", *columns), body),
    )


def _pairs(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = ("pairs", "both", "lost", "gained", "neither")
    body = [
        [f"{row['name']}{_at(row['steps'])}", *(Number(row[n], "{}") for n in names),
         Number(row["mcnemar_exact_p"], "{:.3g}")]
        for row in rows
    ]  # fmt: skip
    return Table("Pairs of episodes with the reference", ("policy", *names, "p (McNemar, exact)"), body)


def _discordant(rows: Sequence[Mapping[str, Any]]) -> Table | Text:
    body: list[list[Cell]] = [
        [f"{row['name']}{_at(row['steps'])}", Number(e["task_id"], "{}"), Number(e["trial"], "{}"), e["won_by"]]
        for row in rows
        for e in row["discordant"]
    ]
    header = ("policy", "task", "trial", "won by")
    return Table("Episodes that only one of them won", header, body) if body else Text("None.")


def _lost_films(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Result], reference: str) -> list[Films]:
    """Videos of lost episodes, then of gained ones, where both runs have them."""
    filmed = {name: _films_of(result) for name, result in results.items()}
    lost, gained = [], []
    for row in rows:
        for episode in row["discordant"]:
            key = _key({**episode, "steps": row["steps"]})
            both = [(name, filmed[name][key]) for name in (reference, row["name"]) if key in filmed[name]]
            if len(both) == 2:
                how, kept = ("lost", lost) if episode["won_by"] == "reference" else ("gained", gained)
                title = f"{row['name']} {how} {_title(key)}"
                kept.append(Films(title, both))
    return [*lost, *gained][:MOST_FILMS]


def _own_films(result: Result) -> list[Films]:
    outcomes = {_key(e): e for e in result["episodes"]}
    shown = []
    for key, path in list(_films_of(result).items())[:MOST_FILMS]:
        outcome = "error" if outcomes[key].get("error") else "won" if outcomes[key]["success"] else "lost"
        title = _title(key)
        shown.append(Films(f"{title[0].upper()}{title[1:]}: {outcome}", [("rollout", path)]))
    return shown


def _key(episode: Mapping[str, Any]) -> EpisodeKey:
    return EpisodeKey(episode["steps"], episode["task_id"], episode["trial"], episode.get("suite", ""))


def _title(key: EpisodeKey) -> str:
    return f"{key.suite} task {key.task_id}, trial {key.trial}".lstrip() + _at(key.steps)


def _films_of(result: Result) -> dict[EpisodeKey, Path]:
    """The videos of episodes that still exist."""
    there = {path.name: path for name in result.get("videos") or [] if (path := Path(name)).is_file()}
    return {
        _key(e): there[e["video"]]
        for e in result["episodes"]
        if e.get("video") in there and there[e["video"]].suffix in FILMS
    }


def _rules(protocol: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, str | int | float) else str(value) for name, value in protocol.items()}


def _rate(rate: Mapping[str, Any]) -> str:
    if rate["rate"] is None:
        return f"no finished episode, {rate['errors']} errors"
    low, high = 100 * rate["wilson_95_low"], 100 * rate["wilson_95_high"]
    return f"{100 * rate['rate']:.1f} % ({_count(rate)}; {low:.1f} to {high:.1f} %)"


def _count(rate: Mapping[str, Any]) -> str:
    return f"{rate['successes']}/{rate['episodes']}"


def _steps(steps: int | None) -> str:
    return "own steps" if steps is None else f"{steps} step{'s' * (steps > 1)}"


def _at(steps: int | None) -> str:
    return "" if steps is None else f", {_steps(steps)}"
