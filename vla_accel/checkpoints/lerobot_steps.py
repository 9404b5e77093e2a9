"""lerobot's saved pipelines, `policy_preprocessor.json` and `policy_postprocessor.json`: their steps, in order, with
every setting of every step read, known to change no action, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.lerobot_fields import KNOWN, Setting, check, fixed, neutral, read
from vla_accel.checkpoints.weights import read_json
from vla_accel.errors import CheckpointError

BEFORE, AFTER = "policy_preprocessor.json", "policy_postprocessor.json"
RENAME, NORMALIZE, TOKENIZE = "rename_observations_processor", "normalizer_processor", "tokenizer_processor"
UNNORMALIZE, RELATIVE, ABSOLUTE = "unnormalizer_processor", "relative_actions_processor", "absolute_actions_processor"
_BATCH, _DEVICE = "to_batch_processor", "device_processor"
_ALIASES = {"delta_actions_processor": RELATIVE}
"""Names of lerobot 0.5.1 that later releases changed."""

_NORMALIZER = (
    read("features", "names that are normalized"),
    read("norm_map", "how statistics scale, by kind of feature"),
    read("eps", "added to or put in place of a divisor"),
    read("normalize_observation_keys", "names that are normalized, instead of all features"),
    fixed("stats", "statistics are read from the step's file", None),
)
_TASK_KEY = fixed("task_key", "the instruction has the key task", "task")

STEPS: dict[str, tuple[Setting, ...]] = {
    RENAME: (read("rename_map", "the robot's names of features"),),
    _BATCH: (),
    _DEVICE: (
        neutral("device", "where lerobot ran"),
        fixed(
            "float_dtype", "lower precision is not supported", None, "float32", "float", "float64", "double"
        ),
    ),
    NORMALIZE: _NORMALIZER,
    UNNORMALIZE: _NORMALIZER,
    TOKENIZE: (
        read("max_length", "longest prompt"),
        read("tokenizer_name", "the tokenizer"),
        _TASK_KEY,
        fixed("padding_side", "padding on the left is not supported", "right"),
        neutral("padding", "the model masks padding"),
        neutral("truncation", "a prompt that is too long is an error here"),
    ),
    "pi0_new_line_processor": (),
    "smolvla_new_line_processor": (),
    "pi05_prepare_state_tokenizer_processor_step": (
        read("max_state_dim", "must be config.json's"),
        _TASK_KEY,
        fixed("include_state_in_prompt", "it belongs to π0.5's memory", True, since="main"),
    ),
    "pi0_fast_prepare_state_tokenizer_processor_step": (read("max_state_dim", "must be config.json's"), _TASK_KEY),
    "action_tokenizer_processor": (
        neutral(
            "action_tokenizer_name max_action_tokens fast_skip_tokens paligemma_tokenizer_name trust_remote_code "
            "allow_truncation",
            "tokens of actions for training",
        ),
    ),
    RELATIVE: (
        read("enabled", "whether actions are relative to the state", "0.5.1"),
        read("exclude_joints action_names", "actions that stay absolute, by their names", "0.5.1"),
    ),
    ABSOLUTE: (read("enabled", "whether the state is added to the actions", "0.5.1"),),
}  # fmt: skip
"""Settings of every step that is known, by the step's name in lerobot's registry."""


@dataclass(frozen=True)
class Saved:
    """The steps that act in a policy class's pipelines.

    Attributes:
        required: Steps that lerobot always saves.
        orders: Steps of which one must precede the next.
    """

    required: tuple[str, ...]
    orders: tuple[tuple[str, ...], ...]
    neutral: tuple[str, ...] = (_BATCH, _DEVICE)

    @property
    def known(self) -> tuple[str, ...]:
        named = (name for order in self.orders for name in order)
        return tuple(dict.fromkeys((*named, *self.required, *self.neutral)))


def _with_state_in_prompt(prepare: str, *others: str) -> Saved:
    return Saved(
        (NORMALIZE, prepare, TOKENIZE), ((RENAME, RELATIVE, NORMALIZE, prepare, TOKENIZE),), (_BATCH, _DEVICE, *others)
    )


def _with_line(newline: str) -> Saved:
    return Saved((newline, TOKENIZE, NORMALIZE), ((newline, TOKENIZE), (RENAME, RELATIVE, NORMALIZE)))


_PIPELINES = {
    "pi0": _with_line("pi0_new_line_processor"),
    "pi05": _with_state_in_prompt("pi05_prepare_state_tokenizer_processor_step"),
    "pi0_fast": _with_state_in_prompt(
        "pi0_fast_prepare_state_tokenizer_processor_step", "action_tokenizer_processor"
    ),
    "smolvla": _with_line("smolvla_new_line_processor"),
}  # fmt: skip
_POSTPROCESSOR = Saved((UNNORMALIZE,), ((UNNORMALIZE, ABSOLUTE),))
NEUTRAL = (_BATCH, _DEVICE, "action_tokenizer_processor")
"""Steps that change no action: those that move data, and the one that makes tokens of actions in training."""


@dataclass(frozen=True)
class Step:
    """One step: its settings, its file of statistics, and files that lie next to the pipeline, by setting."""

    name: str
    config: Mapping[str, Any]
    state_file: str | None = None
    artifacts: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Pipeline:
    """A saved pipeline: its steps by name. Steps of `NEUTRAL` are left out."""

    path: Path
    steps: Mapping[str, Step]

    def config(self, name: str) -> Mapping[str, Any]:
        """The settings of a step, empty where the pipeline has no such step."""
        return self.steps[name].config if name in self.steps else {}


def is_migrated(folder: Path) -> bool:
    """Whether a folder has one of lerobot's saved pipelines, as releases since 0.4 save them."""
    return (folder / BEFORE).is_file() or (folder / AFTER).is_file()


