"""Runs of several policies over the same episodes, compared episode by episode.

    python -m eval.paired REFERENCE.json OTHER.json … --output paired.json

Reads result files of `python -m eval.libero`. Every episode (task, trial, steps) must be in both files, under the same
protocol. Knows nothing about policies beyond what the files say of them; plays nothing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from eval.libero.report import SCHEMA as RESULT_SCHEMA
from eval.libero.statistics import Rate
from vla_accel.errors import ConfigError, VlaAccelError
from vla_accel.files import replacing

SCHEMA = "vla_accel.libero.paired/1"
# What makes an episode the same one; which tasks, trials and step counts were played shows in the episodes.
SAME = ("suite", "seed", "max_steps", "replan_steps", "resolution", "wait_steps")
Key = tuple[int | None, int, int]
"""Steps (None where a server or the expert decides), task, trial."""


@dataclass(frozen=True)
class Arguments:
    """Compare LIBERO runs of several policies with a reference run over the same episodes."""

    reference: Annotated[Path, tyro.conf.Positional]
    """Result file of `python -m eval.libero`."""
    others: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Result files to compare with it, one or more."""
    output: Path | None = None
    """JSON report."""
    note: str = ""
    """What a reader must know beside the figures."""


@dataclass(frozen=True)
class Pairs:
    """Episodes of one step count that both policies played; `both`, `lost`, `gained` and `neither` add up to those that
    both finished.

    Attributes:
        both: won by both policies.
        lost: won by the reference only.
        gained: won by the other policy only.
        neither: won by none.
        reference_errors, other_errors: crashed episodes of each; such a pair is not compared.
    """

    both: int = 0
    lost: int = 0
    gained: int = 0
    neither: int = 0
    reference_errors: int = 0
    other_errors: int = 0

    @property
    def compared(self) -> int:
        """Pairs whose episodes both ran to their end."""
        return self.both + self.lost + self.gained + self.neither

    @property
    def reference(self) -> Rate:
        """The reference's successes among the compared pairs."""
        return Rate(self.both + self.lost, self.compared, self.reference_errors)

    @property
    def other(self) -> Rate:
        """The other policy's successes among the compared pairs."""
        return Rate(self.both + self.gained, self.compared, self.other_errors)

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "pairs": self.compared,
            "reference": self.reference.to_json(),
            "other": self.other.to_json(),
            "both": self.both,
            "lost": self.lost,
            "gained": self.gained,
            "neither": self.neither,
            "mcnemar_exact_p": mcnemar_exact(self.lost, self.gained),
        }


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided exact p of McNemar's test: how likely discordant pairs split at least so unevenly by a fair coin; 1
    without any.

    Source: Q. McNemar, Psychometrika 12 (1947) 153, with the binomial distribution in place of its approximation.
    """
    if min(lost, gained) < 0:
        raise ConfigError(f"discordant pairs: expected counts of at least 0, got {lost} and {gained}")
    number = lost + gained
    tail = sum(math.comb(number, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**number)


def read_result(path: Path) -> dict[str, Any]:
    """A result file. Raises ConfigError if it is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a readable LIBERO result, got: {error}") from error
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != RESULT_SCHEMA:
        raise ConfigError(f"{path}: expected a LIBERO result of schema {RESULT_SCHEMA!r}, got schema {schema!r}")
    return result


def episodes_of(result: Mapping[str, Any], name: str) -> dict[Key, bool | None]:
    """(steps, task, trial) to success, or to None for an episode that crashed. Raises ConfigError for one that is there
    twice."""
    found: dict[Key, bool | None] = {}
    for episode in result["episodes"]:
        key = (episode["steps"], episode["task_id"], episode["trial"])
        if key in found:
            raise ConfigError(f"{name}: expected every episode once, got {_say(key)} twice")
        found[key] = None if episode.get("error") else bool(episode["success"])
    if not found:
        raise ConfigError(f"{name}: expected at least one episode, got none")
    return found


def pair(reference: Mapping[Key, bool | None], other: Mapping[Key, bool | None], names: tuple[str, str]
         ) -> dict[int | None, Pairs]:  # fmt: skip
    """Step count to its pairs. Raises ConfigError for an episode that one side has and the other has not."""
    for mine, theirs, has, lacks in ((reference, other, *names), (other, reference, *reversed(names))):
        alone = sorted(mine.keys() - theirs.keys(), key=_order)
        if alone:
            raise ConfigError(
                f"{lacks}: expected the episodes of {has}, got none of {len(alone)}, the first {_say(alone[0])}"
            )
    counts: dict[int | None, dict[str, int]] = {}
    for key in sorted(reference, key=_order):
        won, also = reference[key], other[key]
        count = counts.setdefault(key[0], dict.fromkeys(Pairs.__dataclass_fields__, 0))
        count["reference_errors"] += won is None
        count["other_errors"] += also is None
        if won is not None and also is not None:
            count[("both" if also else "lost") if won else ("gained" if also else "neither")] += 1
    return {steps: Pairs(**count) for steps, count in counts.items()}


