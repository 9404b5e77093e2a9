"""lerobot's folders of π0, π0.5, π0-FAST and SmolVLA: what their JSON files and statistics say, in our terms.

Reads `config.json` (`lerobot_fields`), the saved pre- and postprocessor (`lerobot_steps`) and their statistics
(`lerobot_statistics`). A setting or a step that is not known is an error: leaving one out would cost success silently.
Knows nothing of weights, but for the statistics that lerobot 0.3 keeps among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.lerobot_fields import FIELDS, check
from vla_accel.checkpoints.lerobot_images import pixel_values, prompt_state_dim
from vla_accel.checkpoints.lerobot_statistics import ACTION, STATE, Statistics, buffers, of_buffers, of_step
from vla_accel.checkpoints.lerobot_steps import (
    ABSOLUTE,
    BEFORE,
    NORMALIZE,
    RELATIVE,
    RENAME,
    TOKENIZE,
    UNNORMALIZE,
    Pipeline,
    is_migrated,
    read_pipelines,
)  # fmt: skip
from vla_accel.checkpoints.lora import CONFIG as ADAPTER
from vla_accel.checkpoints.weights import Weights, listing, read_json, size_of
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.pictures import PixelValues, Resize
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.robots import LIBERO, Preset

MOST_STEPS = 1000
"""Denoising steps, as of `config.PolicyConfig`."""
_LIBERO_IMAGES = ("observation.images.image", "observation.images.image2")


@dataclass(frozen=True)
class Processors:
    """What the saved pipelines say.

    Attributes:
        preset: The robot's conventions.
        state: How the state is normalized.
        actions: How the actions are unnormalized.
        tokenizer: Settings of the tokenizer step. A `tokenizer_name` that lies in the folder is a path.
        pixels: The pixels that the policy was trained with, None for the usual ones. Cameras are in the order of
            `preset.images`.
    """

    preset: Preset
    state: Normaliser
    actions: Normaliser
    tokenizer: Mapping[str, Any]
    pixels: PixelValues | None = None


@dataclass(frozen=True)
class LerobotFolder:
    """What a folder of π0 or π0.5 says.

    Attributes:
        prompt_state_dim: To how many numbers π0.5's prompt fills the state up; None where it does not.
        trained_delay: The longest delay that real-time chunking was trained with; 0 if it was not, None where
            config.json does not say.
    """

    kind: str
    horizon: int
    action_dim: int
    max_token_len: int
    image_size: int
    variants: tuple[str | None, str | None]
    prompt_state_dim: int | None
    processors: Processors
    num_steps: int
    trained_delay: int | None


def is_lerobot(folder: Path) -> bool:
    """Whether a folder's config.json is one of lerobot's policies (it names its `type` and its features)."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    content = read_json(path)
    return "type" in content and "input_features" in content


def read_folder(folder: Path, weights: Weights) -> LerobotFolder:
    """Of π0 and π0.5. Raises CheckpointError for another policy, missing files or statistics, and for settings and
    steps that are not known."""
    path = folder / "config.json"
    config = read_settings(path, ("pi0", "pi05"))
    described = read_processors(folder, config, "bilinear", weights)
    resolution = member(config, "image_resolution", list, path)
    if len(resolution) != 2 or resolution[0] != resolution[1]:
        raise CheckpointError(f"{path}: expected a square image_resolution, got {resolution}")
    horizon, delay = size_of(config, "chunk_size", path), config.get("rtc_training_max_delay")
    if delay is not None and (type(delay) is not int or not 0 <= delay < horizon):
        raise CheckpointError(f"{path}: rtc_training_max_delay: expected 0 to {horizon - 1}, got {delay!r:.60}")
    return LerobotFolder(
        kind=config["type"],
        horizon=horizon,
        action_dim=member(config, "max_action_dim", int, path),
        max_token_len=longest_prompt(described, config, path),
        image_size=int(resolution[0]),
        variants=(config.get("paligemma_variant"), config.get("action_expert_variant")),
        prompt_state_dim=prompt_state_dim(config, path),
        processors=described,
        num_steps=steps_of(config, "num_inference_steps", path),
        trained_delay=delay,
    )


