"""The scripted expert of LIBERO: chooses the expert for the goal of a task.

It reads true poses and contacts, so it is a teacher and a yardstick, never a policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eval.libero.expert_basket import BasketExpert
from eval.libero.expert_bowl import BowlExpert
from eval.libero.expert_motion import Landmarks
from vla_accel.errors import ConfigError

if TYPE_CHECKING:
    from eval.libero.simulator import LiberoEnv


class Expert:
    """Plays libero_spatial and libero_object; one object serves any number of environments."""

    def __init__(self) -> None:
        self._bowl, self._basket = BowlExpert(), BasketExpert()

    def act(self, env: LiberoEnv) -> np.ndarray:
        """The action for the environment's present state: float32 (7,) in [-1, 1].

        Raises ConfigError if the task is neither "put bowl 1 on plate 1" nor "put a thing into the basket".
        """
        return self._of(env).act(env)

    def landmarks(self, env: LiberoEnv) -> Landmarks:
        """Where hand, thing, its place and the grasp are now. Raises as `act`."""
        return self._of(env).landmarks(env)

    def _of(self, env: LiberoEnv) -> BowlExpert | BasketExpert:
        goal = [[str(word).lower() for word in predicate] for predicate in env.goal]
        if goal == [["on", "akita_black_bowl_1", "plate_1"]]:
            return self._bowl
        if len(goal) == 1 and goal[0][0] == "in" and goal[0][2] == "basket_1_contain_region":
            return self._basket
        raise ConfigError(
            f"expert: expected the goal (on akita_black_bowl_1 plate_1) or (in … basket_1_contain_region), got {goal}"
        )
