"""The robot of `ToyArmConfig`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from lerobot.robots import Robot

from tests.plugins.toy_arm.config_toy_arm import ToyArmConfig

JOINTS = tuple(f"joint{i}.pos" for i in range(6))
CAMERAS = ("front", "wrist")


class ToyArm(Robot):
    """Observes its joints and two images; notes every action."""

    config_class = ToyArmConfig
    name = "toy_arm"

    def __init__(self, config: ToyArmConfig) -> None:
        super().__init__(config)
        self.config = config
        self.joints = dict.fromkeys(JOINTS, 0.5)
        self.random = np.random.default_rng(0)
        self._connected = False

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the frames; the cameras differ."""
        height, width = self.config.height, self.config.width
        return dict(zip(CAMERAS, ((height, width, 3), (2 * height, width + 10, 3)), strict=True))

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**dict.fromkeys(JOINTS, float), **self._shapes}

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(JOINTS, float)

    @property
    def is_connected(self) -> bool:
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        self._connected = True

    def calibrate(self) -> None:
        """Nothing to do."""

    def configure(self) -> None:
        """Nothing to do."""

    def disconnect(self) -> None:
        self._connected = False

    def get_observation(self) -> dict[str, Any]:
        return {**self.joints, **{c: self.random.integers(0, 256, s, np.uint8) for c, s in self._shapes.items()}}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self.joints = {name: float(action[name]) for name in JOINTS}
        with self.config.log.open("a") as log:
            log.write(json.dumps(self.joints) + "\n")
        return action
