"""The parts of one run, played by several jobs (`--shard`), as one result.

    python -m eval.merge part1.json part2.json … --output whole.json

Reads result files that a benchmark's command wrote with `--shard`; prints and writes what one job would have. They must
be parts of one run, by their fingerprints, and together hold every episode of its plan once. The summary is computed
again from the episodes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from eval.harness.figures import draw_result
from eval.harness.log import differences
from eval.harness.pages import print_run, run_page
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.report import Played, Samples, check_output, read_result, row_line
from eval.harness.rollout import EpisodeResult
from eval.script import run_script
from vla_accel import latency
from vla_accel.cli.common import print_json
from vla_accel.cli.options import Argument, OutputFile, Written
from vla_accel.errors import ConfigError
from vla_accel.files import write_json
from vla_accel.report import page

NAMED = 3  # episodes that an error names


@dataclass(frozen=True)
class Arguments:
    """Put the parts of one run together, which jobs played with --shard."""

    parts: Annotated[tuple[Path, ...], Argument("PART ...", positional=True)]
    """Result files, such as `python -m eval.libero --shard 1/2` writes."""
    output: Annotated[Path, Written()]
    """Result JSON of the whole run; its picture goes into the same folder."""
    report: OutputFile = None
    """HTML file that opens offline: pictures, tables, films, conditions."""


def run(arguments: Arguments) -> None:
    """Merge, print tables and one JSON line, write the result. Raises ConfigError for parts that do not fit."""
    if arguments.report is not None:
        page.check_path(arguments.report)
    names = [str(path) for path in arguments.parts]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"parts: expected different result files, at least one, got {', '.join(names) or 'none'}")
    check_output(arguments.output, arguments.parts)
    result = merge({str(path): read_result(path)[0] for path in arguments.parts})
    # The files' names, not where they lie on this machine.
    result["command"] = ["python", "-m", "eval.merge", *(path.name for path in arguments.parts)]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result["figure"] = draw_result(result, arguments.output)
    write_json(arguments.output, result, allow_nan=False)
    with contextlib.redirect_stdout(sys.stderr):
        print_run(result)
        print(f"output: {arguments.output}")
        if arguments.report is not None:
            print(f"report: {page.write(run_page(result), arguments.report)}")
    rows = [row_line(row) for row in result["summary"]["rows"]]
    print_json({"output": str(arguments.output), "episodes": len(result["episodes"]), "rows": rows})


def merge(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One result (JSON types, but for its picture) of `parts`, results by name.

    Raises:
        ConfigError: parts of different runs, or episodes that several parts or no part holds; with their names.
    """
    name, first = next(iter(parts.items()))
    for other, part in parts.items():
        if part["schema"] != first["schema"]:
            raise ConfigError(f"{other}: expected schema {first['schema']!r} as in {name}, got {part['schema']!r}")
        if part["fingerprint"] != first["fingerprint"]:
            what = differences(_run(first), _run(part))
            raise ConfigError(f"{other} is not of the same run as {name}: {what}")
    protocol = Protocol.from_json(_run(first)["protocol"])
    found: dict[EpisodeKey, EpisodeResult] = {}
    owner: dict[EpisodeKey, str] = {}
    launch_of: dict[EpisodeKey, int] = {}
    launches: list[Mapping[str, Any]] = []
    for other, part in parts.items():
        try:
            results = [EpisodeResult.from_json(episode) for episode in part["episodes"]]
        except KeyError as key:
            raise ConfigError(f"{other}: expected episodes with every field of a run, got one without {key}") from None
        if twice := [result.key for result in results if result.key in owner]:
            raise ConfigError(f"{other}: expected no episode of another part, {owner[twice[0]]} also has {_say(twice)}")
        for result, episode in zip(results, part["episodes"], strict=True):
            found[result.key], owner[result.key] = result, other
            launch_of[result.key] = len(launches) + episode["launch"]
        launches += part["launches"]
    plan = protocol.plan()
    if missing := [key for key in plan if key not in owner]:
        raise ConfigError(
            f"{', '.join(parts)}: expected all {len(plan)} episodes of the run, no part has {_say(missing)}"
        )
    rows = [row for part in parts.values() for row in part["summary"]["rows"]]
    # Model and engines of a breakdown come from a part that measured it; its figures are computed again.
    described = {row["steps"]: row["breakdown"] for row in rows if row["breakdown"]}

    def breakdown(steps: int | None, samples: Samples) -> dict[str, Any]:
        components = latency.summarise(samples.sections, samples.totals)
        last = launches[max(launch_of.values())]
        return {
            **described.get(steps, {**next(iter(described.values())), "steps": steps}),
            **{name: last[name] for name in ("hardware", "workers")},
            "samples": len(samples.totals),
            "components": components,
            "hz": 1e3 / components["total"]["mean_ms"],
        }

    task_names = {(task.get("suite", ""), task["task_id"]): task["task"] for row in rows for task in row["tasks"]}
    target_hz = max((row["target"]["target_hz"] for row in rows if row["target"]), default=1.0)
    played = Played(protocol, {key: found[key] for key in plan}, launches, launch_of)
    whole = {
        **{name: value for name, value in first.items() if name != "shard"},
        **played.to_json(task_names, target_hz, breakdown),
        "elapsed_s": round(sum(part["elapsed_s"] for part in parts.values()), 3),
        "videos": [video for part in parts.values() for video in part["videos"]],
    }
    whole["summary"]["warnings"] += _other_code(launches)
    return whole


def _run(part: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a fingerprint is made from."""
    rules = {name: value for name, value in part["protocol"].items() if name != "max_steps_source"}
    return {"protocol": rules, "policy": {name: value for name, value in part["policy"].items() if name != "metadata"}}


def _say(keys: Sequence[EpisodeKey]) -> str:
    rest = len(keys) - NAMED
    return "; ".join(str(key) for key in keys[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _other_code(launches: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning where the launches ran different versions."""
    names = sorted({name for launch in launches for name in launch["software"]})
    found = {name: sorted({str(launch["software"].get(name)) for launch in launches}) for name in names}
    return [f"parts ran with different {name}: {', '.join(seen)}" for name, seen in found.items() if len(seen) > 1]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 merged, 1 the parts do not make one run."""
    return run_script("eval.merge", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
