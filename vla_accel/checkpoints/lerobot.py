"""lerobot's folders of π0, π0.5, π0-FAST and SmolVLA: what their JSON files and statistics say, in our terms.

Reads `config.json` and the saved pre- and postprocessor with their statistics (safetensors). A step of a pipeline
that is not known here is an error: leaving one out would cost success silently. Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.lora import CONFIG as ADAPTER
from vla_accel.checkpoints.weights import listing, read_arrays, read_json, size_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.pictures import Resize
from vla_accel.transforms.normalisation import Normaliser, finite_array
from vla_accel.transforms.robots import LIBERO, Preset

STATE, ACTION = "observation.state", "action"
# Steps that only move data about, and those read below. What they do otherwise is fixed by the model.
_KNOWN_STEPS = {
    "rename_observations_processor",
    "to_batch_processor",
    "device_processor",
    "normalizer_processor",
    "unnormalizer_processor",
    "tokenizer_processor",
    "pi0_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "pi0_fast_prepare_state_tokenizer_processor_step",
    # Makes tokens of actions in training; there are none to make when a policy acts.
    "action_tokenizer_processor",
    "smolvla_new_line_processor",
}
# Saved whether or not they do anything.
_SWITCHED = {"relative_actions_processor", "absolute_actions_processor"}
_LIBERO_IMAGES = ("observation.images.image", "observation.images.image2")

_FIXED = {"min_period": 4e-3, "max_period": 4.0, "n_obs_steps": 1}


@dataclass(frozen=True)
class Processors:
    """What the saved pipelines say: the robot's conventions, its statistics, and the tokenizer step's settings."""

    preset: Preset
    state: Normaliser
    actions: Normaliser
    tokenizer: Mapping[str, Any]


@dataclass(frozen=True)
class LerobotFolder:
    """What a folder says. `prompt_state_dim`: to how many numbers π0.5's prompt fills the state up, None where it does
    not; `tokenizer`: hub name."""

    kind: str
    horizon: int
    action_dim: int
    max_token_len: int
    image_size: int
    variants: tuple[str | None, str | None]
    prompt_state_dim: int | None
    preset: Preset
    state: Normaliser
    actions: Normaliser
    tokenizer: str | None


def is_lerobot(folder: Path) -> bool:
    """Whether a folder's config.json is one of lerobot's policies (it names its `type` and its features)."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    content = read_json(path)
    return "type" in content and "input_features" in content


def read_folder(folder: Path) -> LerobotFolder:
    """Of π0 and π0.5. Raises CheckpointError for another policy, missing files or statistics, and for steps that are
    not known."""
    path = folder / "config.json"
    config = read_settings(path, ("pi0", "pi05"))
    told = read_processors(folder, config, "bilinear")
    resolution = member(config, "image_resolution", list, path)
    if len(resolution) != 2 or resolution[0] != resolution[1]:
        raise CheckpointError(f"{path}: expected a square image_resolution, got {resolution}")
    return LerobotFolder(
        kind=config["type"],
        horizon=size_of(config, "chunk_size", path),
        action_dim=member(config, "max_action_dim", int, path),
        max_token_len=longest_prompt(told, config, path),
        image_size=int(resolution[0]),
        variants=(config.get("paligemma_variant"), config.get("action_expert_variant")),
        # lerobot filled the state up before 0.5. Folders name this key since 0.5.1; 0.5.0's look like older ones.
        prompt_state_dim=None if "use_relative_actions" in config else size_of(config, "max_state_dim", path),
        preset=told.preset,
        state=told.state,
        actions=told.actions,
        tokenizer=told.tokenizer.get("tokenizer_name"),
    )


