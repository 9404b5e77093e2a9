"""lerobot's folders of its policies, GR00T's excepted: config.json, the saved pipelines and their statistics, as this
package's transforms.

A setting or step that is not known is an error: ignoring it would silently cost success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.lerobot_settings import (
    ABSOLUTE,
    AFTER,
    ALIASES,
    ARTIFACTS,
    BATCH,
    BEFORE,
    DEVICE,
    FIELDS,
    KNOWN,
    NEUTRAL,
    NORMALIZE,
    OPTIONAL,
    POSTPROCESSOR,
    POSTPROCESSORS,
    PREPROCESSORS,
    RELATIVE,
    RENAME,
    STEPS,
    TOKENIZE,
    UNNORMALIZE,
    Orders,
)
from vla_accel.checkpoints.lerobot_statistics import (
    ACTION,
    ENVIRONMENT,
    STATE,
    Statistics,
    buffer_statistics,
    buffers,
    pixel_values,
    step_statistics,
)
from vla_accel.checkpoints.lora import CONFIG as ADAPTER
from vla_accel.checkpoints.settings import check
from vla_accel.checkpoints.weights import Weights, listing, read_json, size_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.pictures import PixelValues, Resize
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.robots import LIBERO, Preset

_MOST_STEPS = 1000
"""Denoising steps, as in `config.PolicyConfig`."""
_CHANGED = ("pi0", "pi05", "pi0_fast")
"""Policy classes whose images and prompts lerobot 0.5 changed."""
_LIBERO_IMAGES = ("observation.images.image", "observation.images.image2")


@dataclass(frozen=True)
class Processors:
    """A robot as a checkpoint's folder describes it.

    Attributes:
        preset: The robot's conventions.
        state: How the state is normalized.
        actions: How the actions are unnormalized.
        tokenizer: Name or folder of the tokenizer, None if the folder names none.
        max_token_len: The longest prompt, 0 if the folder does not say.
        pixels: The pixels that the policy was trained with, None for the usual ones. Cameras are in the order of
            `preset.images`.
        prompt_state_dim: The size to which prompts pad the state, as lerobot did before 0.5; None if they do not.
        cameras: Of a policy that reads frames as they are: how the images of each camera, in [0, 1], are normalized by
            channel.
        action_tokenizer: Folder of the tokenizer of actions that was saved with the preprocessor; None: there is none.
        before, after: Settings of the steps of the preprocessor and of the postprocessor, by name.
    """

    preset: Preset
    state: Normaliser
    actions: Normaliser
    tokenizer: str | None = None
    max_token_len: int = 0
    pixels: PixelValues | None = None
    prompt_state_dim: int | None = None
    cameras: tuple[Normaliser, ...] = ()
    action_tokenizer: Path | None = None
    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    after: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def is_lerobot(folder: Path) -> bool:
    """Return whether a folder's config.json is one of lerobot's policies."""
    path = folder / "config.json"
    return path.is_file() and is_lerobot_config(read_json(path))


def is_lerobot_config(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json is one of lerobot's policies: it has a `type` and features."""
    return "type" in content and "input_features" in content


def is_migrated(folder: Path) -> bool:
    """Return whether a folder has a saved pipeline, as lerobot saves it since 0.4."""
    return (folder / BEFORE).is_file() or (folder / AFTER).is_file()


def read_settings(path: Path, kinds: Sequence[str]) -> Mapping[str, Any]:
    """Read the config.json of a policy of one of `kinds`.

    Raises:
        CheckpointError: It is another policy's, or has settings that are not known, refused or contradictory.
    """
    config = read_json(path)
    if config.get("type") not in kinds:
        raise CheckpointError(f"{path}: expected a policy of type {' or '.join(kinds)}, got {config.get('type')!r}")
    if config.get("use_peft") and not (path.parent / ADAPTER).is_file():
        found = listing(path.parent)
        raise CheckpointError(f"{path}: expected {ADAPTER} next to a policy with use_peft, found {found}")
    check(config, FIELDS[config["type"]], path, KNOWN)
    if config.get("n_action_steps") is not None and "chunk_size" in config:
        chunk, executed = (size_of(config, name, path) for name in ("chunk_size", "n_action_steps"))
        if executed > chunk:
            raise CheckpointError(f"{path}: n_action_steps: expected at most chunk_size, {chunk}, got {executed}")
    return config


