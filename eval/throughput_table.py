"""The table of episodes an hour. Knows the reports of `eval.throughput`, no other result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.markdown import machines, rows


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
    where = machines((" ".join(result["command"].split()[:3]), result) for result in results)
    text = (
        "An hour: while all simulators play. Waits: the share of a simulator's time in which it waits for an answer; "
        "cores busy: all processes together; policy's process: the share of a core that it uses, at most 100 % where "
        "one thread does the work."
    )
    return rows(header, body) + f"\n{text} {where}.\n"
