"""Two runs over the same episodes, compared episode by episode.

Takes results as a benchmark's command writes them. Every episode (task, trial, steps) must be in both, under the same
protocol. Two runs with one step count each may differ in it: their episodes are paired by task and trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eval.harness.protocol import EpisodeKey
from eval.harness.statistics import Rate, mcnemar_exact, smallest_difference
from vla_accel.errors import ConfigError

# Which tasks, trials and step counts were played shows in the episodes; all else makes an episode the same one.
PLAYED = {"tasks", "trials", "steps", "max_steps_source"}
Outcomes = Mapping[EpisodeKey, "bool | None"]
"""Success of each episode, None for one that crashed. Keys have the steps that a server reports, if it does."""


def compare(reference: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The report: a row for each other result and step count.

    Args: `reference`, and `others` by name: results; `name`: the reference's.
    Raises ConfigError for another protocol or an unpaired episode.
    """
    rules, mine = _rules(reference), outcomes_of(reference, name)
    rows: list[dict[str, Any]] = []
    for label, other in others.items():
        theirs, other_rules = outcomes_of(other, label), _rules(other)
        paired = _same_steps(mine, theirs)
        for field in {**rules, **other_rules}:
            expected, got = rules.get(field), other_rules.get(field)
            if expected != got:
                raise ConfigError(f"{label}: expected {field} {expected!r} as in {name}, got {got!r}")
        _check_paired(paired, theirs, (name, label))
        for steps in dict.fromkeys(key.steps for key in paired):
            keys = [key for key in paired if key.steps == steps]
            different = [k for k in keys if None not in (paired[k], theirs[k]) and paired[k] != theirs[k]]
            row = {
                **{"name": label, "steps": steps, **_counts(keys, paired, theirs)},
                "reference_steps": steps if paired is mine else next(iter(mine)).steps,
                "discordant": [
                    {
                        **({"suite": key.suite} if key.suite else {}),
                        "task_id": key.task_id,
                        "trial": key.trial,
                        "won_by": "reference" if paired[key] else "other",
                    }
                    for key in different
                ],
            }
            suites = dict.fromkeys(key.suite for key in keys if key.suite)
            if suites:
                row["suites"] = [
                    {"suite": suite, **_counts([key for key in keys if key.suite == suite], paired, theirs)}
                    for suite in suites
                ]
            rows.append(row)
    return {
        "protocol": rules,
        "reference": name,
        "policies": {label: described(r) for label, r in {name: reference, **others}.items()},
        "rows": rows,
    }


def outcomes_of(result: Mapping[str, Any], name: str) -> Outcomes:
    """The outcomes in order. Raises ConfigError for a repeated episode."""
    # Only a server sets its step count, and most report it.
    own = (result["policy"].get("metadata") or {}).get("num_steps")
    found: dict[EpisodeKey, bool | None] = {}
    for episode in result["episodes"]:
        steps = own if episode["steps"] is None else episode["steps"]
        key = EpisodeKey.from_json({**episode, "steps": steps})
        if key in found:
            raise ConfigError(f"{name}: expected every episode once, got {key} twice")
        found[key] = None if episode.get("error") else bool(episode["success"])
    if not found:
        raise ConfigError(f"{name}: expected at least one episode, got none")
    return dict(sorted(found.items(), key=lambda item: (item[0].steps or 0, *item[0].task, item[0].trial)))


def _same_steps(mine: Outcomes, theirs: Outcomes) -> Outcomes:
    """Return `mine` under the other's step count where each has one, else unchanged."""
    counts = [list(dict.fromkeys(key.steps for key in outcomes)) for outcomes in (mine, theirs)]
    if counts[0] == counts[1] or [len(found) for found in counts] != [1, 1] or None in (counts[0][0], counts[1][0]):
        return mine
    return {replace(key, steps=counts[1][0]): won for key, won in mine.items()}


def _check_paired(mine: Outcomes, theirs: Outcomes, names: tuple[str, str]) -> None:
    expected, got = (_steps(outcomes) for outcomes in (mine, theirs))
    if expected != got:
        raise ConfigError(f"{names[1]}: expected episodes at {expected} as in {names[0]}, got {got}")
    for one, other, has, lacks in ((mine, theirs, *names), (theirs, mine, *reversed(names))):
        if alone := [key for key in one if key not in other]:
            raise ConfigError(
                f"{lacks}: expected the episodes of {has}, {len(alone)} of them are missing, the first {alone[0]}"
            )


def _steps(outcomes: Outcomes) -> str:
    return f"{', '.join(map(str, sorted({key.steps for key in outcomes if key.steps}))) or 'no'} denoising steps"


def _counts(keys: list[EpisodeKey], mine: Outcomes, theirs: Outcomes) -> dict[str, Any]:
    """Pairs of episodes that both policies finished (JSON types): won by both, only by the reference (`lost`, a
    regression), only by the other (`gained`, an improvement), by none. A pair with an error is not compared."""
    pairs = Counter((mine[key], theirs[key]) for key in keys)
    both, lost, gained, neither = (pairs[p] for p in ((True, True), (True, False), (False, True), (False, False)))
    number = both + lost + gained + neither
    errors = [sum(outcomes[key] is None for key in keys) for outcomes in (mine, theirs)]
    return {
        "pairs": number,
        "reference": Rate(both + lost, number, errors[0]).to_json(),
        "other": Rate(both + gained, number, errors[1]).to_json(),
        "both": both,
        "lost": lost,
        "gained": gained,
        "neither": neither,
        "mcnemar_exact_p": mcnemar_exact(lost, gained),
        "smallest_difference": smallest_difference(number, lost + gained),
    }


def _rules(result: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a protocol that makes an episode the same one."""
    return {field: value for field, value in result["protocol"].items() if field not in PLAYED}


def described(result: Mapping[str, Any]) -> dict[str, Any]:
    """Policy, hardware and versions of a run, for a comparison."""
    policy, launch = result["policy"], result["launches"][-1]
    metadata, config = policy.get("metadata") or {}, policy.get("config") or {}
    model = metadata.get("model")  # openpi's servers send text
    specs = {**config, **config.get("engines", {})}
    return {
        **{name: policy.get(name) or metadata.get(name) for name in ("sha256", "weights")},
        "policy": policy.get("name"),
        "model": model.get("kind") if isinstance(model, Mapping) else model,
        "dtype": metadata.get("dtype"),
        "asked": {name: spec for name, spec in specs.items() if isinstance(spec, Mapping) and "engine" in spec},
        "engines": metadata.get("engines") or [],
        "hardware": launch["hardware"],
        "software": launch["software"],
        "git": launch.get("git"),
        "workers": launch.get("workers"),
        "chunking": policy.get("chunking", "plain"),
    }
