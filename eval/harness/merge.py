"""The parts of one run, played by several jobs (`--shard`), as one result.

Takes results as the command of a benchmark writes them. They must be parts of one run, by their fingerprints, and
together hold every episode of its plan once. The summary is computed again from the episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from eval.harness import report
from eval.harness.log import differences
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import EpisodeResult
from vla_accel import latency
from vla_accel.errors import ConfigError

NAMED = 3  # episodes that an error names


def merge(parts: Mapping[str, Mapping[str, Any]], command: Sequence[str]) -> dict[str, Any]:
    """One result (JSON types, but for its picture) of `parts`, results by name.

    Raises:
        ConfigError: parts of different runs, or episodes that several parts or no part holds; with their names.
    """
    first = next(iter(parts.values()))
    _check_same_run(parts)
    rules = {name: value for name, value in first["protocol"].items() if name != "max_steps_source"}
    protocol = Protocol.from_json(rules)
    played = {name: _episodes(part, name) for name, part in parts.items()}
    plan = protocol.plan()
    _check_once(played, plan)
    found = {result.key: result for results in played.values() for result in results}
    launches = [launch for part in parts.values() for launch in part["launches"]]
    before = accumulate((len(part["launches"]) for part in parts.values()), initial=0)
    launch_of = {
        result.key: offset + episode["launch"]
        for (name, part), offset in zip(parts.items(), before, strict=False)
        for result, episode in zip(played[name], part["episodes"], strict=True)
    }
    results = {key: found[key] for key in plan}
    return {
        **{name: value for name, value in first.items() if name != "shard"},
        "command": list(command),
        "launches": launches,
        "episodes_s": round(sum(result.wall_s for result in results.values()), 3),
        "elapsed_s": round(sum(part["elapsed_s"] for part in parts.values()), 3),
        "summary": _summary(protocol, results, launches, launch_of, list(parts.values())),
        "videos": [video for part in parts.values() for video in part["videos"]],
        "episodes": [{**result.to_json(), "launch": launch_of[key]} for key, result in results.items()],
    }


def _check_same_run(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `ConfigError` where a part is of another run than the first, with what differs."""
    (name, first), *others = parts.items()
    for other_name, other in others:
        if other["schema"] != first["schema"]:
            raise ConfigError(
                f"{other_name}: expected schema {first['schema']!r} as in {name}, got {other['schema']!r}"
            )
        if other["fingerprint"] != first["fingerprint"]:
            what = differences(_run(first), _run(other))
            raise ConfigError(f"{other_name} is not of the same run as {name}: {what}")


def _run(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a fingerprint is made from."""
    rules = {name: value for name, value in part["protocol"].items() if name != "max_steps_source"}
    return {"protocol": rules, "policy": {name: value for name, value in part["policy"].items() if name != "metadata"}}


def _episodes(part: Mapping[str, Any], name: str) -> list[EpisodeResult]:
    try:
        return [EpisodeResult.from_json(episode) for episode in part["episodes"]]
    except KeyError as key:
        raise ConfigError(f"{name}: expected episodes as a run writes them, one lacks {key}") from None


def _check_once(played: Mapping[str, Sequence[EpisodeResult]], plan: Sequence[EpisodeKey]) -> None:
    """Raise `ConfigError` for episodes that several parts hold, or that none does."""
    owner: dict[EpisodeKey, str] = {}
    for name, results in played.items():
        twice = [result.key for result in results if result.key in owner]
        if twice:
            raise ConfigError(
                f"{name}: expected no episode of another part, {owner[twice[0]]} holds {_say(twice)}, too"
            )
        owner |= {result.key: name for result in results}
    if missing := [key for key in plan if key not in owner]:
        raise ConfigError(
            f"{', '.join(played)}: expected all {len(plan)} episodes of the run, none holds {_say(missing)}"
        )


def _say(keys: Sequence[EpisodeKey]) -> str:
    rest = len(keys) - NAMED
    return "; ".join(str(key) for key in keys[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _summary(
    protocol: Protocol,
    results: Mapping[EpisodeKey, EpisodeResult],
    launches: Sequence[Mapping[str, Any]],
    launch_of: Mapping[EpisodeKey, int],
    parts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    rows = [row for part in parts for row in part["summary"]["rows"]]
    # Model and engines of a breakdown come from the part that measured it; its figures are computed again.
    described = {row["steps"]: row["breakdown"] for row in rows if row["breakdown"]}
    targets = {row["target"]["target_hz"] for row in rows if row["target"]}

    def breakdown(steps: int | None, samples: report.Samples) -> dict[str, Any]:
        components = latency.summarise(samples.sections, samples.totals)
        last = launches[max(launch_of.values())]
        return {
            **described[steps],
            "hardware": last["hardware"],
            "workers": last["workers"],
            "samples": len(samples.totals),
            "components": components,
            "hz": 1e3 / components["total"]["mean_ms"],
        }

    comparable = report.comparable(results, launches, launch_of)
    summary = report.summarise_run(
        protocol,
        results,
        {key for key in comparable if key.steps in described},
        task_names={(task.get("suite", ""), task["task_id"]): task["task"] for row in rows for task in row["tasks"]},
        target_hz=max(targets, default=1.0),
        breakdown=breakdown,
    )
    return {**summary, "warnings": [*summary["warnings"], *_other_code(launches)]}


def _other_code(launches: Iterable[Mapping[str, Any]]) -> list[str]:
    """A warning where the launches ran different versions."""
    software = [launch["software"] for launch in launches]
    names = sorted({name for versions in software for name in versions})
    found = {name: sorted({str(versions.get(name)) for versions in software}) for name in names}
    return [f"parts ran with different {name}: {', '.join(seen)}" for name, seen in found.items() if len(seen) > 1]
