# /// script
# requires-python = ">=3.12,<3.14"
# dependencies = ["lerobot[feetech]>=0.6.1", "vla_accel[checkpoints]"]
#
# [tool.uv.sources]
# vla_accel = { path = "../..", editable = true }
# ///
"""Control an SO-101 arm with a lerobot checkpoint, such as a fine-tuned SmolVLA.

uv run docs/examples/so101.py CHECKPOINT /dev/ttyACM0 "pick up the bowl"
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from vla_accel import OptimizedPolicy
from vla_accel.remote.underrun import Hold

HZ = 30


def observation(robot: Any, task: str) -> dict[str, Any]:
    """Return joints and cameras under the names of lerobot's datasets."""
    read = robot.get_observation()
    joints = [read[name] for name in robot.action_features]
    images = {f"observation.images.{name}": read[name] for name in robot.cameras}
    return {**images, "observation.state": np.array(joints, np.float32), "task": task}


def drive(robot: Any, policy: Any, task: str, seconds: float) -> Any:
    """Send one action per control period and return the runner's report."""
    # The actions are joint positions: if a chunk is late, the arm keeps the last ones.
    with policy.async_runner(hz=HZ, underrun=Hold(motion_dims=())) as runner:
        runner.start(observation(robot, task))
        tick = time.perf_counter()
        for _ in range(round(seconds * HZ)):
            action = runner.step(observation(robot, task))
            robot.send_action(dict(zip(robot.action_features, map(float, action), strict=True)))
            tick += 1 / HZ
            time.sleep(max(0.0, tick - time.perf_counter()))
        return runner.report()


if __name__ == "__main__":
    from lerobot.cameras.opencv import OpenCVCameraConfig
    from lerobot.robots.so_follower import SO101Follower, SO101FollowerConfig

    checkpoint, port, task = sys.argv[1:]
    cameras = {"front": OpenCVCameraConfig(index_or_path=0, width=640, height=480, fps=HZ)}
    arm = SO101Follower(SO101FollowerConfig(port=port, cameras=cameras))  # type: ignore[arg-type]
    arm.connect()
    try:
        print(drive(arm, OptimizedPolicy.from_pretrained(checkpoint), task, seconds=60))
    finally:
        arm.disconnect()
