# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["vla_accel[serve]"]
#
# [tool.uv.sources]
# vla_accel = { path = "../..", editable = true }
# ///
"""Request actions from a policy server with the keys of DROID, like openpi's example. On the GPU machine:

    vla-accel serve path/to/pi05_droid --host 0.0.0.0 --api-key-file keys

uv run docs/examples/droid_client.py ws://gpu-box:8000 keys "put the marker in the cup"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vla_accel.client import PolicyClient, read_key

EXECUTED = 8
"""Actions of a chunk to execute before the next request, as in openpi's example."""


def actions(policy: Any, read: Callable[[], dict[str, Any]], prompt: str) -> Iterator[np.ndarray]:
    """Yield joint velocities and gripper position (8,), one per control period of 1/15 s."""
    while True:
        seen = read()
        chunk = policy.infer(
            {
                "observation/exterior_image_1_left": seen["exterior"],  # uint8 (height, width, 3), RGB
                "observation/wrist_image_left": seen["wrist"],
                "observation/joint_position": seen["joints"],  # radians (7,)
                "observation/gripper_position": seen["gripper"],  # 0 open to 1 closed, (1,)
                "prompt": prompt,
            }
        )["actions"]
        yield from chunk[:EXECUTED]


def still_robot() -> dict[str, Any]:
    """Dummy robot with black images; replace it by yours."""
    picture = np.zeros((180, 320, 3), np.uint8)
    return {"exterior": picture, "wrist": picture, "joints": np.zeros(7), "gripper": np.zeros(1)}


if __name__ == "__main__":
    address, key_file, prompt = sys.argv[1:]
    with PolicyClient(address, api_key=read_key(key_file)) as client:
        for number, action in zip(range(30), actions(client, still_robot, prompt), strict=False):
            print(number, np.round(action, 3))