def read_settings(path: Path, kinds: Sequence[str], fixed: Mapping[str, object] = {}) -> Mapping[str, Any]:
    """A config.json of a policy of one of `kinds` whose settings, where it has them, are `fixed` and those that no
    policy here can change. Raises CheckpointError."""
    config = read_json(path)
    if config.get("type") not in kinds:
        raise CheckpointError(f"{path}: expected a policy of type {' or '.join(kinds)}, got {config.get('type')!r}")
    if config.get("use_peft") and not (path.parent / ADAPTER).is_file():
        there = listing(path.parent)
        raise CheckpointError(f"{path}: expected {ADAPTER} beside a policy that says use_peft, found {there}")
    expected = {**_FIXED, **fixed}
    changed = [f"{k} {config[k]} instead of {v}" for k, v in expected.items() if config.get(k, v) != v]
    if changed:
        raise CheckpointError(f"{path}: cannot run with {', '.join(changed)}")
    return config


def read_processors(folder: Path, config: Mapping[str, Any], resize: Resize) -> Processors:
    """The saved pre- and postprocessor beside a config.json. `resize`: how the policy brings images to its size."""
    path = folder / "config.json"
    before = _steps(folder / "policy_preprocessor.json")
    after = _steps(folder / "policy_postprocessor.json")
    renamed = _config(before, "rename_observations_processor", {}).get("rename_map") or {}
    preset = _preset(config, renamed, path, resize)
    modes = member(config, "normalization_mapping", dict, path)
    scaling = {
        name: _normaliser(folder, steps, step, key, modes, count)
        for name, steps, step, key, count in (
            ("state", before, "normalizer_processor", STATE, preset.state_dim),
            ("actions", after, "unnormalizer_processor", ACTION, preset.action_dim),
        )
    }
    tokenizer = _config(before, "tokenizer_processor", None)
    if tokenizer is None:
        raise CheckpointError(f"{folder / 'policy_preprocessor.json'}: expected a tokenizer_processor step, found none")
    return Processors(preset, scaling["state"], scaling["actions"], tokenizer)


def longest_prompt(told: Processors, config: Mapping[str, Any], path: Path) -> int:
    """In tokens: what the saved tokenizer step says, else config.json at `path`. Raises CheckpointError."""
    if "max_length" in told.tokenizer:
        return size_of(told.tokenizer, "max_length", path.with_name("policy_preprocessor.json"))
    return size_of(config, "tokenizer_max_length", path)