def read_pipelines(folder: Path, kind: str) -> tuple[Pipeline, Pipeline]:
    """Read the pre- and the postprocessor of a policy of class `kind`.

    Raises:
        CheckpointError: For a missing file, a step or setting that is not known, a step that is missing, doubled or in
            another order than lerobot's.
    """
    return _read(folder / BEFORE, _PIPELINES[kind]), _read(folder / AFTER, _POSTPROCESSOR)


def _read(path: Path, saved: Saved) -> Pipeline:
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: expected {path.name} with the statistics, found no such file")
    content = read_json(path).get("steps")
    if not isinstance(content, list) or not all(map(_is_step, content)):
        raise CheckpointError(f"{path}: expected steps with settings, got {content!r:.200}")
    steps = [
        Step(
            _ALIASES.get(name := str(s.get("registry_name", s.get("class"))), name),
            s.get("config") or {}, s.get("state_file"), s.get("artifacts"),
        )
        for s in content
    ]  # fmt: skip
    _check_steps(path, [step.name for step in steps], saved)
    for step in steps:
        check(step.config, STEPS[step.name], f"{path}: {step.name}")
    return Pipeline(path, {step.name: step for step in steps if step.name not in NEUTRAL})


def _check_steps(path: Path, names: Sequence[str], saved: Saved) -> None:
    known = saved.known
    if others := [name for name in names if name not in known]:
        raise CheckpointError(f"{path}: expected steps among {', '.join(known)} ({KNOWN}), got {', '.join(others)}")
    for name in saved.required:
        if name not in names:
            raise CheckpointError(f"{path}: expected a {name} step, as lerobot saves it, found {', '.join(names)}")
    for name in names:
        if name not in NEUTRAL and names.count(name) > 1:
            raise CheckpointError(f"{path}: expected one {name} step, got {names.count(name)}")
    for order in saved.orders:
        found = [name for name in names if name in order]
        expected = [name for name in order if name in found]
        if found != expected:
            raise CheckpointError(f"{path}: expected {' before '.join(expected)}, got {', '.join(found)}")


def _is_step(step: Any) -> bool:
    """Whether it has the form that lerobot saves: a name, and settings whose tables are of words."""
    if not isinstance(step, dict) or not isinstance(step.get("registry_name") or "", str):
        return False
    config = step.get("config") or {}
    tables = [config.get(name) or {} for name in ("norm_map", "rename_map")] if isinstance(config, dict) else [config]
    return all(isinstance(table, dict) and all(isinstance(word, str) for word in table.values()) for table in tables)
