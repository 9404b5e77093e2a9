# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["vla_accel[checkpoints]"]
#
# [tool.uv.sources]
# vla_accel = { path = "../..", editable = true }
# ///
"""Control two ALOHA arms at 50 Hz without pauses between chunks.

uv run docs/examples/aloha.py path/to/pi0_aloha "fold the towel"
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from vla_accel import OptimizedPolicy

HZ = 50


class Arms:
    """Dummy arms with black images; replace them by your driver. Six joints and a gripper each, left before right."""

    def joints(self) -> np.ndarray:
        return np.zeros(14)

    def image(self, camera: str) -> np.ndarray:
        return np.zeros((480, 640, 3), np.uint8)

    def move_to(self, joints: np.ndarray) -> None:
        assert joints.shape == (14,)


def observation(arms: Arms, prompt: str) -> dict[str, Any]:
    cameras = ("cam_high", "cam_left_wrist", "cam_right_wrist")
    return {**{f"images/{name}": arms.image(name) for name in cameras}, "state": arms.joints(), "prompt": prompt}


def control(arms: Arms, policy: Any, prompt: str, seconds: float) -> Any:
    """Send joint targets (14,), and return the runner's report."""
    with policy.async_runner(hz=HZ) as runner:
        runner.start(observation(arms, prompt))
        tick = time.perf_counter()
        for _ in range(round(seconds * HZ)):
            arms.move_to(runner.step(observation(arms, prompt)))
            tick += 1 / HZ
            time.sleep(max(0.0, tick - time.perf_counter()))
        return runner.report()


if __name__ == "__main__":
    checkpoint, prompt = sys.argv[1:]
    print(control(Arms(), OptimizedPolicy.from_pretrained(checkpoint), prompt, seconds=5))