def read_settings(path: Path, kinds: Sequence[str]) -> Mapping[str, Any]:
    """Read the config.json of a policy of one of `kinds`.

    Raises:
        CheckpointError: For another policy, and for settings that are not known or that are refused.
    """
    config = read_json(path)
    if config.get("type") not in kinds:
        raise CheckpointError(f"{path}: expected a policy of type {' or '.join(kinds)}, got {config.get('type')!r}")
    if config.get("use_peft") and not (path.parent / ADAPTER).is_file():
        there = listing(path.parent)
        raise CheckpointError(f"{path}: expected {ADAPTER} beside a policy that says use_peft, found {there}")
    check(config, FIELDS[config["type"]], path)
    return config


def read_processors(folder: Path, config: Mapping[str, Any], resize: Resize, weights: Weights) -> Processors:
    """Read the saved pre- and postprocessor next to a config.json; of lerobot 0.3, which has none, the statistics among
    the weights.

    Args: `resize`: how the policy brings images to its size. Raises CheckpointError.
    """
    path = folder / "config.json"
    if not is_migrated(folder) and buffers(weights.shapes):
        inputs, outputs = _features(config, path)
        modes = member(config, "normalization_mapping", dict, path)
        statistics = of_buffers(weights, inputs | outputs, modes, path.with_name("model.safetensors"))
        return _processors(path, config, (statistics, statistics), resize)
    before, after = read_pipelines(folder, config["type"])
    _check_prompt(before, config)
    statistics = of_step(folder, before.steps[NORMALIZE]), of_step(folder, after.steps[UNNORMALIZE])
    renamed = before.config(RENAME).get("rename_map") or {}
    return _processors(
        path, config, statistics, resize, renamed=renamed, tokenizer=_tokenizer(before),
        relative=_relative(config, before, after),
    )  # fmt: skip


def _processors(
    path: Path,
    config: Mapping[str, Any],
    statistics: tuple[Statistics, Statistics],
    resize: Resize,
    *,
    renamed: Mapping[str, str] = {},
    tokenizer: Mapping[str, Any] = {},
    relative: Mapping[str, Any] | None = None,
) -> Processors:
    inputs, outputs = _features(config, path)
    state_dim, action_dim = _size(inputs, STATE, path), _size(outputs, ACTION, path)
    state, actions = statistics[0].scaling(STATE), statistics[1].scaling(ACTION)
    # A policy that was trained from a base for another robot keeps the base's features in config.json.
    state = state or Normaliser.identity(state_dim)
    actions = actions or Normaliser.identity(action_dim)
    if len(actions.low) != action_dim:
        raise CheckpointError(f"{path}: expected statistics of action's {action_dim} values, got {len(actions.low)}")
    cameras = [key for key, f in inputs.items() if f.get("type") == "VISUAL" and "empty_camera" not in key]
    names = _robot_names(renamed, (*cameras, STATE), path.with_name(BEFORE))
    # A camera that no image reaches is a masked view, as an empty camera is.
    cameras = [key for key in cameras if key in names]
    preset = _preset(path, cameras, (len(state.low), action_dim), names, resize, relative)
    pixels = pixel_values(config, {key: statistics[0].camera(key) for key in cameras}, path)
    return Processors(preset, state, actions, tokenizer, pixels)


def longest_prompt(described: Processors, config: Mapping[str, Any], path: Path) -> int:
    """In tokens: what the saved tokenizer step says, else config.json at `path`. Raises CheckpointError."""
    if "max_length" in described.tokenizer:
        return size_of(described.tokenizer, "max_length", path.with_name(BEFORE))
    return size_of(config, "tokenizer_max_length", path)


def steps_of(config: Mapping[str, Any], name: str, path: Path) -> int:
    """The denoising steps in a config.json, 10 where it has none. Raises CheckpointError."""
    steps = size_of(config, name, path, 10)
    if steps > MOST_STEPS:
        raise CheckpointError(f"{path}: {name}: expected 1 to {MOST_STEPS}, got {steps}")
    return steps


