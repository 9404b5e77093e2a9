"""The parts of the demo checkpoint that are written, not trained: tokenizer, instructions, statistics.

`python -m eval.libero.demo.assets --output vla_accel/assets/pi05_demo`. The statistics are bounds of the workspace,
not percentiles of a data set: DAgger keeps adding states, and a bin of the discretised state must not move.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.libero.suites import MAX_STEPS, load_suite
from vla_accel.transforms.tokenizer import SmallTokenizer

# Lowest and highest end-effector position (m), axis-angle (rad) and finger opening (m) that libero_spatial reaches, at
# a table; libero_object is played on the floor.
STATE_LOW = (-0.40, -0.45, 0.85, 1.6, -3.6, -1.8, -0.002, -0.043)
FLOOR = -0.05
STATE_HIGH = (0.35, 0.45, 1.55, 4.6, 3.6, 1.8, 0.043, 0.002)
FILL_TO = 40


@dataclass(frozen=True)
class Arguments:
    """Write tokenizer.json, instructions.json and norm_stats.json."""

    output: Path = Path("vla_accel/assets/pi05_demo")
    suites: tuple[str, ...] = ("libero_spatial",)
    """What the checkpoint shall play: its instructions, in this order, and the bounds of its states."""


def build_tokenizer() -> SmallTokenizer:
    """Words of every LIBERO instruction and of the prompt's frame, letters for other words, punctuation."""
    words = {"task", "state", "action"}
    for suite in MAX_STEPS:  # not of their variants: the checkpoint was trained with these words
        for task in load_suite(suite).tasks:
            words |= set(re.findall(r"[a-z]+", task.instruction.lower()))
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz" if c not in words]
    return SmallTokenizer((*sorted(words), *letters, ":", ",", ";", ".", "\n"), len(STATE_LOW), FILL_TO)


def statistics(suites: Sequence[str]) -> dict:
    """openpi's norm_stats layout, quantiles only: state bounds, and actions as they are, in [-1, 1]."""
    none, low = {"mean": None, "std": None}, list(STATE_LOW)
    if "libero_object" in suites:
        low[2] = FLOOR
    return {
        "norm_stats": {
            "state": {**none, "q01": low, "q99": list(STATE_HIGH)},
            "actions": {**none, "q01": [-1.0] * 7, "q99": [1.0] * 7},
        }
    }


def main(arguments: Arguments) -> None:
    """Write the three files."""
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(folder / "tokenizer.json")
    tasks = [task for suite in arguments.suites for task in load_suite(suite).tasks]
    (folder / "instructions.json").write_text(json.dumps([t.instruction for t in tasks], indent=1) + "\n")
    (folder / "norm_stats.json").write_text(json.dumps(statistics(arguments.suites), indent=1) + "\n")
    assert np.all(np.array(STATE_HIGH) > np.array(STATE_LOW))
    print(json.dumps({"output": str(folder), "vocab_size": tokenizer.vocab_size}))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Arguments))
