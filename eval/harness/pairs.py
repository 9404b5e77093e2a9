"""Two runs over the same episodes, compared episode by episode.

Takes results as a benchmark's command writes them. Every episode (task, trial, steps) must be in both, under the same
protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.harness.statistics import Rate, mcnemar_exact, smallest_difference
from vla_accel.errors import ConfigError

# Which tasks, trials and step counts were played shows in the episodes; all else makes an episode the same one.
PLAYED = {"tasks", "trials", "steps", "max_steps_source"}
Key = tuple[int | None, str, int, int]
"""Steps (None for the expert, and for a server that does not report them), suite (empty in a run of one), task,
trial."""


@dataclass(frozen=True)
class Pairs:
    """Counts of episode pairs at one step count. `both`, `lost`, `gained` and `neither` add up to the pairs that both
    policies finished.

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
            "smallest_difference": smallest_difference(self.compared, self.lost + self.gained),
        }


def episodes_of(result: Mapping[str, Any], name: str) -> dict[Key, bool | None]:
    """(steps, suite, task, trial) to success, or to None for an episode that crashed. Raises ConfigError for a
    repeated episode."""
    # Only a server sets its step count, and most report it.
    own = (result["policy"].get("metadata") or {}).get("num_steps")
    found: dict[Key, bool | None] = {}
    for episode in result["episodes"]:
        steps = own if episode["steps"] is None else episode["steps"]
        key = (steps, episode.get("suite", ""), episode["task_id"], episode["trial"])
        if key in found:
            raise ConfigError(f"{name}: expected every episode once, got {_say(key)} twice")
        found[key] = None if episode.get("error") else bool(episode["success"])
    if not found:
        raise ConfigError(f"{name}: expected at least one episode, got none")
    return found


def pair(reference: Mapping[Key, bool | None], other: Mapping[Key, bool | None], names: tuple[str, str]
         ) -> dict[int | None, Pairs]:  # fmt: skip
    """Step count to its pairs. Raises ConfigError for an episode that one side has and the other has not."""
    expected, got = (_steps(of) for of in (reference, other))
    if expected != got:
        raise ConfigError(f"{names[1]}: expected episodes at {expected} as in {names[0]}, got {got}")
    for mine, theirs, has, lacks in ((reference, other, *names), (other, reference, *reversed(names))):
        alone = sorted(mine.keys() - theirs.keys(), key=_order)
        if alone:
            raise ConfigError(
                f"{lacks}: expected the episodes of {has}, lacks {len(alone)} of them, the first {_say(alone[0])}"
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

    Args: `reference`, and `others` by name: results; `name`: the reference's.
    Raises ConfigError for another protocol or an unpaired episode.
    """
    rules = _rules(reference)
    mine = episodes_of(reference, name)
    rows: list[dict[str, Any]] = []
    for label, other in others.items():
        theirs = episodes_of(other, label)
        other_rules = _rules(other)
        for field in {**rules, **other_rules}:
            expected, got = rules.get(field), other_rules.get(field)
            if expected != got:
                raise ConfigError(f"{label}: expected {field} {expected!r} as in {name}, got {got!r}")
        for steps, pairs in pair(mine, theirs, (name, label)).items():
            different = [
                {
                    **({"suite": key[1]} if key[1] else {}),
                    "task_id": key[2],
                    "trial": key[3],
                    "won_by": "reference" if mine[key] else "other",
                }
                for key in sorted(mine, key=_order)
                if key[0] == steps and None not in (mine[key], theirs[key]) and mine[key] != theirs[key]
            ]
            row = {"name": label, "steps": steps, **pairs.to_json(), "discordant": different}
            suites = dict.fromkeys(key[1] for key in mine if key[0] == steps and key[1])
            if suites:
                row["suites"] = [
                    {"suite": suite, **pair(_of(mine, suite), _of(theirs, suite), (name, label))[steps].to_json()}
                    for suite in suites
                ]
            rows.append(row)
    return {
        "protocol": rules,
        "reference": name,
        "policies": {label: described(r) for label, r in {name: reference, **others}.items()},
        "rows": rows,
    }


def _of(outcomes: Mapping[Key, bool | None], suite: str) -> dict[Key, bool | None]:
    return {key: won for key, won in outcomes.items() if key[1] == suite}


def _rules(result: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a protocol that makes an episode the same one."""
    return {field: value for field, value in result["protocol"].items() if field not in PLAYED}


def described(result: Mapping[str, Any]) -> dict[str, Any]:
    """Policy, hardware and versions of a run, for a comparison."""
    policy, launch = result["policy"], result["launches"][-1]
    metadata = policy.get("metadata") or {}
    config = policy.get("config") or {}
    specs = {**config, **config.get("engines", {})}
    requested = {name: spec for name, spec in specs.items() if isinstance(spec, Mapping) and "engine" in spec}
    return {
        "policy": policy.get("name"),
        "sha256": policy.get("sha256"),
        "weights": policy.get("weights"),
        "dtype": metadata.get("dtype"),
        "asked": requested,
        "engines": metadata.get("engines") or [],
        "hardware": launch["hardware"],
        "software": launch["software"],
        "git": launch.get("git"),
        "workers": launch.get("workers"),
        "chunking": policy.get("chunking", "plain"),
    }


def _order(key: Key) -> tuple[int, str, int, int]:
    return (key[0] or 0, *key[1:])


def _steps(found: Mapping[Key, bool | None]) -> str:
    """Of which denoising steps there are episodes; an expert's have none."""
    return f"{', '.join(map(str, sorted({key[0] for key in found if key[0]}))) or 'no'} denoising steps"


def _say(key: Key) -> str:
    steps, suite, task, trial = key
    return f"{suite} task {task}, trial {trial}".lstrip() + (f", steps {steps}" if steps else "")