def _features(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs, outputs = (member(config, name, dict, path) for name in ("input_features", "output_features"))
    wrong = [k for k, f in (inputs | outputs).items() if not isinstance(f, dict)]
    if wrong:
        raise CheckpointError(f"{path}: expected features with a type and a shape, got others: {', '.join(wrong)}")
    return inputs, outputs


def _size(features: Mapping[str, Any], key: str, path: Path) -> int:
    shape = features.get(key, {}).get("shape")
    if not isinstance(shape, list) or len(shape) != 1:
        raise CheckpointError(f"{path}: expected a feature {key} of one axis, got {shape}")
    return size_of({key: shape[0]}, key, path)


def _preset(
    path: Path,
    cameras: Sequence[str],
    sizes: tuple[int, int],
    names: Mapping[str, str],
    resize: Resize,
    relative: Mapping[str, Any] | None,
) -> Preset:
    """The robot's keys: LIBERO's where the features are LIBERO's and none is renamed, else the robot's `names`."""
    state_dim, action_dim = sizes
    is_libero = tuple(cameras) == _LIBERO_IMAGES and sizes == (LIBERO.state_dim, LIBERO.action_dim)
    if is_libero and all(key == name for key, name in names.items()):
        images, state, prompt = LIBERO.images, LIBERO.state, LIBERO.prompt
        optional: tuple[str, ...] = ()
        # The state is added to relative actions: the robot gets targets.
        motion = LIBERO.motion_dims if relative is None else None
    else:
        images = tuple(names[key] for key in cameras)
        state, prompt, optional = (names[STATE],), "task", images
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
            delta_actions=() if relative is None else relative_dims(relative, sizes, path.with_name(BEFORE)),
            resize=resize,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _robot_names(renamed: Mapping[str, str], keys: Sequence[str], path: Path) -> dict[str, str]:
    """Return the robot's name of each of the policy's `keys`, without the cameras whose name goes to another key.

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
                f"{path}: {RENAME}: rename_map: expected one name that becomes {key}, got {', '.join(sources)}"
            )
        if sources or key not in renamed:
            names[key] = sources[0] if sources else key
    if STATE not in names:
        raise CheckpointError(
            f"{path}: {RENAME}: rename_map: expected a name that becomes {STATE}, which the policy reads, got "
            f"{STATE} as {renamed[STATE]}"
        )
    return names


# -- relative actions ---------------------------------------------------------------------------------------------


def _relative(config: Mapping[str, Any], before: Pipeline, after: Pipeline) -> Mapping[str, Any] | None:
    """The settings of the step that makes actions relative to the state; None where they are absolute.

    Raises CheckpointError where config.json and the pipelines contradict each other.
    """
    said = {
        f"{before.path.name}'s {RELATIVE}": before.config(RELATIVE).get("enabled", False),
        f"{after.path.name}'s {ABSOLUTE}": after.config(ABSOLUTE).get("enabled", False),
    }
    if "use_relative_actions" in config:
        said["config.json's use_relative_actions"] = config["use_relative_actions"]
    if len(set(map(bool, said.values()))) > 1:
        found = ", ".join(f"{value!r} as {name}" for name, value in said.items())
        raise CheckpointError(f"checkpoint {before.path.parent}: relative actions: expected one answer, got {found}")
    return before.config(RELATIVE) if any(said.values()) else None


def relative_dims(step: Mapping[str, Any], sizes: tuple[int, int], path: Path) -> tuple[int, ...]:
    """Return the dimensions of the actions that are relative to the state, by the names that the step excludes.

    A name excludes every action whose own name contains it, in any case; actions without a name are relative.

    Args: `sizes`: numbers of the state and of an action. Raises CheckpointError for a state that is shorter than an
    action, which lerobot cannot add either.
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


# -- prompts ------------------------------------------------------------------------------------------------------


def _tokenizer(before: Pipeline) -> Mapping[str, Any]:
    """The settings of the tokenizer step; a tokenizer that is saved with the pipeline by its path."""
    step = before.steps[TOKENIZE]
    name = (step.artifacts or {}).get("tokenizer_name")
    if name is None:
        return step.config
    inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
    if not inside or not (before.path.parent / name).is_dir():
        there = listing(before.path.parent)
        raise CheckpointError(
            f"{before.path}: expected the tokenizer in a folder {name!r:.60} next to it, found {there}"
        )
    return {**step.config, "tokenizer_name": str(before.path.parent / name)}


def _check_prompt(before: Pipeline, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a step fills the state in the prompt up to another size than config.json says."""
    for name in before.steps:
        size, expected = before.config(name).get("max_state_dim"), config.get("max_state_dim")
        if size is not None and size != expected:
            raise CheckpointError(
                f"{before.path}: {name}: max_state_dim: expected config.json's {expected}, got {size}"
            )


def member(content: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """A setting of a JSON file that must be there. Raises CheckpointError."""
    value = content.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{path}: expected {key} of type {kind.__name__}, got {value!r}")
    return value
