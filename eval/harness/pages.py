"""Reports of evaluations: one run, and runs compared episode by episode, as pages that open offline and as tables on
the terminal. Made from the result JSON and the videos that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.harness.protocol import EpisodeKey
from eval.harness.report import mean_parts, policy_name
from vla_accel.cli.common import print_table
from vla_accel.report import charts
from vla_accel.report.conditions import conditions, ledger, machine
from vla_accel.report.page import (
    FILMS,
    MOST_FILMS,
    Cell,
    Films,
    Item,
    Number,
    Page,
    Picture,
    Section,
    Table,
    Text,
    bars_picture,
)

Result = Mapping[str, Any]
Named = Sequence[tuple[str, Mapping[str, Any]]]


def run_page(result: Result, others: Mapping[str, Result] | None = None) -> Page:
    """The page of one run. `others`: runs by name, whose latencies are shown for comparison."""
    summary, launch = result["summary"], result["launches"][-1]
    rows = [(_steps(row["steps"]), row) for row in summary["rows"]]
    success: list[Item] = [_success([(name, row["success"]) for name, row in rows], "denoising steps")]
    suites = [(f"{suite['suite']}, {name}", suite) for name, row in rows for suite in row.get("suites", ())]
    if suites:
        success.append(_success(suites, "suite"))
    sections = [
        Section("Success", [*success, _tasks(rows)]),
        Section("Latency", [*latency_items({"this run": result, **(others or {})}), *_fit(summary), *_target(summary)]),
        Section("Videos", _own_films(result)),
        ledger((name, row["breakdown"]["engines"]) for name, row in rows if row["breakdown"]),
        Section("Warnings", [Text(warning) for warning in summary["warnings"]]),
        conditions(result["command"], launch["hardware"], launch["software"], **_rules(result["protocol"])),
    ]
    rates = "; ".join(f"{_rate(row['success'])}{_at(row['steps'])}" for row in summary["rows"])
    return Page(run_title(result), f"Success: {rates}.", sections)


def run_title(result: Result) -> str:
    """The policy, the suite, and how much of it was played."""
    protocol = result["protocol"]
    part = f", part {result['shard']}" if "shard" in result else ""
    stress = "".join(f", {name} {value:g}" for name, value in protocol.get("stress", {}).items())
    several = " of each" if "," in protocol["suite"] else ""
    limit = protocol["max_steps"]
    limit = limit if isinstance(limit, int) else " and ".join(map(str, limit))
    tasks, trials = len(protocol["tasks"]), protocol["trials"]
    return (
        f"{policy_name(result)} on {protocol['suite']}: {tasks} task{'s' * (tasks > 1)}{several} x {trials} "
        f"trial{'s' * (trials > 1)}{part}, {limit} actions at most (limit: {protocol['max_steps_source']}){stress}"
    )


def print_run(result: Result) -> None:
    """Print success, latency and warnings of a run."""
    page = run_page(result)
    print(f"\n{page.title}")
    for section in page.sections:
        for item in section.items if section.title in ("Success", "Latency") else ():
            if isinstance(item, Text):
                print(item.text)
            elif isinstance(item, Picture | Table):
                print_figures(item.figures if isinstance(item, Picture) else item)
    for warning in result["summary"]["warnings"]:
        print(f"warning: {warning}")


def print_figures(table: Table) -> None:
    """Print a table of a page."""
    print(table.title)  # by itself: rich would wrap it to the width of the table
    print_table("", table.header, [[str(cell) for cell in row] for row in table.rows])


def paired_page(report: Mapping[str, Any], results: Mapping[str, Result]) -> Page:
    """The page of a comparison. `report`: of `eval.harness.pairs.compare`; `results`: by name, the reference first."""
    reference, rows = report["reference"], report["rows"]
    summary = "; ".join(
        f"{row['name']}{_at(row['steps'])} has {row['lost']} regressions and {row['gained']} improvements in "
        f"{row['pairs']} pairs (McNemar, exact: p = {row['mcnemar_exact_p']:.3g})"
        for row in rows
    )
    mine = {f"{reference}{_at(_reference_steps(row))}": row["reference"] for row in rows}
    rates = [*mine.items(), *((f"{row['name']}{_at(row['steps'])}", row["other"]) for row in rows)]
    films = _differing_films(rows, results, reference)
    runs = [(f"{name}{_at(row['steps'])}", row) for name, r in results.items() for row in r["summary"]["rows"]]
    last = report["policies"][reference]
    rules = {"note": report.get("note"), **_rules(report["protocol"])}
    sections = [
        Section("Success", [_success(rates, "policy"), pairs_table(report), _tasks(runs)]),
        Section("Latency", latency_items(results)),
        Section("Episodes that only one of them won", [_discordant(rows), *films]),
        ledger((name, policy["engines"]) for name, policy in report["policies"].items()),
        conditions(report["command"], last["hardware"], last["software"], **rules),
    ]
    return Page(f"Compared with {reference}", f"{summary}.", sections)


def pairs_table(report: Mapping[str, Any]) -> Table:
    """The pairs of each policy with the reference, and of each suite where there are several."""
    body: list[list[Cell]] = []
    for row in report["rows"]:
        suites = [(f"{suite['suite']}, {row['name']}", suite) for suite in row.get("suites", ())]
        for name, pairs in [(row["name"], row), *suites]:
            least = pairs["smallest_difference"]
            body.append([
                f"{name}{_at(row['steps'])}",
                *(Number(pairs[n], "{}") for n in ("pairs", "both", "lost", "gained", "neither")),
                _rate(pairs["reference"]),
                _rate(pairs["other"]),
                Number(pairs["mcnemar_exact_p"], "{:.3g}"),
                Number(least, "{:.1%}"),
                f"{pairs['reference']['errors']} and {pairs['other']['errors']}",
            ])  # fmt: skip
    title = f"Pairs with {report['reference']}; p: McNemar, exact; sees: with 80 % power at 5 %"
    header = ("run", "pairs", "both", "regressions", "improvements", "neither", "reference", "this", "p", "sees",
              "errors")  # fmt: skip
    return Table(title, header, body)


def latency_items(results: Mapping[str, Result]) -> list[Picture]:
    """Mean latencies of named runs over steps, stacked by part; nothing where nothing was timed."""
    timed = [row for r in results.values() for row in r["summary"]["rows"] if row["breakdown"]]
    if not timed:
        return []
    bars = bars_of(results)
    names = list(dict.fromkeys(part for bar in bars for part in bar.parts))
    body: list[list[Cell]] = []
    for bar, row in zip(bars, timed, strict=True):
        total = row["breakdown"]["components"]["total"]
        times = [Number(total[name]) for name in ("mean_ms", "p50_ms", "p99_ms")]
        hz = Number(row["breakdown"]["hz"], "{:.1f}")
        body.append([bar.label, *times, hz, *(Number(bar.parts.get(name)) for name in names)])
    target = timed[0]["target"]
    where = ", ".join(dict.fromkeys(machine(row["breakdown"]["hardware"]) for row in timed))
    title = f"Mean latency of a call over denoising steps, stacked by part ({where})"
    header = ["run", "mean ms", "median ms", "p99 ms", "Hz", *(f"{n} ms" for n in names)]
    limit = (1e3 / target["target_hz"], f"{target['target_hz']:g} Hz")
    return [bars_picture(title, bars, "mean of one call [ms]", Table("Latency of a call", header, body), limit)]


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


def _fit(summary: Mapping[str, Any]) -> list[Table]:
    fit = summary["denoise_fit"]
    if not fit:
        return []
    line = f"{fit['component']} time = {fit['intercept_ms']:.2f} ms + {fit['slope_ms']:.2f} ms x steps"
    line += " (two points define the line)" if len(fit["rows"]) == 2 else ""
    times, error = ("predicted_ms", "measured_ms"), "error_percent"
    body = [[str(r["steps"]), *(Number(r[n]) for n in times), Number(r[error], "{:+.1f}%")] for r in fit["rows"]]
    return [Table(line, ("steps", "predicted ms", "measured ms", "error"), body)]


def _target(summary: Mapping[str, Any]) -> list[Table | Text]:
    """What the components of the fastest step count would have to reach for the target rate, and the verdict."""
    timed = [row for row in summary["rows"] if row["target"] and row["target"]["components"]]
    if not timed:
        return []
    fastest = min(timed, key=lambda row: row["target"]["total_ms"])
    target, steps = fastest["target"], fastest["steps"]
    hz, now = f"{target['target_hz']:g} Hz", f"{target['total_ms']:.1f} ms ({1e3 / target['total_ms']:.1f} Hz)"
    body: list[list[Cell]] = []
    for name, goal in target["components"].items():
        reach: tuple[Cell, Cell] = (Number(goal["allowed_ms"]), Number(goal["speedup"], "{:.1f}x"))
        if target["met"] or goal["allowed_ms"] is None:
            reach = ("keep" if target["met"] else "not enough alone", "-")
        body.append([name, Number(goal["now_ms"]), *reach])
    title = f"For {hz} ({target['budget_ms']:.1f} ms){_at(steps)}, each component alone"
    if target["met"]:
        verdict = f"{hz} is met: a call takes {now}."
    else:
        name, largest = max(target["components"].items(), key=lambda item: item[1]["now_ms"])
        verdict = (
            f"{hz} is not met: a call takes {now}, {target['overall_speedup']:.2f}x too long. {name} is the largest "
            f"part, and making it faster alone {'cannot' if largest['allowed_ms'] is None else 'can'} be enough."
        )
    return [Table(title, ("component", "now ms", "must reach ms", "speed-up"), body), Text(verdict)]


def _success(rates: Named, first: str) -> Picture:
    labels = [label for label, _ in rates]
    values = [(r["rate"], r["wilson_95_low"], r["wilson_95_high"]) for _, r in rates]
    body = [
        [label, *(Number(r[n], "{}") for n in ("successes", "episodes")),
         *(Number(v, "{:.1%}") for v in interval), Number(r["errors"], "{}")]
        for (label, r), interval in zip(rates, values, strict=True)
    ]  # fmt: skip
    header = (first, "successes", "episodes", "rate", "from (95 %)", "to (95 %)", "errors")
    return Picture(
        "Success with Wilson's 95 % interval",
        f"Points with intervals: {'; '.join(f'{label}: {_rate(r)}' for label, r in rates)}.",
        lambda narrow: charts.intervals(labels, values, narrow=narrow),
        Table("Success", header, body),
    )


def _tasks(runs: Named) -> Picture:
    """Success by task; the tasks of all runs are the same."""
    columns = [label for label, _ in runs]
    same = list(zip(*(row["tasks"] for _, row in runs), strict=True))
    tasks = [f"{task.get('suite', '')} {task['task_id']}: {task['task']}".strip() for task, *_ in same]
    values = [[one["rate"] for one in line] for line in same]
    body: list[list[Cell]] = [
        [task, *(Number(one["rate"], f"{{:.0%}} ({_count(one)})") for one in line)]
        for task, line in zip(tasks, same, strict=True)
    ]
    rates = [(v, task) for line, task in zip(values, tasks, strict=True) for v in line if v is not None]
    worst = f"; the lowest is {100 * min(rates)[0]:.0f} % at: {min(rates)[1]}" if rates else ""
    return Picture(
        "Success by task; light cells are the failures",
        f"A map of success by task{worst}.",
        lambda narrow: charts.heat(tasks, columns, values, narrow=narrow),
        Table("Success by task", ("task", *columns), body),
    )


def _discordant(rows: Sequence[Mapping[str, Any]]) -> Table | Text:
    body: list[list[Cell]] = [
        [f"{row['name']}{_at(row['steps'])}", Number(e["task_id"], "{}"), Number(e["trial"], "{}"), e["won_by"]]
        for row in rows
        for e in row["discordant"]
    ]
    header = ("policy", "task", "trial", "won by")
    return Table("Episodes that only one of them won", header, body) if body else Text("None.")


def _differing_films(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Result], reference: str) -> list[Films]:
    """Videos of regressions, then of improvements, where both runs have them."""
    filmed = {name: _films_of(result) for name, result in results.items()}
    regressions, improvements = [], []
    for row in rows:
        for episode in row["discordant"]:
            key = EpisodeKey.from_json({**episode, "steps": row["steps"]})
            keys = {row["name"]: key, reference: replace(key, steps=_reference_steps(row))}
            both = [(name, filmed[name][keys[name]]) for name in (reference, row["name"]) if keys[name] in filmed[name]]
            if len(both) == 2:
                worse = episode["won_by"] == "reference"
                title = f"{row['name']}: {'regression' if worse else 'improvement'} in {key}"
                (regressions if worse else improvements).append(Films(title, both))
    return [*regressions, *improvements][:MOST_FILMS]


def _own_films(result: Result) -> list[Films]:
    outcomes = {EpisodeKey.from_json(e): e for e in result["episodes"]}
    shown = []
    for key, path in list(_films_of(result).items())[:MOST_FILMS]:
        outcome = "error" if outcomes[key].get("error") else "success" if outcomes[key]["success"] else "failure"
        shown.append(Films(f"{key}: {outcome}", [("rollout", path)]))
    return shown


def _films_of(result: Result) -> dict[EpisodeKey, Path]:
    """The videos of episodes that still exist."""
    there = {path.name: path for name in result.get("videos") or [] if (path := Path(name)).is_file()}
    return {
        EpisodeKey.from_json(e): there[e["video"]]
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


def _reference_steps(row: Mapping[str, Any]) -> int | None:
    """The reference's step count; older reports have the same one for both."""
    return row.get("reference_steps", row["steps"])


def _at(steps: int | None) -> str:
    return "" if steps is None else f", {_steps(steps)}"
