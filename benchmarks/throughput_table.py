"""Tables of episodes an hour, measured and planned. Knows the reports of `eval.throughput`, no other result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.markdown import machines, rows


def throughput(results: Sequence[dict[str, Any]]) -> str:
    """A row a case; those that failed say so."""
    header = [
        "simulators",
        "GPUs",
        "cores",
        "steps",
        "episodes",
        "an hour",
        "waits for answers",
        "an answer ms",
        "of it policy",
        "cores busy",
        "GPUs busy",
        "policy's process",
    ]
    body = []
    for result in results:
        for row in result["rows"]:
            how = f"{row['simulators']}, {'Ray' if row['ray'] else 'worker processes'}"
            cells = [how, str(row["gpus"]), str(row["cores"] or result["cores"]), str(result["steps"])]
            if "error" in row:
                body.append([*cells, "**failed**", *["-"] * 7])
                continue
            gpus = ", ".join(f"{100 * share:.0f} %" for share in row["gpu_busy"]) or "-"
            body.append([
                *cells,
                f"{row['episodes']}" + (f", {row['errors']} crashed" if row["errors"] else ""),
                f"**{row['per_hour']}**",
                f"{100 * row['waiting']:.0f} %",
                f"{row['call_ms']:.1f}",
                f"{row['policy_ms']:.1f}",
                f"{row['cores_busy']:.1f}",
                gpus,
                f"{100 * row['policy_core']:.0f} %",
            ])  # fmt: skip
    where = machines(
        ("Ray" if row["ray"] else "worker processes", result) for result in results for row in result["rows"]
    )
    text = (
        "An hour: while all simulators play. Waits: the share of a simulator's time in which it waits for an answer; "
        "cores busy: all processes together; policy's process: the share of a core that it uses, at most 100 % where "
        "one thread does the work."
    )
    return rows(header, body) + f"\n{text} {where}.\n"


NODES, SUITE = 64, 500
"""Of the plan: machines, and episodes of one suite of LIBERO."""


def plan(results: Sequence[dict[str, Any]]) -> str:
    """What `NODES` machines like the measured one would do if nothing but their own parts bound them: a row a Ray case,
    the quickest for each GPU first."""
    cases = [row for result in results for row in result["rows"] if row["ray"] and row["gpus"] and "error" not in row]
    cases.sort(key=lambda row: -row["per_hour"] / row["gpus"])
    header = [
        "a node: GPUs, simulators",
        "an hour, measured",
        f"{NODES} nodes, an hour",
        "results a second",
        f"one suite, {SUITE} episodes",
        "start of a node",
    ]
    body = []
    for row in cases:
        every = NODES * row["per_hour"]
        # No simulator has more than one episode of so small a run: it takes as long as one of them.
        longest = max(3600 * SUITE / every, 3600 * row["simulators"] / row["per_hour"])
        body.append([
            f"{row['gpus']}, {row['simulators']}",
            str(row["per_hour"]),
            f"{every:,}",
            f"{every / 3600:.0f}",
            f"{longest:.0f} s",
            f"{row['start_s']:.0f} s",
        ])  # fmt: skip
    text = (
        "Computed from the measured rows, not run. Results a second: what the one command takes and writes, each on "
        "disk before the next; one suite: at least as long as one episode takes; start: until the first result."
    )
    return rows(header, body) + f"\n{text}\n"
