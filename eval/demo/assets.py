"""The checkpoint that a training run starts from: `python -m eval.demo.assets --family pi05 --output runs/demo/start`.

Sizes, tokenizer and processors are the files of the family's bundled checkpoint. The statistics are bounds of the
workspace, not percentiles of a data set: DAgger keeps adding states, and a bin of the discretised state must not move.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from eval.demo.objective import initialise
from eval.libero.suites import load_suite
from eval.script import replacing_files, run_script
from eval.training import runs_of
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.checkpoints.writer import save_weights
from vla_accel.cli.options import Written
from vla_accel.errors import ConfigError, unknown
from vla_accel.families.loading import family_of, find, load
from vla_accel.families.smolvla import checkpoint as lerobot_names
from vla_accel.families.smolvla.network import SmolVlaConfig
from vla_accel.nn.flow import FlowNetwork
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.tokenizer import STATE_BINS, SmallTokenizer, discretise_state

DEMOS = {"pi05": ("demo", 25_000_000), "smolvla": ("smolvla_demo", 20_000_000)}
"""By family: the name of its bundled checkpoint, and the largest size in bytes."""
# Lowest and highest end-effector position (m), axis-angle (rad) and finger opening (m) that libero_spatial reaches, at
# a table; libero_object is played on the floor.
STATE_LOW = (-0.40, -0.45, 0.85, 1.6, -3.6, -1.8, -0.002, -0.043)
FLOOR = -0.05
STATE_HIGH = (0.35, 0.45, 1.55, 4.6, 3.6, 1.8, 0.043, 0.002)
INSTRUCTIONS = "instructions.json"
EARLIER = "earlier_training.json"
"""Of a start: the training that its first weights had, which goes into the record of what is made of it."""
# Made anew: what belongs to the bundled checkpoint's own weights and suites.
_OWN = ("fp8_scales.json", "training.json", INSTRUCTIONS, "norm_stats.json", "model.safetensors")


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


def bounds(suites: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest states (8,) of these suites."""
    low = np.array(STATE_LOW)
    if "libero_object" in suites:
        low[2] = FLOOR
    return low, np.array(STATE_HIGH)


def write_statistics(folder: Path, low: np.ndarray, high: np.ndarray) -> None:
    """Scale states between these bounds (8,); actions lie in [-1, 1] and stay as they are. lerobot's form where the
    folder has its processors, else openpi's, quantiles only."""
    processors = sorted(folder.glob("policy_*processor_step_*.safetensors"))
    if not processors:
        none = {"mean": None, "std": None}
        statistics = {
            "state": {**none, "q01": low.tolist(), "q99": high.tolist()},
            "actions": {**none, "q01": [-1.0] * 7, "q99": [1.0] * 7},
        }
        (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics}, indent=1) + "\n")
    table = {"state.mean": (low + high) / 2, "state.std": (high - low) / 2}
    tensors = {f"observation.{name}": torch.from_numpy(value).float() for name, value in table.items()}
    for path in processors:
        save_weights({**tensors, "action.mean": torch.zeros(7), "action.std": torch.ones(7)}, path)


def stored(config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names that they are stored by: SmolVLA's are lerobot's."""
    if not isinstance(config, SmolVlaConfig):
        return dict(state)
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        parts = lerobot_names.pieces(name, config)
        rows = [part.rows or len(value) for part in parts]
        tensors |= {part.name: piece for part, piece in zip(parts, value.split(rows), strict=True)}
    return tensors


def earlier_training(init: str, family: str) -> list[dict[str, Any]]:
    """The training runs of the weights that the checkpoint `init` passes to a family, the oldest first; empty without a
    record. From another family's checkpoint they are marked as training of the vision tower."""
    path = find(init) / "training.json"
    if not path.is_file():
        return []
    runs, kind = runs_of(json.loads(path.read_text())), family_of(path.parent).name
    return runs if kind == family else [{**run, "tower_of": kind} for run in runs]


@torch.no_grad()
def carry_over(network: FlowNetwork, state: Normaliser, tokenizer: SmallTokenizer, init: str) -> int:
    """Take weights of the checkpoint `init` into a network of its family, or its tower into another's; `state` scales
    the new one's states. Returns how many weights were taken."""
    source, taken = load(init, dtype=torch.float32), 0
    same = type(source.model) is type(network)
    for name, value in source.model.state_dict().items():
        if not same and not name.startswith("vision."):
            continue
        target = network.get_parameter(name)
        if value.shape != target.shape:
            continue
        taken += 1
        if name == "embed.weight":
            assert source.processor.tokenizer == tokenizer, "rows of the table mean other words"
            _carry_rows(target, value, state, source.processor.state, tokenizer)
        else:
            target.copy_(value)
    return taken


def _carry_rows(target: Tensor, source: Tensor, new: Normaliser, old: Normaliser, tokenizer: SmallTokenizer) -> None:
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
    if arguments.family not in DEMOS:
        raise ConfigError(unknown("family", arguments.family, DEMOS))
    with replacing_files(arguments.output) as folder:
        counts = write(arguments, folder)
    print(json.dumps({"output": str(arguments.output), **counts}))


def write(arguments: Arguments, folder: Path) -> dict[str, int]:
    """Write the files; returns the size of the vocabulary and the number of weights that were carried over."""
    bundled = NAMED[DEMOS[arguments.family][0]]
    for path in bundled.iterdir():
        if path.name not in _OWN:
            shutil.copy(path, folder)
    instructions = [task.instruction for suite in arguments.suites for task in load_suite(suite).tasks]
    (folder / INSTRUCTIONS).write_text(json.dumps(instructions, indent=1) + "\n")
    write_statistics(folder, *bounds(arguments.suites))
    model = load(bundled).model
    assert isinstance(model, FlowNetwork)
    network, tokenizer = type(model)(model.config), SmallTokenizer.load(folder / "tokenizer.json")
    initialise(network, tokenizer, arguments.seed)
    taken = 0
    if arguments.init:
        save_weights(stored(network.config, network.state_dict()), folder / "model.safetensors")
        (folder / EARLIER).write_text(json.dumps(earlier_training(arguments.init, arguments.family), indent=1) + "\n")
        taken = carry_over(network, load(folder).processor.state, tokenizer, arguments.init)
    save_weights(stored(network.config, network.state_dict()), folder / "model.safetensors")
    return {"vocab_size": tokenizer.vocab_size, "carried_over": taken}


if __name__ == "__main__":
    sys.exit(run_script("eval.demo.assets", Arguments, main, None))
