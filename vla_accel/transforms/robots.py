"""Presets: a robot's observations and actions as data.

A preset names the keys of images and state, in the model's order of views, and how the robot's numbers differ from the
model's. Shipped are openpi's LIBERO, DROID and ALOHA; users add more as YAML.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_accel.config import LARGEST
from vla_accel.config.mapping import from_mapping, read_mapping
from vla_accel.errors import ConfigError, unknown
from vla_accel.files import user_path
from vla_accel.pictures import Resize

Gripper = Literal["none", "aloha"]
Pose = Literal["model", "axis_angle"]


@dataclass(frozen=True)
class Preset:
    """One robot's conventions.

    Attributes:
        images: Keys of the camera images in the model's order (openpi's base, left wrist, right wrist). A key with
            slashes may also be a path into nested mappings.
        state: Keys whose values are joined to the state.
        state_dim: Numbers of the state.
        state_dims: Numbers of each key of `state`; by default all but the first have one.
        action_dim: Numbers of the robot's action.
        prompt: Key of the instruction, or a path as for images.
        optional_images: Keys of `images` that may be missing; a missing view is masked.
        ignored_images: Keys of images that a client may send and the model never sees.
        delta_actions: Dimensions whose model output is relative to the state at the start of the chunk; the robot gets
            absolute targets.
        motion_dims: Dimensions of the robot's action that are a velocity or a step for one control tick, so that 0
            means standing still; `()` if all are absolute targets; None if unknown.
        flipped: Dimensions of state and actions whose sign differs between robot and model.
        gripper: Units of the grippers; "aloha" converts ALOHA's linear positions to the angles π0 was trained on.
        gripper_dims: Dimensions of the grippers.
        pose: Form of the end effector's pose in actions. "axis_angle": X-VLA's position, six numbers of a rotation and
            gripper become position, axis-angle and -1 (open) or 1; "model" leaves actions as they are.
        discrete_state_input: Whether π0.5 reads the state in its prompt, if the checkpoint does not say so (openpi's
            folders); None for the model's default (it does).
        resize: How images are resized (`pictures.Resize`). lerobot's checkpoints decide it themselves: the default
            accepts theirs, another value is an error.
    """

    images: tuple[str, ...]
    state: tuple[str, ...]
    state_dim: int
    action_dim: int
    prompt: str = "prompt"
    optional_images: tuple[str, ...] = ()
    ignored_images: tuple[str, ...] = ()
    delta_actions: tuple[int, ...] = ()
    motion_dims: tuple[int, ...] | None = None
    flipped: tuple[int, ...] = ()
    gripper: Gripper = "none"
    gripper_dims: tuple[int, ...] = ()
    discrete_state_input: bool | None = None
    resize: Resize = "antialias"
    state_dims: tuple[int, ...] = ()
    pose: Pose = "model"

    def __post_init__(self) -> None:
        for name in ("images", "state"):
            keys = getattr(self, name)
            if not keys or len(set(keys)) != len(keys):
                raise ConfigError(f"preset.{name}: expected at least one key, each once, got {list(keys)}")
        others = set(self.optional_images) - set(self.images)
        if others:
            expected = f"some of {list(self.images)}, or [] for none"
            raise ConfigError(f"preset.optional_images: expected {expected}, got {sorted(others)}")
        if both := sorted(set(self.ignored_images) & set(self.images)):
            raise ConfigError(f"preset.ignored_images: expected keys that are not in images, got {both}")
        for name in ("state_dim", "action_dim"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ConfigError(f"preset.{name}: expected 1 to {LARGEST}, got {getattr(self, name)}")
        shared = min(self.state_dim, self.action_dim)
        for name in ("delta_actions", "flipped", "gripper_dims"):
            wrong = [i for i in getattr(self, name) if not 0 <= i < shared]
            if wrong:
                raise ConfigError(f"preset.{name}: expected dimensions 0 to {shared - 1}, got {wrong}")
        wrong = [i for i in self.motion_dims or () if not 0 <= i < self.action_dim]
        if wrong:
            raise ConfigError(f"preset.motion_dims: expected dimensions 0 to {self.action_dim - 1}, got {wrong}")
        if (self.gripper == "none") != (not self.gripper_dims):
            raise ConfigError(
                f"preset.gripper {self.gripper!r} and gripper_dims {list(self.gripper_dims)}: expected both or neither"
            )

    def described(self) -> dict[str, Any]:
        """Plain data for clients: keys of images, state and prompt, the action's size, its motion dimensions and the
        form of its poses."""
        return {
            "images": list(self.images),
            "state": list(self.state),
            "prompt": self.prompt,
            "action_dim": self.action_dim,
            "motion_dims": None if self.motion_dims is None else list(self.motion_dims),
            "pose": self.pose,
        }

    def split(self, state: np.ndarray) -> dict[str, np.ndarray]:
        """Split a state (state_dim,) by its keys."""
        sizes = self.state_dims or (len(state) - len(self.state) + 1, *[1] * (len(self.state) - 1))
        return dict(zip(self.state, np.split(state, np.cumsum(sizes[:-1])), strict=True))


LIBERO = Preset(
    images=("observation/image", "observation/wrist_image"),
    state=("observation/state",),
    state_dim=8,
    action_dim=7,
    motion_dims=(0, 1, 2, 3, 4, 5),  # steps of the gripper's pose; the last one opens or closes it
    # pi05_libero was trained without; a checkpoint that says otherwise (the demo, lerobot's) decides.
    discrete_state_input=False,
)
DROID = Preset(
    images=("observation/exterior_image_1_left", "observation/wrist_image_left"),
    state=("observation/joint_position", "observation/gripper_position"),
    state_dim=8,
    action_dim=8,
    motion_dims=(0, 1, 2, 3, 4, 5, 6),  # joint velocities; the last one is the gripper's position
)
ALOHA = Preset(
    images=("images/cam_high", "images/cam_left_wrist", "images/cam_right_wrist"),
    optional_images=("images/cam_left_wrist", "images/cam_right_wrist"),
    ignored_images=("images/cam_low",),
    state=("state",),
    state_dim=14,
    action_dim=14,
    motion_dims=(),
    delta_actions=(0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12),
    flipped=(1, 2, 8, 9),
    gripper="aloha",
    gripper_dims=(6, 13),
)

# X-VLA reads the position, two columns of the rotation matrix and zeros, and answers with absolute poses.
XVLA_LIBERO = dataclasses.replace(LIBERO, state_dim=20, motion_dims=(), pose="axis_angle")

PRESETS: dict[str, Preset] = {
    "libero": LIBERO,
    "xvla_libero": XVLA_LIBERO,
    # openpi's π0 for LIBERO has one more delta transform than its π0.5, on data that are deltas already.
    "pi0_libero": dataclasses.replace(LIBERO, delta_actions=(0, 1, 2, 3, 4, 5)),
    "droid": DROID,
    # DROID models trained on joint positions instead of velocities.
    "droid_joint_position": dataclasses.replace(DROID, delta_actions=(0, 1, 2, 3, 4, 5, 6), motion_dims=()),
    "aloha": ALOHA,
    "aloha_sim": dataclasses.replace(ALOHA, delta_actions=()),
}

_OTHER_ACTIONS = {"action_dim", "delta_actions"}
"""Fields of a preset from a file that change the base's actions."""
_NEEDED = {"images", "state", "state_dim", "action_dim"}
"""Fields that a preset from a file without a base must have."""

