"""The robots that starVLA's data mixtures were trained for: what their checkpoints' folders do not say.

Source: starVLA's data configurations (MIT).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vla_accel.transforms.robots import LIBERO, Preset

Scaling = Literal["min_max", "q99"]


@dataclass(frozen=True)
class Robot:
    """One robot.

    Attributes:
        preset: Its keys and sizes.
        actions: How its actions are scaled, but for the gripper, which is not.
        state: How its state is scaled, but for the gripper; None for not at all.
        binary: Whether the gripper's action is 0 or 1 from 0.5 on; else it becomes 1 up to 0.5 and -1 above, as
            LIBERO's robot takes it.
    """

    preset: Preset
    actions: Scaling
    state: Scaling | None = None
    binary: bool = False


def _oxe(camera: str) -> Preset:
    return Preset((camera,), ("observation/state",), 8, 7, "prompt", motion_dims=(0, 1, 2, 3, 4, 5))


_LIBERO = Robot(LIBERO, "min_max")
_BRIDGE, _RT1 = (Robot(_oxe(name), "q99", "q99", binary=True) for name in ("observation/image_0", "observation/image"))
MIXES: dict[str, dict[str, Robot]] = {
    "libero_all": {"libero_franka": _LIBERO},
    "libero_goal": {"libero_franka": _LIBERO},
    "bridge": {"oxe_bridge": _BRIDGE},
    "bridge_rt_1": {"oxe_bridge": _BRIDGE, "oxe_rt1": _RT1},
}
"""Robots by data mixture (`datasets.vla_data.data_mix`), then by their name in starVLA, which is that of the statistics
where a mixture has several."""
