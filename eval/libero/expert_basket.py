"""A scripted expert for libero_object: takes a thing from above, across its narrow side, and drops it into the basket.

How it moves: down a funnel onto the thing; with the thing in hand up to over the basket's wall, across, down into the
basket, where the fingers let go.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.libero.expert_motion import (
    ACTION_METRES,
    CLOSE,
    GAIN,
    OPEN,
    Arm,
    Landmarks,
    action,
    arm_of,
    label_geoms,
    limit,
    ramp,
    refresh,
    rest_rotation,
    rotation_vector,
    touching,
)

if TYPE_CHECKING:
    from eval.libero.simulator import LiberoEnv

# Lengths in metres, angles in radians.
WIDE = 0.074
"""Distance between the finger joints from which the gripper counts as open (fully open: 0.08)."""
UNDER_TOP = 0.020
"""How far below a thing's top the fingertips go, if it is that high."""
OVER_FLOOR = 0.012
CRUISE = 0.19
"""Bottom of the thing over the basket's origin while it is carried; the wall ends at 0.146."""
LET_GO = 0.11
"""Bottom of the thing over the basket's origin from which it may fall."""
TALLEST = 0.17
"""Height over the table at which the open hand's fingers pass over every thing."""
YAWS = {task: np.deg2rad(-20) for task in (1, 3, 5)}
"""By task, how far the hand turns from its rest pose, so that it does not hit the neighbouring object."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """What the expert looks at, world frame: the thing's lowest and highest corner (3,), the basket's origin (3,);
    `fingers`: how many of the two touch the thing."""

    arm: Arm
    low: np.ndarray
    high: np.ndarray
    basket: np.ndarray
    fingers: int

    @property
    def thing(self) -> np.ndarray:
        """Middle of the thing's box (3,)."""
        return (self.low + self.high) / 2

    @property
    def grasp(self) -> np.ndarray:
        """Where the fingertips take it (3,)."""
        return np.append(self.thing[:2], max(self.high[2] - UNDER_TOP, self.low[2] + OVER_FLOOR))


class BasketExpert:
    """Plays the ten tasks of libero_object."""

    def __init__(self) -> None:
        # Of the model last seen: which geoms are fingers and thing. Not a memory of the episode.
        self._geoms: tuple[Any, np.ndarray] | None = None

    def act(self, env: LiberoEnv) -> np.ndarray:
        """The action (7,) for the environment's present state."""
        return decide(self.look(env), YAWS.get(env.task.id, 0.0))

    def landmarks(self, env: LiberoEnv) -> Landmarks:
        """The thing, the basket, and where the fingertips go to take the thing."""
        scene = self.look(env)
        return Landmarks(scene.arm, scene.thing, scene.basket, scene.grasp)

    def look(self, env: LiberoEnv) -> Scene:
        """Read the scene."""
        refresh(env)
        model, data = env.model, env.data
        thing = env.body_id(str(env.goal[0][1]))
        if self._geoms is None or self._geoms[0] is not model:
            labels = label_geoms(model, {thing: 3})
            labels[(model.geom_contype == 0) & (model.geom_conaffinity == 0)] = 0
            self._geoms = model, labels
        labels = self._geoms[1]
        met, (low, high) = touching(env, labels), _box(model, data, np.flatnonzero(labels == 3))
        basket = data.xpos[env.body_id("basket_1")].copy()
        return Scene(arm_of(env), low, high, basket, len(met & {frozenset((1, 3)), frozenset((2, 3))}))


def decide(scene: Scene, yaw: float) -> np.ndarray:
    """The expert's action, float32 (7,), for a scene."""
    turn = rotation_vector(rest_rotation(yaw) @ scene.arm.rotation.T)
    to_basket = scene.basket[:2] - scene.thing[:2]
    distance, rise = float(np.linalg.norm(to_basket)), float(scene.low[2] - scene.basket[2])
    if distance < 0.03 and rise < LET_GO:
        move, gripper = _retreat(scene), OPEN
    elif scene.fingers == 2:
        move, gripper = _carry(to_basket, distance, rise), CLOSE
    else:
        move, gripper = _approach(scene, float(np.linalg.norm(turn)))
    return action(move, turn, gripper, scene.arm.elbow)


def _retreat(scene: Scene) -> np.ndarray:
    """Straight up once both fingers have let go: a hand that goes up earlier takes the thing along on one of them."""
    up = np.clip(scene.basket[2] + 0.30 - scene.arm.hand[2], 0.0, None)
    return np.array([0.0, 0.0, 0.0 if scene.fingers else min(GAIN * up / ACTION_METRES, 1.0)])


def _carry(to_basket: np.ndarray, distance: float, rise: float) -> np.ndarray:
    """Up to over the wall, across and down between the walls."""
    need = np.interp(distance, (0.015, 0.040, 0.10), (LET_GO - 0.02, CRUISE - 0.01, CRUISE))
    missing = need - rise
    move = np.append(limit(GAIN * to_basket / ACTION_METRES), GAIN * missing / ACTION_METRES)
    move[:2] *= 1.0 - ramp(missing, 0.02, 0.05)
    return move


def _approach(scene: Scene, turn: float) -> tuple[np.ndarray, float]:
    """Down the funnel onto the thing; returns the motion and whether to close."""
    width = scene.arm.width
    offset = scene.arm.hand - scene.grasp
    away, height = float(np.linalg.norm(offset[:2])), float(offset[2])

    # Closing starts within the inner tolerances and goes on within the outer ones: the opening itself is the
    # hysteresis. Fingers that have closed on nothing open again.
    begun = 1.0 - ramp(width, WIDE - 0.005, WIDE + 0.003)
    close = (
        away < 0.008 + 0.012 * begun
        and abs(height) < 0.008 + 0.012 * begun
        and width > 0.012
        and turn < 0.12 + 0.1 * begun
    )
    if close:
        return -offset * GAIN / ACTION_METRES, CLOSE

    over_all = max(0.09, TALLEST - float(scene.grasp[2]))
    funnel = np.interp(away, (0.005, 0.03, 0.08), (0.0, 0.07, over_all))
    shut = 0.05 * (1.0 - ramp(width, WIDE - 0.02, WIDE))
    turned = 0.07 * ramp(turn, 0.08, 0.2)
    missing = max(funnel, shut, turned) - height
    move = np.append(limit(-GAIN * offset[:2] / ACTION_METRES), np.clip(GAIN * missing / ACTION_METRES, -1.0, 1.0))
    move[:2] *= 1.0 - ramp(missing, 0.01, 0.04)
    return move, OPEN


def _box(model: Any, data: Any, geoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest corner (3,) of the box about some geoms, from their own boxes."""
    boxes, turns = model.geom_aabb[geoms], data.geom_xmat[geoms].reshape(-1, 3, 3)
    centres = data.geom_xpos[geoms] + np.einsum("gij,gj->gi", turns, boxes[:, :3])
    halves = np.einsum("gij,gj->gi", np.abs(turns), boxes[:, 3:])
    return (centres - halves).min(0), (centres + halves).max(0)