def read_processors(folder: Path, config: Mapping[str, Any], resize: Resize, weights: Weights) -> Processors:
    """Read the pre- and postprocessor next to a config.json; of lerobot 0.3, which saves none, the statistics among the
    weights.

    Args:
        folder: The checkpoint.
        config: Its config.json (`read_settings`).
        resize: How the policy resizes images.
        weights: The checkpoint's tensors.

    Raises:
        CheckpointError: A file or statistics are missing, or a step or setting is not known.
    """
    path = folder / "config.json"
    inputs, outputs = features(config, path)
    renamed, relative, tokenizer, length = {}, None, {}, ("tokenizer_max_length", config, path)
    prompted, steps, fast = reads_prompt(config["type"]), ({}, {}), None
    has_environment = config["type"] in ("act", "diffusion") and ENVIRONMENT in inputs
    states = [key for key in (STATE, ENVIRONMENT) if key in inputs] if has_environment else [STATE]
    state_dims, action_dim = [length_of(inputs, key, path) for key in states], length_of(outputs, ACTION, path)
    if config["type"] == "vla_jepa":
        # As for the state below: `output_features` may be the base's, but this number is the robot's.
        action_dim = size_of(config, "action_dim", path, action_dim)
    if config["type"] == "evo1":
        action_dim = size_of(config, "postprocess_action_dim", path, action_dim)
    if not is_migrated(folder) and buffers(weights.shapes):
        modes = required(config, "normalization_mapping", dict, path)
        of_inputs = of_outputs = buffer_statistics(weights, inputs | outputs, modes, folder / "model.safetensors")
    else:
        before = _read_pipeline(folder / BEFORE, PREPROCESSORS[config["type"]])
        after = _read_pipeline(folder / AFTER, POSTPROCESSORS.get(config["type"], POSTPROCESSOR))
        _check_prompt(before, config)
        of_inputs, of_outputs = before.statistics(NORMALIZE), after.statistics(UNNORMALIZE)
        renamed, tokenizer = before.config(RENAME).get("rename_map") or {}, _tokenizer(before) if prompted else {}
        steps = tuple({name: pipeline.config(name) for name in pipeline.steps} for pipeline in (before, after))
        fast = before.folders.get("action_tokenizer_name")
        if "max_length" in tokenizer:
            length = "max_length", tokenizer, before.path
        if _are_relative(config, before, after):
            relative = before.config(RELATIVE)
    if config["type"] == "evo1":
        # Its statistics are padded to the network's numbers, and its features may be.
        least = state_dims[0] if state_dims[0] < config.get("max_state_dim", 24) else 0
        of_inputs, of_outputs = of_inputs.unpadded(STATE, least=least), of_outputs.unpadded(ACTION, action_dim)
    # A policy that was trained from a base for another robot keeps the base's features in config.json.
    state = of_inputs.scaling(STATE) or Normaliser.identity(of_inputs.length(STATE) or state_dims[0])
    if has_environment:
        if of_inputs.scaling(ENVIRONMENT) is not None:
            raise CheckpointError(f"{of_inputs.where}: expected no scaling of {ENVIRONMENT}, found one: not supported")
        state = state.extended(state_dims[1]) if STATE in inputs else state
    actions = of_outputs.scaling(ACTION) or Normaliser.identity(action_dim)
    if len(actions.low) != action_dim:
        raise CheckpointError(f"{path}: expected statistics of action's {action_dim} values, got {len(actions.low)}")
    cameras = [key for key, f in inputs.items() if f.get("type") == "VISUAL" and "empty_camera" not in key]
    # A camera that no image reaches is a masked view, like an empty camera.
    names = _robot_names(renamed, (*cameras, *states), folder / BEFORE)
    cameras = [key for key in cameras if key in names]
    sizes = len(state.low), action_dim
    relative = None if relative is None else relative_dims(relative, sizes, folder / BEFORE)
    robot = {key: names[key] for key in (*cameras, *states)}
    scales = ()
    if not prompted or config["type"] == "multi_task_dit":
        scales = tuple(of_inputs.scaling(key) or Normaliser.identity(3) for key in cameras)
    if not prompted:
        preset = _preset(path, robot, sizes, resize, relative)
        if len(states) > 1:
            preset = replace(preset, state_dims=tuple(state_dims))
        return Processors(preset, state, actions, cameras=scales, before=steps[0], after=steps[1])
    smolvla = config["type"] == "smolvla"
    old = config["type"] in _CHANGED and _is_of_04(config, path)
    name, place, file = length
    return Processors(
        _preset(path, robot, sizes, resize, relative),
        state,
        actions,
        tokenizer.get("tokenizer_name"),
        size_of(place, name, file),
        pixel_values({k: of_inputs.camera(k) for k in cameras}, smolvla=smolvla, old_bars=old, path=path),
        size_of(config, "max_state_dim", path) if old else None,
        scales,
        fast,
        before=steps[0],
        after=steps[1],
    )