# Folders below `assets/`, which openpi names after the data of the statistics.
BY_ASSET = {
    "physical-intelligence/libero": "libero",
    "droid": "droid",
    "trossen": "aloha",
    "lerobot/aloha_sim_transfer_cube_human": "aloha_sim",
}


@dataclass(frozen=True)
class OpenpiConfig:
    """Settings of an openpi training config that are missing from its checkpoints."""

    preset: str
    action_horizon: int
    discrete_state_input: bool | None = None


OPENPI_CONFIGS: dict[str, OpenpiConfig] = {
    "pi0_libero": OpenpiConfig("pi0_libero", 50),
    "pi05_libero": OpenpiConfig("libero", 10, discrete_state_input=False),
    "pi0_droid": OpenpiConfig("droid", 10),
    "pi05_droid": OpenpiConfig("droid", 15),
    "pi05_full_droid_finetune": OpenpiConfig("droid_joint_position", 16),
    "pi05_droid_finetune": OpenpiConfig("droid", 16),
    "pi0_aloha": OpenpiConfig("aloha", 50),
    "pi05_aloha": OpenpiConfig("aloha", 50),
    "pi0_aloha_towel": OpenpiConfig("aloha", 50),
    "pi0_aloha_tupperware": OpenpiConfig("aloha", 50),
    "pi0_aloha_pen_uncap": OpenpiConfig("aloha", 50),
    "pi05_aloha_pen_uncap": OpenpiConfig("aloha", 50),
    "pi0_aloha_sim": OpenpiConfig("aloha_sim", 50),
}


def load_preset(name: str) -> Preset:
    """Return a shipped preset, or one from a YAML or JSON file: fields of `Preset`, and `base`, a shipped preset that
    they change.

    Raises ConfigError for an unknown name, an unknown field or impossible dimensions.
    """
    if name in PRESETS:
        return PRESETS[name]
    if Path(name).suffix.lower() not in (".yaml", ".yml", ".json"):
        raise ConfigError(unknown("preset", name, PRESETS, "a YAML file or "))
    return preset_from(read_mapping(user_path(name).absolute()), name)


def of_another(name: str, asset: str) -> bool:
    """Whether a shipped preset belongs to another robot than the statistics that openpi calls `asset`."""
    return name in PRESETS and asset in BY_ASSET and PRESETS[name].state != PRESETS[BY_ASSET[asset]].state


def preset_from(content: Mapping[str, Any], where: str = "preset") -> Preset:
    """As `load_preset`, from a mapping."""
    fields = dict(content)
    base = fields.pop("base", None)
    try:
        if base is not None:
            if base not in [*PRESETS]:  # `base` may be unhashable
                raise ConfigError(unknown("base", base, PRESETS))
            same = dataclasses.asdict(PRESETS[base])
            if fields.keys() & _OTHER_ACTIONS:
                same["motion_dims"] = None  # another robot's would move it to a position of 0
            fields = {**same, **fields}
        return from_mapping(Preset, fields)
    except ConfigError as error:
        lacking = base is None and not fields.keys() >= _NEEDED
        hint = f"; or base: one of {', '.join(PRESETS)}, for the missing fields" if lacking else ""
        raise ConfigError(f"{where}: {error}{hint}") from error
