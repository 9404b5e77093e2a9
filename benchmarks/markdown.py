"""Pieces of Markdown that the tables share. Knows no result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from eval.training import record_of
from vla_accel.files import without_folders

MODELS = {"pi05": "π0.5", "pi0": "π0", "smolvla": "SmolVLA", "groot": "GR00T N1.7", "pi0_fast": "π0-FAST"}
"""Families as people write them."""


def steps_of(kind: str, steps: int) -> str:
    """Steps of a family's loop, by their name: π0-FAST's are tokens."""
    return f"{steps} {'token' if kind == 'pi0_fast' else 'step'}{'s' * (steps > 1)}"


def rows(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def percent(share: float | None) -> str:
    """A share as people write it; a dash where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def machine(result: Mapping[str, Any]) -> str:
    """Hardware, torch and commit of a report; of a run in several launches, those of the last."""
    hardware = result["hardware"]
    place = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['threads']} thread{'s' * (hardware['threads'] > 1)}"
    return f"{place}, torch {result['software']['torch']}{commit(result)}"


def machines(results: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """`machine` of several named reports; the names stand only where the reports differ."""
    where: dict[str, list[str]] = {}
    for name, result in results:
        where.setdefault(machine(result), []).append(name)
    if len(where) == 1:
        return next(iter(where))
    return "; ".join(f"{', '.join(dict.fromkeys(names))}: {place}" for place, names in where.items())


def doubt(checkpoint: str | None, weights: str | None) -> str:
    """What is to be said of the weights of a run, whose fingerprint it tells: that they are not those that the bundled
    checkpoint has now, or that nothing tells which they are; else nothing."""
    if weights is None:
        return "weights without a fingerprint"
    path = record_of(checkpoint)
    others = path is not None and weights != json.loads(path.read_text())["weights"]
    return "its former weights" if others else ""


def doubts(runs: Iterable[tuple[str, str | None, str | None]]) -> str:
    """Sentences on the runs, (name, checkpoint, weights), of which there is a `doubt`; empty without any."""
    told: dict[str, list[str]] = {}
    for name, checkpoint, weights in runs:
        told.setdefault(doubt(checkpoint, weights), []).append(name)
    sentences = {
        "its former weights": "Made with the weights that the bundled checkpoint had before",
        "weights without a fingerprint": "Nothing tells which weights these runs had, which carry no fingerprint",
    }
    return "".join(
        f" **{said}: {', '.join(dict.fromkeys(told[kind]))}.**" for kind, said in sentences.items() if kind in told
    )


def commit(result: Mapping[str, Any]) -> str:
    """`, commit …` of the code that a report was made with, as short as git shows it; nothing where it is not told."""
    git = result.get("git") or {}
    told = git.get("commit") or result["software"].get("commit") or ""
    changed = "+" if git.get("modified") or told.endswith("+") else ""
    return f", commit {told[:7]}{changed}" if told else ""


def bare_command(command: str | list[str]) -> str:
    """A command without the folders of the machine it ran on."""
    words = command.split() if isinstance(command, str) else command
    return " ".join(without_folders(words))
