"""The report of `vla-accel tune`: latency against agreement and success, and why candidates were dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vla_accel.report import charts
from vla_accel.report.bench import call_parts
from vla_accel.report.conditions import conditions, ledger, machine
from vla_accel.report.page import (
    FILMS,
    MOST_FILMS,
    Cell,
    Films,
    Number,
    Page,
    Picture,
    Section,
    Table,
    Text,
    bars_picture,
)

Row = Mapping[str, Any]


def page(result: Mapping[str, Any]) -> Page:
    """The page of a report of schema `vla_accel.tune/1`."""
    rows = result["tried"]
    timed = [row for row in rows if row["latency"]]
    summary = f"{result['chosen']} is {times_as_fast(result)} on {machine(result['hardware'])}: {result['why']}."
    played = [row for row in rows if row["success"]]
    left_out = [[name, why] for name, why in result["left_out"].items()]
    left: list[Any] = [Table("Engines that this machine cannot run", ("engine", "why"), left_out)] if left_out else []
    settings = {n: v for n, v in result["settings"].items() if isinstance(v, str | int | float)}
    took = {"seconds of this launch": result["seconds"], "measurements of earlier ones": result["measured_before"]}
    sections = [
        Section("Latency against agreement", _agreement(timed)),
        Section("Success on paired episodes", _success(played) if played else [Text("Success was not tested.")]),
        Section("Episodes that only one of them won", _films(played)),
        Section("Everything tried", [tried(rows), *left]),
        Section("Where the time goes", [_parts(timed)] if timed else []),
        ledger((row["name"], row["latency"]["engines"]) for row in timed),
        conditions(result["command"], result["hardware"], result["software"], **took, **settings),
    ]
    return Page(f"Tuning {result['checkpoint']}", summary, sections)


def times_as_fast(result: Row) -> str:
    """How much faster than FP32 eager the chosen candidate is, with both medians."""
    (timed,) = (row["in_turns"] for row in result["tried"] if row["chosen"])
    medians = f" ({timed['median_ms']:.2f} and {timed['reference_ms']:.2f} ms in turns)" if timed else ""
    return f"{result['times_as_fast']:.2f} times as fast as FP32 eager{medians}"


def _agreement(rows: Sequence[Row]) -> list[Picture]:
    """Latency against disagreement; the reference has none."""
    shown = [row for row in rows if not row["other_policy"]]
    if not shown:
        return []
    points = agreement_points(shown)
    body: list[list[Cell]] = []
    for row in shown:
        found = row["agreement"] or {}
        error, flipped = Number(found.get("relative_error"), "{:.1%}"), Number(found.get("flipped"), "{}")
        median, same = Number(row["latency"]["median_ms"]), Number(_cosine(row), "{:.6f}")
        body.append([row["name"], median, same, error, flipped, "yes" if row["front"] else "no", verdict(row)])
    error, words = "error / change between observations", (f"{p.label}: {p.x:.1f} ms, {p.y:.1e}" for p in points)
    header = ("configuration", "median ms", "cosine", error, "commands flipped", "on the front", "verdict")
    title = (
        "Median of a call against disagreement with FP32 eager (one minus the cosine of the final actions); the line "
        "joins those that no other beats in both"
    )
    draw = partial(draw_agreement, points)
    return [Picture(title, f"Points: {'; '.join(words)}.", draw, Table("Latency and agreement", header, body))]


def agreement_points(rows: Sequence[Row]) -> list[charts.Point]:
    """The timed candidates that compute the same policy, by latency and disagreement."""
    return [charts.Point(row["name"], row["latency"]["median_ms"], 0.0 if (same := _cosine(row)) is None else 1 - same,
                         chosen=row["chosen"], front=row["front"], dropped=row["dropped"] is not None)
            for row in rows if row["latency"] and not row["other_policy"]]  # fmt: skip


def draw_agreement(points: Sequence[charts.Point], narrow: bool = False) -> Any:
    """Latency against disagreement: a matplotlib figure."""
    return charts.scatter(points, x="median of one call [ms]", y="1 - cosine", narrow=narrow, finest=1e-6)


def _success(rows: Sequence[Row]) -> list[Picture]:
    """Latency against the difference of success; the table has Tango's interval and the proven bound."""
    points = [charts.Point(row["name"], row["latency"]["median_ms"], 100 * row["success"]["difference"],
                           chosen=row["chosen"], dropped=row["dropped"] is not None) for row in rows]  # fmt: skip
    names = {"pairs": "pairs", "lost": "regressions", "gained": "improvements", "crashed": "crashed"}
    body = []
    for row in rows:
        s = row["success"]
        wins = [Number(s[n], "{}") for n in ("reference_won", "candidate_won")]
        shares = [Number(s[n], "{:+.1%}") for n in ("difference", "tango_95_low", "tango_95_high", "lower_bound")]
        body.append([row["name"], *(Number(s[n], "{}") for n in names), *wins, *shares, s["verdict"]])
    s = rows[0]["success"]
    words = "; ".join(f"{p.label}: {p.x:.1f} ms, {p.y:+.1f} points" for p in points)
    return [Picture(
        "Median of a call against the difference of success from FP32 eager",
        f"Points: {words}.",
        lambda narrow: charts.scatter(points, x="median of one call [ms]", y="difference of success [points]",
                                      narrow=narrow),
        Table(f"Paired episodes; margin {100 * s['margin']:g} points, error rate {s['alpha']:.3g} a finalist",
              ("configuration", *names.values(), "reference won", "candidate won", "difference",
               "from (Tango, 95 %)", "to", "proven to be above", "verdict"), body),
    )]  # fmt: skip