def compare(reference: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The report: a row for each other result and step count.

    Args: results as `python -m eval.libero` writes them, by name; `name`: the reference's.
    Raises ConfigError for another protocol or an unpaired episode.
    """
    mine = episodes_of(reference, name)
    rows: list[dict[str, Any]] = []
    for label, other in others.items():
        theirs = episodes_of(other, label)
        for field in SAME:
            asked, got = reference["protocol"].get(field), other["protocol"].get(field)
            if asked != got:
                raise ConfigError(f"{label}: expected {field} {asked!r} as in {name}, got {got!r}")
        for steps, pairs in pair(mine, theirs, (name, label)).items():
            different = [
                {"task_id": task, "trial": trial, "won_by": "reference" if mine[steps, task, trial] else "other"}
                for at, task, trial in sorted(mine, key=_order)
                if at == steps and None not in (a := mine[at, task, trial], b := theirs[at, task, trial]) and a != b
            ]
            rows.append({"name": label, "steps": steps, **pairs.to_json(), "discordant": different})
    return {
        "schema": SCHEMA,
        "protocol": {field: reference["protocol"].get(field) for field in SAME},
        "reference": name,
        "policies": {label: _described(r) for label, r in {name: reference, **others}.items()},
        "rows": rows,
    }


def _described(result: Mapping[str, Any]) -> dict[str, Any]:
    """Who played, and where: what a comparison must say of a run."""
    policy, launch = result["policy"], result["launches"][-1]
    metadata = policy.get("metadata") or {}
    config = policy.get("config") or {}
    asked = {n: config[n] for n in ("vision", "kv_cache", "denoise") if n in config}
    return {
        "policy": policy.get("name"),
        "sha256": policy.get("sha256"),
        "dtype": metadata.get("dtype"),
        "asked": asked,
        "engines": metadata.get("engines") or [],
        "hardware": launch["hardware"],
        "software": launch["software"],
        "workers": launch.get("workers"),
    }


def _order(key: Key) -> tuple[int, int, int]:
    return (key[0] or 0, *key[1:])


def _say(key: Key) -> str:
    return f"task {key[1]}, trial {key[2]}" + (f", steps {key[0]}" if key[0] else "")


def _print(report: Mapping[str, Any]) -> None:
    table = Table(title=f"paired with {report['reference']}; p: McNemar, exact")
    for column in ("", "steps", "pairs", "reference", "this", "lost", "gained", "p", "errors"):
        table.add_column(column)
    for row in report["rows"]:
        cells = [row["name"], str(row["steps"] or "-"), str(row["pairs"])]
        for rate in (row["reference"], row["other"]):
            low, high = 100 * rate["wilson_95_low"], 100 * rate["wilson_95_high"]
            cells.append(f"{rate['successes']}, {low:.1f} to {high:.1f} %")
        errors = f"{row['reference']['errors']} and {row['other']['errors']}"
        table.add_row(*cells, str(row["lost"]), str(row["gained"]), f"{row['mcnemar_exact_p']:.3g}", errors)
    # Where nobody watches, lines need not be broken.
    console = Console()
    Console(width=None if console.is_terminal else max(console.width, 120)).print(table)


def run(arguments: Arguments) -> dict[str, Any]:
    """Compare, print a table and one JSON line, write the report; returns it."""
    paths: Sequence[Path] = (arguments.reference, *arguments.others)
    names = [path.stem for path in paths]
    if not arguments.others:
        raise ConfigError("others: expected at least one result file, got none")
    if len(set(names)) < len(names):
        raise ConfigError(f"result files: expected different names, got {', '.join(names)}")
    results = dict(zip(names, map(read_result, paths), strict=True))
    reference = results.pop(names[0])
    # The files' names, not where they lie on this machine.
    command = ["python", "-m", "eval.paired", *(path.name for path in paths)]
    report = {"note": arguments.note, "command": command, **compare(reference, results, names[0])}
    _print(report)
    if arguments.output is not None:
        with replacing(arguments.output) as temporary:
            temporary.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 compared, 1 the files cannot be compared."""
    try:
        run(tyro.cli(Arguments, args=argv, prog="python -m eval.paired"))
    except VlaAccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
