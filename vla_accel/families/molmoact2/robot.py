"""The robot of a MolmoAct2 folder: its cameras, the scaling of its numbers and the words of its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.lerobot import Processors, denoising_steps, features, read_processors, required
from vla_accel.checkpoints.lerobot_settings import ACTION_FRAME, CLAMP_STATE, PACK, STATE_FRAME
from vla_accel.checkpoints.lerobot_statistics import STATE
from vla_accel.checkpoints.weights import Weights, read_json, size_of
from vla_accel.config import PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.molmoact2.network import MolmoAct2Config
from vla_accel.families.molmoact2.transforms import Joints, MolmoPrompt
from vla_accel.families.overrides import robot_of
from vla_accel.numeric import round_up
from vla_accel.transforms.normalisation import Normaliser, finite_array, scale_between
from vla_accel.transforms.robots import Preset

# lerobot's budget of a prompt, in tokens: words that are always the same, an instruction, and a margin.
_VIEW_TOKENS, _WORDS, _UNIT = 196, 80 + 32 + 32, 64


def with_steps(config: MolmoAct2Config, content: Mapping[str, Any], path: Path) -> MolmoAct2Config:
    """Return the sizes with the denoising steps of lerobot's config.json, if it has any."""
    if content.get("num_inference_steps") is None:
        return config
    return replace(config, num_steps=denoising_steps(content, "num_inference_steps", path))


def lerobot_robot(
    folder: Path, content: Mapping[str, Any], weights: Weights, config: MolmoAct2Config,
    settings: PolicyConfig,
) -> tuple[MolmoAct2Config, Processors, dict[str, Any]]:  # fmt: skip
    """Return sizes, robot and more fields of the transforms of lerobot's folder."""
    path = folder / "config.json"
    if (tag := settings.checkpoint.embodiment) is not None:
        raise ConfigError(f"checkpoint.embodiment: lerobot's folder has one robot, expected none, got {tag!r}")
    saved = read_processors(folder, content, "stretched", weights)
    pack, where = saved.before[PACK], folder / "policy_preprocessor.json"
    keys = required(pack, "image_keys", list, where)
    inputs, _ = features(content, path)
    cameras = [name for name, feature in inputs.items() if feature.get("type") == "VISUAL"]
    if not keys or len(set(keys)) != len(keys) or not set(keys) <= set(cameras):
        raise CheckpointError(
            f"{where}: image_keys: expected some of {', '.join(cameras)}, each once, got {keys!r:.200}"
        )
    # The step decides which cameras there are, and their order.
    others = {name: feature for name, feature in inputs.items() if name not in cameras}
    ordered = {**{key: inputs[key] for key in keys}, **others}
    saved = read_processors(folder, {**content, "input_features": ordered}, "stretched", weights)
    if any(camera.kind != "identity" for camera in saved.cameras):
        raise CheckpointError(
            f"{path}: normalization_mapping: VISUAL: expected IDENTITY, as lerobot's MolmoAct2 has it"
        )
    _check_masks(saved, where)
    horizon = size_of(content, "chunk_size", path)
    if pack.get("chunk_size") != horizon:
        raise CheckpointError(f"{where}: chunk_size: expected config.json's {horizon}, got {pack.get('chunk_size')}")
    preset = robot_of(saved.preset, settings)
    fallback = required(pack, "allow_image_key_fallback", bool, where)
    if not settings.preset:
        preset = replace(preset, optional_images=preset.images if fallback else ())
    names = {word: required(pack, word, str, where) for word in ("setup_type", "control_mode")}
    wrap = {word: required(pack, f"add_{word.partition('_')[0]}_tokens", bool, where) for word in names}
    prompt = _prompt(
        names, wrap, required(pack, "normalize_language", bool, where), size_of(pack, "num_state_tokens", where)
    )
    config = replace(
        with_steps(config, content, path), action_horizon=horizon, real_actions=_real(pack, config, saved, where),
        max_token_len=_longest(config, preset, pack.get("max_sequence_length"), where),
    )  # fmt: skip
    fields = {
        "prompt": prompt, "joints": _joints(saved, folder), "plain_state": saved.state.unscaled,
        # Their order in a preset of the user's is the user's.
        "by_name": () if settings.preset else tuple(sorted(range(len(keys)), key=keys.__getitem__)),
    }  # fmt: skip
    return config, replace(saved, preset=preset), fields


def _real(pack: Mapping[str, Any], config: MolmoAct2Config, saved: Processors, where: Path) -> int:
    real, expected = size_of(pack, "env_action_dim", where), saved.preset.action_dim
    if real != expected or real > config.action_dim:
        raise CheckpointError(f"{where}: env_action_dim: expected {expected}, at most {config.action_dim}, got {real}")
    return real


def _check_masks(saved: Processors, where: Path) -> None:
    """Releases before the main branch do not save the masks of the step that clamps the state."""
    masks = saved.before[CLAMP_STATE].get("normalization_masks") or {}
    scaled = [at not in saved.state.unscaled for at in range(saved.preset.state_dim)]
    if not isinstance(masks, dict) or masks.get(STATE, scaled) != scaled:
        got = masks.get(STATE) if isinstance(masks, dict) else masks
        raise CheckpointError(
            f"{where}: normalization_masks: expected the statistics' mask of the state, {scaled}, got {got!r:.200}"
        )


