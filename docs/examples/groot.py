# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["vla_accel[groot]"]
#
# [tool.uv.sources]
# vla_accel = { path = "../..", editable = true }
# ///
"""Run GR00T on the nested observations of Isaac-GR00T (video, state, language).

uv run docs/examples/groot.py nvidia/GR00T-N1.7-LIBERO/libero_10 "put the bowl on the plate"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_accel import OptimizedPolicy


def flat(nested: Mapping[str, Mapping[str, Any]], policy: OptimizedPolicy) -> dict[str, Any]:
    """Convert an observation of Isaac-GR00T's Gr00tPolicy (one robot, one time step) to the keys of this policy.

    `nested` has the cameras and the parts of the state in the checkpoint's order: video (1, 1, height, width, 3) uint8,
    state (1, 1, n), language [[text]].
    """
    robot = policy.metadata["robot"]
    (prompt_key,) = policy.processor.example().keys() - {*robot["images"], *robot["state"]}
    images = [frames[0, -1] for frames in nested["video"].values()]
    state = np.concatenate([values[0, -1] for values in nested["state"].values()])
    (task,) = nested["language"].values()
    return {**dict(zip(robot["images"], images, strict=True)), robot["state"][0]: state, prompt_key: task[0][0]}


if __name__ == "__main__":
    checkpoint, task = sys.argv[1:]
    policy = OptimizedPolicy.from_pretrained(checkpoint)
    black = np.zeros((1, 1, 256, 256, 3), np.uint8)
    observation = {
        "video": {"image": black, "wrist_image": black},
        "state": {"pose": np.zeros((1, 1, 6), np.float32), "gripper": np.zeros((1, 1, 2), np.float32)},
        "language": {"annotation.human.action.task_description": [[task]]},
    }
    result = policy.infer(flat(observation, policy))
    print(result["actions"].shape, result["policy_timing"])
