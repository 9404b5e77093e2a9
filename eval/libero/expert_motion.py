"""How the scripted experts move the hand: the meaning of an action, and the recovery from a stretched pose.

An expert's action is a function of the simulator's present state alone: no phases, timers or memory. It can therefore
label any state that a learning policy gets itself into, and recovers from most.
"""

# MuJoCo ships no types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from eval.libero.simulator import LiberoEnv

OPEN, CLOSE = -1.0, 1.0

# Lengths in metres, angles in radians.
GAIN = 2.0
"""Share of a position error that one action corrects."""
ACTION_METRES = 0.05
ACTION_RADIANS = 0.5
"""Motion of an action of 1 (robosuite's OSC_POSE)."""
ROTATION_SLACK = 0.03
STRAIGHT = (-0.6, -0.25)
"""The fourth joint's angles between which the arm counts as more and more stretched; its limit is -0.07."""
UNLOCK = np.array([-0.3, 0.0, 0.2, 0.0, 0.7, 0.0])
"""Leads out of a stretched and twisted pose, where the controller pushes against the joint's limit and stays stuck."""
TILT = 0.057
"""The hand leans by this much in LIBERO's rest pose; keeping it makes the usual rotation action exactly zero."""


@dataclass(frozen=True)
class Arm:
    """The robot's own state: position (3,) and rotation (3, 3) of the hand in the world's frame, distance between the
    finger joints, angle of the fourth joint."""

    hand: np.ndarray
    rotation: np.ndarray
    width: float
    elbow: float


def refresh(env: LiberoEnv) -> None:
    """Bring poses and contacts up to date with qpos, which does not change the simulation."""
    import mujoco

    mujoco.mj_kinematics(env.model, env.data)
    mujoco.mj_comPos(env.model, env.data)
    mujoco.mj_collision(env.model, env.data)


def arm_of(env: LiberoEnv) -> Arm:
    """Read the robot's state."""
    data, site = env.data, env.gripper_site_id
    fingers = data.qpos[env.finger_addresses[0]]
    return Arm(
        hand=data.site_xpos[site].copy(),
        rotation=data.site_xmat[site].reshape(3, 3).copy(),
        width=float(fingers[0] - fingers[1]),
        elbow=float(data.qpos[env.arm_addresses[3]]),
    )


def action(move: np.ndarray, turn: np.ndarray, gripper: float, elbow: float) -> np.ndarray:
    """float32 (7,) in [-1, 1] of a motion (3,) in actions, a rotation vector (3,) still to turn, and the gripper."""
    # A stretched arm is normal at the far end of the table; it is stuck only when the hand is also turned away.
    locked = ramp(elbow, *STRAIGHT) * ramp(float(np.linalg.norm(turn)), 0.08, 0.12)
    arm = (1.0 - locked) * np.concatenate((move, rotate(turn))) + locked * UNLOCK
    return np.append(np.clip(arm, -1.0, 1.0), gripper).astype(np.float32)


def travel(way: np.ndarray, missing: float, low: float, high: float) -> np.ndarray:
    """The motion (3,) in actions along `way` (2,), and up by `missing`. The more height is missing, from `low` to
    `high`, the more the horizontal motion waits."""
    move = np.append(limit(GAIN * way / ACTION_METRES), GAIN * missing / ACTION_METRES)
    move[:2] *= 1.0 - ramp(missing, low, high)
    return move


def rotate(turn: np.ndarray) -> np.ndarray:
    # Zero within the slack: then the controller keeps its own orientation goal, which is steadier than correcting.
    angle = float(np.linalg.norm(turn))
    if angle <= ROTATION_SLACK:
        return np.zeros(3)
    wanted = turn * (angle - ROTATION_SLACK) / angle
    return limit(GAIN * wanted / ACTION_RADIANS, 0.5)


def rest_rotation(yaw: float) -> np.ndarray:
    """The hand's rotation in LIBERO's rest pose, turned about the vertical."""
    c, s = np.cos(yaw), np.sin(yaw)
    ct, st = np.cos(TILT), np.sin(TILT)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]]) @ np.array(
        [[0.0, ct, -st], [1.0, 0.0, 0.0], [0.0, -st, -ct]]
    )


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    angle = np.arccos(np.clip((np.trace(rotation) - 1.0) / 2.0, -1.0, 1.0))
    if angle < 1e-6:
        return np.zeros(3)
    axis = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    return axis * angle / max(2.0 * np.sin(angle), 1e-6)


def limit(vector: np.ndarray, longest: float = 1.0) -> np.ndarray:
    """Shorten to at most `longest`, keeping the direction."""
    return vector * (longest / max(longest, float(np.linalg.norm(vector))))


def ramp(value: float, low: float, high: float) -> float:
    """0 below `low`, 1 above `high`, linear between."""
    return float(np.clip((value - low) / (high - low), 0.0, 1.0))


def touching(env: LiberoEnv, labels: np.ndarray) -> set[frozenset[int]]:
    """Pairs of labelled geoms that are in contact; `labels` (ngeom,) as `label_geoms` makes them."""
    pairs = labels[env.data.contact.geom]
    return {frozenset(pair) for pair in pairs[(pairs > 0).all(axis=1)].tolist()}


def label_geoms(model: Any, bodies: Mapping[int, int]) -> np.ndarray:
    """Per geom (ngeom,): 1 and 2 the fingers, else the label of the nearest of `bodies` that it is part of, else 0."""
    labels = np.zeros(model.ngeom, dtype=np.int64)
    for geom in range(model.ngeom):
        body = int(model.geom_bodyid[geom])
        while body and not labels[geom]:
            name = model.body(body).name
            if name.endswith(("leftfinger", "finger_joint1_tip")):
                labels[geom] = 1
            elif name.endswith(("rightfinger", "finger_joint2_tip")):
                labels[geom] = 2
            else:
                labels[geom] = bodies.get(body, 0)
            body = int(model.body_parentid[body])
    return labels