def _preset(config: Mapping[str, Any], renamed: Mapping[str, str], path: Path, resize: Resize) -> Preset:
    """The robot's keys: those of LIBERO where the features are LIBERO's, else the features' own names."""
    inputs = member(config, "input_features", dict, path)
    outputs = member(config, "output_features", dict, path)
    wrong = [k for k, f in (inputs | outputs).items() if not isinstance(f, dict)]
    if wrong:
        raise CheckpointError(f"{path}: expected features with a type and a shape, got others: {', '.join(wrong)}")
    cameras: list[str] = [k for k, f in inputs.items() if f.get("type") == "VISUAL" and "empty_camera" not in k]
    state, actions = (table.get(key, {}).get("shape") for table, key in ((inputs, STATE), (outputs, ACTION)))
    if not all(isinstance(s, list) and len(s) == 1 and type(s[0]) is int for s in (state, actions)):
        raise CheckpointError(f"{path}: expected features {STATE} and {ACTION} of one axis, got {state}, {actions}")
    (state_dim,), (action_dim,) = state, actions
    if tuple(cameras) == _LIBERO_IMAGES and (state_dim, action_dim) == (LIBERO.state_dim, LIBERO.action_dim):
        images, state, prompt = LIBERO.images, LIBERO.state, LIBERO.prompt
        optional: tuple[str, ...] = ()
        motion = LIBERO.motion_dims
    else:
        # What the robot calls them, before the pipeline's own renaming.
        given: dict[str, str] = {model: robot for robot, model in renamed.items()}
        images = tuple(given.get(k, k) for k in cameras)
        state, prompt, optional = (given.get(STATE, STATE),), "task", images
        motion = None  # such a folder does not say whether its actions are targets or motion
    try:
        return Preset(
            images=images,
            state=state,
            state_dim=state_dim,
            action_dim=action_dim,
            prompt=prompt,
            # A camera that is missing is a masked view, as in lerobot.
            optional_images=optional,
            motion_dims=motion,
            resize=resize,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _normaliser(
    folder: Path, steps: list[dict[str, Any]], step: str, key: str, modes: Mapping[str, str], count: int
) -> Normaliser:
    config = _config(steps, step, None)
    if config is None:
        raise CheckpointError(f"checkpoint {folder}: expected a {step} step with statistics, found none")
    kind = "ACTION" if key == ACTION else "STATE"
    mode = (config.get("norm_map") or modes).get(kind, "IDENTITY")
    if mode == "IDENTITY":
        return Normaliser.identity(count)
    names = {"MEAN_STD": ("mean", "std"), "QUANTILES": ("q01", "q99"), "MIN_MAX": ("min", "max")}.get(mode)
    if names is None:
        raise CheckpointError(f"checkpoint {folder}: expected MEAN_STD, QUANTILES or MIN_MAX of {key}, got {mode!r}")
    asked = next(s for s in steps if s.get("registry_name") == step).get("state_file")
    table = read_arrays(folder / statistics_file(folder, asked, step))
    low, high = (finite_array(table.get(f"{key}.{n}"), f"{folder}: {key}.{n}") for n in names)
    if low is None or high is None or low.shape != high.shape:
        needed, found = " and ".join(f"{key}.{n}" for n in names), sorted(k for k in table if k.startswith(key))
        raise CheckpointError(f"checkpoint {folder}: expected {needed} for {mode}, found {found}")
    span, bound = (high, "std >= 0") if mode == "MEAN_STD" else (high - low, " <= ".join(names))
    if (span < 0).any():
        raise CheckpointError(f"checkpoint {folder}: {key}: expected {bound}, got a span of {span.min():g}")
    if len(low) != count:
        raise CheckpointError(f"checkpoint {folder}: expected {key}'s {count} values in {names[0]}, got {len(low)}")
    eps = member({"eps": 1e-8, **config}, "eps", float, folder)
    if mode == "MEAN_STD":
        # lerobot adds eps where it divides, not where it multiplies.
        return Normaliser("mean_std", low, high + eps if key == STATE else high, single=True)
    return Normaliser("quantile", low, np.where(span == 0, eps, span), single=True)


def statistics_file(folder: Path, name: Any, step: str) -> str:
    """The name that a saved step gives to its statistics, which must lie in the folder itself."""
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"checkpoint {folder}: expected the statistics of {step} in a file, found {name!r}")
    if not (folder / name).is_file():
        raise CheckpointError(
            f"checkpoint {folder}: expected {name} with the statistics of {step}, found {listing(folder)}"
        )
    return name


def _steps(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: expected {path.name} with the statistics, found no such file")
    steps = member(read_json(path), "steps", list, path)
    if not all(map(_is_step, steps)):
        raise CheckpointError(f"{path}: expected steps with settings, got {steps}")
    unknown = [
        str(s.get("registry_name", s.get("class"))) for s in steps
        if s.get("registry_name") not in _KNOWN_STEPS and not _is_off(s)
    ]  # fmt: skip
    if unknown:
        raise CheckpointError(
            f"{path}: expected steps among {', '.join(sorted(_KNOWN_STEPS))}, got {', '.join(unknown)}"
        )
    return steps


def _is_off(step: Mapping[str, Any]) -> bool:
    return step.get("registry_name") in _SWITCHED and (step.get("config") or {}).get("enabled") is False


def _is_step(step: Any) -> bool:
    """Whether it has the form that lerobot saves: a name, and settings whose tables are of words."""
    if not isinstance(step, dict) or not isinstance(step.get("registry_name") or "", str):
        return False
    config = step.get("config") or {}
    tables = [config.get(name) or {} for name in ("norm_map", "rename_map")] if isinstance(config, dict) else [config]
    return all(isinstance(table, dict) and all(isinstance(word, str) for word in table.values()) for table in tables)


def _config(steps: list[dict[str, Any]], name: str, default: Any) -> Any:
    found = [s.get("config") or {} for s in steps if s.get("registry_name") == name]
    return found[0] if found else default


def member(content: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """A setting of a JSON file that must be there. Raises CheckpointError."""
    value = content.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{path}: expected {key} of type {kind.__name__}, got {value!r}")
    return value