def _films(rows: Sequence[Row]) -> list[Films]:
    """Films of regressions, then of improvements, as far as the files exist."""
    found: dict[str, list[Films]] = {"reference": [], "candidate": []}
    for row in rows:
        for episode in row["success"]["discordant"]:
            films = [Path(film) for film in episode["films"]]
            if films and all(film.is_file() and film.suffix in FILMS for film in films):
                how = "regression" if episode["won_by"] == "reference" else "improvement"
                title = f"{row['name']}: {how} in {episode['key']}"
                found[episode["won_by"]].append(Films(title, [("FP32 eager", films[0]), (row["name"], films[1])]))
    return [*found["reference"], *found["candidate"]][:MOST_FILMS]


def tried(rows: Sequence[Row]) -> Table:
    """A row for each candidate."""
    body: list[list[Cell]] = []
    for row in rows:
        median, s = (row["latency"] or {}).get("median_ms"), row["success"]
        pairs = f"{s['lost']} / {s['gained']} of {s['pairs']}" if s else "-"
        figures = [Number(median), Number(_cosine(row), "{:.6f}"), pairs]
        body.append([row["name"], row["tries"], *figures, verdict(row)])
    header = ("configuration", "what it tries", "median ms", "cosine", "regressions / improvements", "verdict")
    return Table("Everything tried, and why it was dropped", header, body)


def _parts(rows: Sequence[Row]) -> Picture:
    found = sorted(((row["name"], row["latency"]) for row in rows), key=lambda one: one[1]["median_ms"])
    bars = [charts.Bar(name, call_parts(latency), f"{latency['median_ms']:.1f} ms") for name, latency in found]
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    medians = [(bar.label, bar.parts | latency["parts_ms"]) for bar, (_, latency) in zip(bars, found, strict=True)]
    body = [[label, *(Number(parts.get(name)) for name in names)] for label, parts in medians]
    return bars_picture(
        "Median of a call, stacked by part, the fastest first",
        bars,
        "median of one call [ms]",
        Table("Parts of a call", ("configuration", *(f"{name} ms" for name in names)), body),
    )


def _cosine(row: Row) -> float | None:
    return None if row["agreement"] is None else row["agreement"]["cosine"]


def verdict(row: Row) -> str:
    """Whether a candidate was chosen, or why not. Only the reference has no agreement."""
    if row["chosen"]:
        return "chosen"
    return row["dropped"] or ("agrees, and is slower" if row["agreement"] else "the reference")
