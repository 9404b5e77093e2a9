"""The checkpoint that a training run starts from: tokenizer, instructions, statistics, sizes, and first weights.

`python -m eval.demo.assets --family pi05 --output runs/demo/start`. The statistics are bounds of the workspace,
not percentiles of a data set: DAgger keeps adding states, and a bin of the discretised state must not move.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from eval.demo.objective import initialise
from eval.demo.recipes import recipe_named
from eval.libero.install import libero
from eval.libero.suites import MAX_STEPS, instruction_of, load_suite
from eval.script import replacing_files, run_script
from eval.training import runs_of
from vla_accel.checkpoints.writer import save_weights
from vla_accel.cli.options import Written
from vla_accel.families.loading import family_of, find, load
from vla_accel.nn.flow import FlowNetwork
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.tokenizer import STATE_BINS, SmallTokenizer, discretise_state

# Lowest and highest end-effector position (m), axis-angle (rad) and finger opening (m) that libero_spatial reaches, at
# a table; libero_object is played on the floor.
STATE_LOW = (-0.40, -0.45, 0.85, 1.6, -3.6, -1.8, -0.002, -0.043)
FLOOR = -0.05
STATE_HIGH = (0.35, 0.45, 1.55, 4.6, 3.6, 1.8, 0.043, 0.002)
FILL_TO = 40
INSTRUCTIONS = "instructions.json"
EARLIER = "earlier_training.json"
"""Of a start: the training that its first weights had, which goes into the record of what is made of it."""


@dataclass(frozen=True)
class Arguments:
    """Write an untrained checkpoint, or one with the weights of another."""

    output: Annotated[Path, Written(folder=True)]
    """Folder of the checkpoint."""
    family: str = "pi05"
    """pi05 or smolvla."""
    suites: tuple[str, ...] = ("libero_spatial",)
    """What the checkpoint shall play: its instructions, in this order, and the bounds of its states."""
    init: str = ""
    """A checkpoint to take the first weights from: all of them from one of the same family, the tower from another's;
    where bounds differ, bins of the state take the rows of the same values. Other weights are drawn."""
    seed: int = 20260
    """Of the weights that are drawn."""


def build_tokenizer() -> SmallTokenizer:
    """Words of every LIBERO instruction and of the prompt's frame, letters for other words, punctuation."""
    words = {"task", "state", "action"}
    for suite in MAX_STEPS:  # not of their variants: the checkpoint was trained with these words
        for name in libero().task_map[suite]:
            words |= set(re.findall(r"[a-z]+", instruction_of(name).lower()))
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz" if c not in words]
    return SmallTokenizer((*sorted(words), *letters, ":", ",", ";", ".", "\n"), len(STATE_LOW), FILL_TO)


def bounds(suites: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest states (8,) of these suites."""
    low = np.array(STATE_LOW)
    if "libero_object" in suites:
        low[2] = FLOOR
    return low, np.array(STATE_HIGH)


def earlier_training(init: str, family: str) -> list[dict[str, Any]]:
    """The training runs of the weights that the checkpoint `init` passes to a family, the oldest first; empty without a
    record. From another family's checkpoint they are marked as training of the vision tower."""
    path = find(init) / "training.json"
    if not path.is_file():
        return []
    runs, kind = runs_of(json.loads(path.read_text())), family_of(path.parent).name
    return runs if kind == family else [{**run, "tower_of": kind} for run in runs]


@torch.no_grad()
def carry_over(network: FlowNetwork, state: Normaliser, tokenizer: SmallTokenizer, init: str) -> list[str]:
    """Take weights of the checkpoint `init` into a network of its family, or its tower into another's; `state` scales
    the new one's states. Returns the names of the weights that were taken."""
    source = load(init, dtype=torch.float32)
    same = type(source.model) is type(network)
    carried: dict[str, Tensor] = {
        name: value
        for name, value in source.model.state_dict().items()
        if (same or name.startswith("vision.")) and value.shape == network.get_parameter(name).shape
    }
    for name, value in carried.items():
        target = network.get_parameter(name)
        if name == "embed.weight":
            assert source.processor.tokenizer == tokenizer, "rows of the table mean other words"
            _carry_rows(target, value, state, source.processor.state, tokenizer)
        else:
            target.copy_(value)
    return sorted(carried)


def _carry_rows(
    target: Tensor, source: Tensor, new: Normaliser, old: Normaliser, tokenizer: SmallTokenizer
) -> None:  # fmt: skip
    """Rows of words, and of bins by their values; bins beyond the old bounds stay as drawn."""
    first = tokenizer.vocab_size - tokenizer.state_dim * STATE_BINS
    target[:first] = source[:first]
    middle = (np.arange(STATE_BINS) + 0.5) / STATE_BINS * 2 - 1
    numbers = np.repeat(middle[:, None], tokenizer.state_dim, axis=1)
    before = old.normalise(new.restore(numbers))
    for i in range(tokenizer.state_dim):
        inside = np.flatnonzero(np.abs(before[:, i]) < 1)
        rows = first + STATE_BINS * i
        target[rows + inside] = source[rows + discretise_state(before[inside, i])]


def main(arguments: Arguments) -> None:
    """Write the folder, all of its files or none: a checkpoint as any other, which loads."""
    output = arguments.output
    with replacing_files(output) as folder:
        counts = write(arguments, folder)
    print(json.dumps({"output": str(output), **counts}))


def write(arguments: Arguments, folder: Path) -> dict[str, int]:
    """Write the files; returns the size of the vocabulary and the number of weights that were carried over."""
    recipe = recipe_named(arguments.family)
    tokenizer = recipe.tokenizer(build_tokenizer())
    tokenizer.save(folder / "tokenizer.json")
    tasks = [task for suite in arguments.suites for task in load_suite(suite).tasks]
    (folder / INSTRUCTIONS).write_text(json.dumps([t.instruction for t in tasks], indent=1) + "\n")
    network = recipe.network(tokenizer.vocab_size)
    recipe.write(folder, network.config, *bounds(arguments.suites))
    initialise(network, tokenizer, arguments.seed)
    save_weights(recipe.stored(network.config, network.state_dict()), folder / "model.safetensors")
    taken: list[str] = []
    if arguments.init:
        (folder / EARLIER).write_text(json.dumps(earlier_training(arguments.init, arguments.family), indent=1) + "\n")
        taken = carry_over(network, load(folder).processor.state, tokenizer, arguments.init)
        save_weights(recipe.stored(network.config, network.state_dict()), folder / "model.safetensors")
    return {"vocab_size": tokenizer.vocab_size, "carried_over": len(taken)}


if __name__ == "__main__":
    sys.exit(run_script("eval.demo.assets", Arguments, main, None))