def _longest(config: MolmoAct2Config, preset: Preset, stated: object, where: Path) -> int:
    """The longest prompt without its images: lerobot bounds it with them."""
    views = len(preset.images)
    whole = round_up(views * _VIEW_TOKENS + _WORDS + preset.state_dim, _UNIT)
    whole = whole if stated is None else size_of({"max_sequence_length": stated}, "max_sequence_length", where)
    if (longest := whole - views * config.image_tokens) < 1:
        raise CheckpointError(f"{where}: max_sequence_length: expected more than {views} images' tokens, got {whole}")
    return longest


def _joints(saved: Processors, folder: Path) -> Joints | None:
    found = []
    for steps, name in ((saved.before, STATE_FRAME), (saved.after, ACTION_FRAME)):
        step = steps.get(name, {})
        values = [
            finite_array(step.get(word), f"{folder}: {name}: {word}") for word in ("joint_signs", "joint_offsets")
        ]
        signs, offsets = values
        if (signs is None) != (offsets is None) or (
            signs is not None and offsets is not None and len(signs) != len(offsets)
        ):
            raise CheckpointError(f"{folder}: {name}: expected as many joint_signs as joint_offsets, or neither")
        found.append(None if signs is None or offsets is None else Joints(signs, offsets))
    state, action = found
    same = (state is None) == (action is None)
    if state is not None and action is not None:
        same = np.array_equal(state.signs, action.signs) and np.array_equal(state.offsets, action.offsets)
        fits = len(state.signs) <= min(saved.preset.state_dim, saved.preset.action_dim)
        if not fits or not np.array_equal(abs(state.signs), np.ones(len(state.signs))):
            raise CheckpointError(
                f"{folder}: joint_signs: expected 1 or -1 for joints of state and action, got {state.signs}"
            )
    if not same:
        raise CheckpointError(f"{folder}: expected the same joint_signs and joint_offsets of state and actions")
    return state


def _prompt(words: Mapping[str, str], wrap: Mapping[str, bool], clean: bool, bins: int) -> MolmoPrompt:
    wrapped = []
    for name, word in words.items():
        start, end = (f"<{name.partition('_')[0]}_{side}>" for side in ("start", "end"))
        done = word.startswith(start) and word.endswith(end)
        wrapped.append(f"{start}{word}{end}" if word and wrap[name] and not done else word)
    return MolmoPrompt(0, "<im_start><im_end>", *wrapped, clean=clean, bins=bins)


def published_robot(
    folder: Path, config: MolmoAct2Config, settings: PolicyConfig
) -> tuple[MolmoAct2Config, Processors, dict[str, Any]]:  # fmt: skip
    """As `lerobot_robot`, of the authors' layout: norm_stats.json describes one robot or several."""
    path = folder / "config.json"
    content = read_json(path)
    statistics = folder / str(content.get("norm_stats_filename") or "norm_stats.json")
    table = read_json(statistics)
    tags = required(table, "metadata_by_tag", dict, statistics)
    tag = settings.checkpoint.embodiment or (next(iter(tags)) if len(tags) == 1 else None)
    if not isinstance(tags.get(tag), dict):
        raise ConfigError(
            f"checkpoint.embodiment: expected a robot of {statistics.name}, {', '.join(tags) or 'which has none'}, got "
            f"{tag!r}"
        )
    robot, where = tags[tag], Path(f"{statistics}: {tag}")
    mode = table.get("norm_mode", "min_max")
    if mode not in (names := {"q01_q99": ("q01", "q99"), "min_max": ("min", "max"), "q10_q90": ("q10", "q90")}):
        raise CheckpointError(f"{statistics}: norm_mode: expected {' or '.join(names)}, got {mode!r:.60}")
    state, actions = (
        _scale(robot.get(f"{name}_stats"), names[mode], f"{where}: {name}_stats") for name in ("state", "action")
    )
    still = _still(robot["state_stats"], f"{where}: state_stats")
    cameras = robot.get("camera_keys")
    if not isinstance(cameras, list) or not cameras or not all(isinstance(key, str) for key in cameras):
        raise CheckpointError(f"{where}: camera_keys: expected the names of cameras, got {cameras!r:.60}")
    if (steps := content.get("n_obs_steps")) != 1:
        raise CheckpointError(f"{path}: n_obs_steps: expected 1: a policy of several observations, got {steps!r:.60}")
    real, horizon = len(actions.low), size_of(robot, "action_horizon", where, config.action_horizon)
    if real > config.action_dim or horizon > config.action_horizon:
        raise CheckpointError(
            f"{where}: expected at most {config.action_horizon} actions of {config.action_dim} numbers"
        )
    preset = Preset(tuple(cameras), (STATE,), len(state.low), real, "task", tuple(cameras), resize="stretched")
    preset = robot_of(preset, settings)
    names = {word: str(robot.get(word) or "") for word in ("setup_type", "control_mode")}
    wrap = {word: _flag(content, f"add_{word.partition('_')[0]}_tokens", path) for word in names}
    prompt = _prompt(names, wrap, True, size_of(content, "num_state_tokens", path))
    config = replace(
        config, real_actions=real, action_horizon=horizon, max_token_len=_longest(config, preset, None, where)
    )
    return config, Processors(preset, state, actions), {"prompt": prompt, "still": still}


def _flag(content: Mapping[str, Any], key: str, path: Path) -> bool:
    return required({key: True, **content}, key, bool, path)


def _scale(table: Any, ends: tuple[str, str], where: str) -> Normaliser:
    return replace(scale_between(table, ends, lambda span: np.maximum(span, 1e-6), where), single=True)


def _still(table: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The numbers that never vary."""
    least, most = (finite_array(table.get(name), f"{where}: {name}") for name in ("min", "max"))
    return () if least is None or most is None else tuple(np.flatnonzero(least == most).tolist())
