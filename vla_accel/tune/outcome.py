"""The files of a finished search: `tuned.yaml`, and `tune.json` with everything tried and why it was dropped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.config import PolicyConfig, load_config
from vla_accel.config.mapping import as_mapping
from vla_accel.files import replacing
from vla_accel.tune.search import Search, Tried, front

SCHEMA = "vla_accel.tune/1"


def outcome(search: Search, chosen: Tried, left_out: Mapping[str, str], about: Mapping[str, Any]) -> dict[str, Any]:
    """The search as JSON types (schema `vla_accel.tune/1`). `about`: command, machine, settings."""
    best, s = front(search.tried), chosen.success
    if chosen is search.tried[0]:
        why = "nothing faster passed the gates"
    elif s is None:
        why = "the fastest that agrees with FP32 eager; success was not tested, because no benchmark was given"
    else:
        why = (
            f"the fastest that passed the gates: it lost {s['lost']} and gained {s['gained']} of {s['pairs']} pairs, "
            f"so that its success is above FP32 eager's minus {100 * s['margin']:.3g} points (error rate "
            f"{s['alpha']:.3g} a finalist)"
        )
    return {
        "schema": SCHEMA,
        **about,
        "chosen": chosen.candidate.name,
        "times_as_fast": timed["reference_ms"] / timed["median_ms"] if (timed := chosen.in_turns) else 1.0,
        "why": why,
        "left_out": dict(left_out),
        "tried": [{**t.to_json(), "front": t.candidate.key in best, "chosen": t is chosen} for t in search.tried],
    }


def write_config(config: PolicyConfig, path: Path, comment: str) -> Path:
    """Write a configuration as YAML with a comment above it. Raises OSError."""
    import yaml

    text = "".join(f"# {line}\n" for line in comment.splitlines())
    with replacing(path) as temporary:
        temporary.write_text(text + yaml.safe_dump(as_mapping(config), sort_keys=False))
        assert load_config(temporary) == config, f"{path.name} would load as another configuration"
    return path