def reads_prompt(kind: str) -> bool:
    """Return whether a policy class tokenizes an instruction in its preprocessor."""
    return any(TOKENIZE in order for order in PREPROCESSORS[kind])


def denoising_steps(config: Mapping[str, Any], name: str, path: Path, default: int = 10) -> int:
    """Return the denoising steps in a config.json, `default` if it has none."""
    steps = size_of(config, name, path, default)
    if steps > _MOST_STEPS:
        raise CheckpointError(f"{path}: {name}: expected 1 to {_MOST_STEPS}, got {steps}")
    return steps


def required(content: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """Return a required setting of a JSON file; an integer is a float as well. Raises CheckpointError."""
    value = content.get(key)
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise CheckpointError(f"{path}: expected {key} of type {kind.__name__}, got {value!r}")
    return value


def _is_of_04(config: Mapping[str, Any], path: Path) -> bool:
    """Return whether lerobot 0.4 saved the folder of a π0, π0.5 or π0-FAST.

    Releases since 0.5.1 write `use_relative_actions` into config.json. The config.json of 0.5.0 equals that of 0.4, but
    the train_config.json of its training has `cudnn_deterministic`, which 0.4 does not know.
    """
    if "use_relative_actions" in config:
        return False
    training = path.with_name("train_config.json")
    return not training.is_file() or "cudnn_deterministic" not in read_json(training)


# -- features -----------------------------------------------------------------------------------------------------


def features(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the input and output features of a config.json. Raises CheckpointError."""
    inputs, outputs = (required(config, name, dict, path) for name in ("input_features", "output_features"))
    wrong = [k for k, f in (inputs | outputs).items() if not isinstance(f, dict)]
    if wrong:
        raise CheckpointError(f"{path}: expected features with a type and a shape, got others: {', '.join(wrong)}")
    return inputs, outputs


def length_of(table: Mapping[str, Any], key: str, path: Path) -> int:
    """Return the numbers of a feature of one axis. Raises CheckpointError."""
    shape = table.get(key, {}).get("shape")
    if not isinstance(shape, list) or len(shape) != 1:
        raise CheckpointError(f"{path}: expected a feature {key} of one axis, got {shape}")
    return size_of({key: shape[0]}, key, path)


def _robot_names(renamed: Mapping[str, str], keys: Sequence[str], path: Path) -> dict[str, str]:
    """Return the robot's name of each of the policy's `keys`, without cameras whose name goes to another key.

    Args:
        renamed: The policy's names by the robot's, as the step saves them.
        keys: The policy's cameras and its state.
        path: Of the pipeline that renames.

    Raises:
        CheckpointError: Several names become one key, or the state's name becomes another key.
    """
    names: dict[str, str] = {}
    for key in keys:
        sources = [robot for robot, model in renamed.items() if model == key]
        if len(sources) > 1:
            raise CheckpointError(
                f"{path}: {RENAME}: rename_map: expected one name renamed to {key}, got {', '.join(sources)}"
            )
        if sources or key not in renamed:
            names[key] = sources[0] if sources else key
    for key in (STATE, ENVIRONMENT):
        if key in keys and key not in names:
            raise CheckpointError(
                f"{path}: {RENAME}: rename_map: expected a name renamed to {key}, which the policy reads, got "
                f"{key} as {renamed[key]}"
            )
    return names


def _preset(
    path: Path, names: Mapping[str, str], sizes: tuple[int, int], resize: Resize, relative: tuple[int, ...] | None
) -> Preset:
    """Return the robot's keys: LIBERO's if the features are LIBERO's and none is renamed, else the robot's `names`."""
    cameras = tuple(key for key in names if key not in (STATE, ENVIRONMENT))
    deltas = relative or ()
    is_libero = tuple(names) == (*_LIBERO_IMAGES, STATE) and sizes == (LIBERO.state_dim, LIBERO.action_dim)
    if is_libero and all(key == name for key, name in names.items()):
        # With relative actions the robot gets targets.
        motion = LIBERO.motion_dims if relative is None else None
        return replace(LIBERO, discrete_state_input=None, motion_dims=motion, delta_actions=deltas, resize=resize)
    # Such a folder does not state whether its actions are targets or motion. A missing camera is a masked view, as in
    # lerobot.
    images, state = tuple(names[key] for key in cameras), tuple(n for key, n in names.items() if key not in cameras)
    try:
        return Preset(images, state, *sizes, "task", images, delta_actions=deltas, resize=resize)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


# -- saved pipelines ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pipeline:
    """A saved pipeline: its steps, as JSON, by name, without those of `NEUTRAL`, and the folders that steps saved next
    to it, by the setting that names them."""

    path: Path
    steps: Mapping[str, Mapping[str, Any]]
    folders: Mapping[str, Path]

    def config(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a step, empty if the pipeline has no such step."""
        return self.steps.get(name, {}).get("config") or {}

    def statistics(self, name: str) -> Statistics:
        return step_statistics(self.path.parent, name, self.config(name), self.steps[name].get("state_file"))


def _read_pipeline(path: Path, orders: Orders) -> _Pipeline:
    """Raise CheckpointError if the file is missing, if a step or setting is not known, or if a step is missing, doubled
    or in another order than lerobot's."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: expected {path.name} with the statistics, found no such file")
    steps = read_json(path).get("steps")
    if not isinstance(steps, list) or not all(map(_is_step, steps)):
        raise CheckpointError(f"{path}: expected steps with settings, got {steps!r:.200}")
    saved = [str(step.get("registry_name", step.get("class"))) for step in steps]
    names = [ALIASES.get(name, name) for name in saved]
    _check_steps(path, names, orders)
    folders: dict[str, Path] = {}
    for name, step in zip(names, steps, strict=True):
        check(step.get("config") or {}, STEPS[name], f"{path}: {name}", KNOWN)
        folders |= _saved_folders(path, name, step.get("artifacts") or {})
    return _Pipeline(path, {n: step for n, step in zip(names, steps, strict=True) if n not in NEUTRAL}, folders)


def _saved_folders(path: Path, name: str, artifacts: Any) -> dict[str, Path]:
    """Return the folders that a step saved next to its pipeline, by the setting that names them. Raises
    CheckpointError."""
    known = ARTIFACTS.get(name)
    if not isinstance(artifacts, dict) or artifacts.keys() - {known}:
        raise CheckpointError(f"{path}: {name}: artifacts: expected {known or 'none'}, got {artifacts!r:.80}")
    for place in artifacts.values():
        if not isinstance(place, str) or Path(place).is_absolute() or ".." in Path(place).parts:
            raise CheckpointError(f"{path}: {name}: artifacts: expected a folder next to it, got {place!r:.60}")
    return {setting: path.parent / place for setting, place in artifacts.items()}


def _check_steps(path: Path, names: Sequence[str], orders: Orders) -> None:
    expected = [*dict.fromkeys(name for order in orders for name in order)]
    known = [*expected, BATCH, DEVICE]
    if others := [name for name in names if name not in known]:
        raise CheckpointError(f"{path}: expected steps among {', '.join(known)} ({KNOWN}), got {', '.join(others)}")
    for name in expected:
        if name not in OPTIONAL and name not in names:
            raise CheckpointError(f"{path}: expected a {name} step, as lerobot saves it, found {', '.join(names)}")
        if name not in NEUTRAL and names.count(name) > 1:
            raise CheckpointError(f"{path}: expected one {name} step, got {names.count(name)}")
    for order in orders:
        found = [name for name in names if name in order and name not in NEUTRAL]
        if found != sorted(found, key=order.index):
            right = " before ".join(name for name in order if name in found)
            raise CheckpointError(f"{path}: expected {right}, got {', '.join(found)}")


def _is_step(step: Any) -> bool:
    """Return whether a step has lerobot's form: a name, and settings whose tables hold words."""
    if not isinstance(step, dict) or not isinstance(step.get("registry_name") or "", str):
        return False
    config = step.get("config") or {}
    tables = [config.get(name) or {} for name in ("norm_map", "rename_map")] if isinstance(config, dict) else [config]
    return all(isinstance(table, dict) and all(isinstance(word, str) for word in table.values()) for table in tables)


def _are_relative(config: Mapping[str, Any], before: _Pipeline, after: _Pipeline) -> bool:
    """Return whether actions are relative to the state. Raises CheckpointError if the files contradict each other."""
    found = {
        f"{before.path.name}'s {RELATIVE}": before.config(RELATIVE).get("enabled", False),
        f"{after.path.name}'s {ABSOLUTE}": after.config(ABSOLUTE).get("enabled", False),
    }
    if "use_relative_actions" in config:
        found["config.json's use_relative_actions"] = config["use_relative_actions"]
    if len(set(map(bool, found.values()))) > 1:
        got = ", ".join(f"{value!r} as {name}" for name, value in found.items())
        raise CheckpointError(
            f"checkpoint {before.path.parent}: relative actions: expected one value in all files, got {got}"
        )
    return any(found.values())


def relative_dims(step: Mapping[str, Any], sizes: tuple[int, int], path: Path) -> tuple[int, ...]:
    """Return the dimensions of the actions that are relative to the state.

    The step names the joints that it excludes: every action whose own name contains such a name, in any case. Actions
    without a name are relative.

    Args:
        step: Settings of the step.
        sizes: Numbers of the state and of an action.
        path: Of the pipeline, for errors.

    Raises:
        CheckpointError: The state is shorter than an action; lerobot cannot add it either.
    """
    state_dim, action_dim = sizes
    if state_dim < action_dim:
        raise CheckpointError(
            f"{path}: {RELATIVE}: expected a state of at least the actions' {action_dim} numbers, got {state_dim}"
        )
    excluded, names = step.get("exclude_joints") or [], step.get("action_names") or []
    if not isinstance(excluded, list) or not isinstance(names, list):
        raise CheckpointError(f"{path}: {RELATIVE}: expected lists of names, got {excluded!r:.60} and {names!r:.60}")
    words = [str(word).lower() for word in excluded if word]
    absolute = {i for i, name in enumerate(names) if any(word in str(name).lower() for word in words)}
    return tuple(i for i in range(action_dim) if i not in absolute)


def _tokenizer(before: _Pipeline) -> Mapping[str, Any]:
    """Return the settings of the tokenizer step. A tokenizer saved with the pipeline is named by its path."""
    config, folder = before.config(TOKENIZE), before.folders.get("tokenizer_name")
    if folder is None:
        return config
    if not folder.is_dir():
        expected = f"expected the tokenizer in the folder {folder.name!r:.60} next to it"
        found = f"found {listing(folder.parent)}; copy the folder from where the policy was saved"
        raise CheckpointError(f"{before.path}: {expected}, {found}")
    return {**config, "tokenizer_name": str(folder)}


def _check_prompt(before: _Pipeline, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a step pads the state in the prompt to another size than config.json says."""
    for name in before.steps:
        size, expected = before.config(name).get("max_state_dim"), config.get("max_state_dim")
        if size is not None and size != expected:
            raise CheckpointError(
                f"{before.path}: {name}: max_state_dim: expected config.json's {expected}, got {size}"
            )
