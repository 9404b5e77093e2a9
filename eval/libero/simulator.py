"""LIBERO tasks behind openpi's evaluation protocol (`examples/libero/main.py`), one task at a time.

Renders only with `look=True`: software rendering takes ten times as long as the physics. An observation
shows what the plain `env.step` observation shows, which robosuite samples in the *first* of the 25 physics
steps of an action; images and proprioception are therefore 48 ms older than the state the step ends in.
"""

# MuJoCo ships no types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.libero.install import GL_HELP, choose_gpu, libero
from eval.libero.physics import quickened
from eval.libero.suites import LiberoTask
from vla_accel.errors import ObservationError, SimulatorError

IMAGE_SIZE = 224
CAMERAS = {
    "observation/image": "agentview_image",
    "observation/wrist_image": "robot0_eye_in_hand_image",
}
"""openpi's key to robosuite's."""
STATE = "observation/state"
_XVLA_TURNS = dict(zip(CAMERAS.values(), (-1, 1), strict=True))
"""Steps along rows and columns of each camera's image."""
PROPRIO = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
"""robosuite's keys: end effector xyz, its quaternion (x, y, z, w), the two fingers."""
RESOLUTION = 256
"""Camera width and height in pixels, before images are resized for the policy."""
WAIT_STEPS = 10
"""Actions that do nothing, executed first while the objects settle."""
WAIT_ACTION = np.array([0.0] * 6 + [-1.0])
"""No motion, gripper open."""
THIRD_PERSON = "agentview"
"""LIBERO's name of the third-person camera; the other camera is on the hand."""
SEED = 7
"""Seed of a new environment until its first reset with a seed."""


def to_openpi(observation: dict[str, np.ndarray], size: int = IMAGE_SIZE) -> dict[str, np.ndarray]:
    """A LIBERO observation in openpi's form: images turned by 180 degrees and `size` a side, state (8,) float64."""
    seen = {key: resize_with_pad(observation[name][::-1, ::-1], size) for key, name in CAMERAS.items()}
    position, quaternion, fingers = (observation[name] for name in PROPRIO)
    seen[STATE] = np.concatenate((position, quaternion_to_axis_angle(quaternion), fingers))
    return seen


def to_xvla(observation: dict[str, np.ndarray], rotation: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """A LIBERO observation in X-VLA's form: the wrist's image is not turned; state (20,) float64 of the position, the
    first two columns of the controller's `rotation` (3, 3), and zeros."""
    third, wrist = (resize_with_pad(observation[name][::turn, ::turn], size) for name, turn in _XVLA_TURNS.items())
    state = np.concatenate((observation[PROPRIO[0]], rotation[:, 0], rotation[:, 1], np.zeros(11)))
    return {**dict(zip(CAMERAS, (third, wrist), strict=True)), STATE: state}


def example(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What a policy sees with these settings of an environment, in black: for warming it up."""
    size = settings.get("image_size", IMAGE_SIZE)
    images = {key: np.zeros((size, size, 3), np.uint8) for key in CAMERAS}
    return {**images, STATE: np.zeros(20 if settings.get("absolute") else 8)}


def quaternion_to_axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """(x, y, z, w) to axis times angle, in [0, 2 pi): q and -q differ, as in openpi's `_quat2axisangle`."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3]) * 2.0 * math.acos(w) / sine


def resize_with_pad(image: np.ndarray, size: int = IMAGE_SIZE) -> np.ndarray:
    """Fit a uint8 (H, W, 3) image into (size, size, 3): bilinear, aspect kept, black borders."""
    from PIL import Image

    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return np.ascontiguousarray(image)
    ratio = max(width / size, height / size)
    inner = Image.fromarray(np.ascontiguousarray(image)).resize(
        (int(width / ratio), int(height / ratio)), resample=Image.Resampling.BILINEAR
    )
    outer = Image.new(inner.mode, (size, size), 0)
    outer.paste(inner, (max(0, (size - inner.width) // 2), max(0, (size - inner.height) // 2)))
    return np.asarray(outer)


class LiberoEnv:
    """One environment of one task, whose creation takes 2 to 4 s.

    Args:
        image_size: pixels along a side of an observed image, of the `resolution` that is rendered.
        render: without it there are no images and no rendering context.
        camera: metres by which the third-person camera is moved, in a new direction in each episode.
        absolute: actions are poses in the world's frame, position and axis-angle, and observations are X-VLA's; the
            actions of `wait_steps` are steps in either case.

    Raises DependencyError without a working libero, SimulatorError without an OpenGL library.
    """

    def __init__(
        self,
        task: LiberoTask,
        *,
        resolution: int = RESOLUTION,
        image_size: int = IMAGE_SIZE,
        wait_steps: int = WAIT_STEPS,
        render: bool = True,
        hard_reset: bool = False,
        camera: float = 0.0,
        absolute: bool = False,
    ) -> None:
        self.task, self.absolute = task, absolute
        self._camera, self._image_size, self._wait_steps, self._render = camera, image_size, wait_steps, render
        self._observation: dict[str, np.ndarray] | None = None
        self.success = False
        self._episode = 0
        control_env = libero().ControlEnv
        if render:
            choose_gpu()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self._env = control_env(
                    bddl_file_name=str(task.bddl_path),
                    has_offscreen_renderer=render,
                    use_camera_obs=render,
                    hard_reset=hard_reset,
                    camera_heights=resolution,
                    camera_widths=resolution,
                    # The step limit is the caller's: robosuite's own horizon must not end an episode.
                    ignore_done=True,
                )
        except (ImportError, OSError, RuntimeError) as error:
            if not render:
                raise
            raise SimulatorError(
                f"cannot start LIBERO's renderer (MUJOCO_GL={os.environ.get('MUJOCO_GL')!r}): {error}. {GL_HELP}"
            ) from error
        self._env.seed(SEED)
        self._camera_place = self.model.camera(THIRD_PERSON).pos.copy()
        # robosuite polls every observable in each of the 25 physics steps of an action; nothing else reads them.
        for name, observable in self._env.env._observables.items():
            if name not in PROPRIO:
                observable.set_enabled(False)
                observable.set_active(False)

    def reset_to(self, start_state: np.ndarray, *, seed: Sequence[int] | None = None) -> dict[str, np.ndarray] | None:
        """Start an episode at a MuJoCo state, float (D,): flattened (time, qpos, qvel); let the objects settle for
        `wait_steps`. Returns the first observation (None without renderer).

        Cabinets and stoves are not part of that state: the reset draws their places anew, within 1.5 cm, from NumPy's
        global generator. openpi seeds it once, so an episode depends on how many came before it; `seed` seeds it here
        and makes the episode repeatable by itself.
        """
        expected = 1 + self.model.nq + self.model.nv
        start_state = np.asarray(start_state, dtype=np.float64)
        if start_state.shape != (expected,):
            raise ObservationError(
                f"start state of {self.task.name}: expected shape ({expected},), got {start_state.shape}"
            )
        if seed is not None:
            self._env.seed(list(seed))
        self.sample_placement()
        self._env.set_init_state(start_state)
        if self._camera:
            self._move_camera(np.random.default_rng(None if seed is None else [*seed, 3]))
        self.controller.use_delta = True
        for i in range(self._wait_steps):
            self.step(WAIT_ACTION, look=self._render and i == self._wait_steps - 1)
        self.controller.use_delta = not self.absolute
        return self._observation

    def sample_placement(self) -> np.ndarray:
        """Reset with a newly sampled placement of the objects; returns the flattened state, float64 (D,).

        Only an environment made with `hard_reset=True` samples as the benchmark does: a soft reset adds the offsets
        of stacked objects once more each time. (`reset_to` may reset softly, because it overwrites the placement.)
        """
        with contextlib.redirect_stdout(sys.stderr):
            self._env.reset()
        # A hard reset makes a new gripper; a soft one would hand the old one's command on to the next episode.
        gripper = self._env.env.robots[0].gripper
        gripper.current_action = np.zeros(gripper.dof)
        self._observation, self.success = None, False
        self._episode += 1
        return self._env.get_sim_state().copy()

    def step(self, action: np.ndarray, *, look: bool = False) -> bool:
        """Execute one action: float (7,), xyz / axis-angle deltas in [-1, 1], or an absolute pose, and gripper (-1
        open, 1 closed). Returns whether the goal holds now; only with `look` is there an observation afterwards."""
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (7,) or not np.isfinite(action).all():
            raise ObservationError(f"action: expected 7 finite numbers, got {action}")
        if look and not self._render:
            raise SimulatorError("step(look=True): this environment was made with render=False")
        if look:
            self._enable_cameras(True)
        with quickened(self._env.env):
            observation, _, done, _ = self._env.step(action)
        self.success = bool(done)
        self._observation = None
        if look:
            self._enable_cameras(False)
            self._observation = (
                to_xvla(observation, self.controller.ee_ori_mat, self._image_size)
                if self.absolute
                else to_openpi(observation, self._image_size)
            )
        return self.success

    def observation(self) -> dict[str, np.ndarray]:
        """The observation of the last step, with openpi's keys but for `prompt`.

        `observation/image`, `observation/wrist_image` uint8 (image_size, image_size, 3); `observation/state` float64
        (8,), of X-VLA (20,).
        """
        if self._observation is None:
            raise SimulatorError("observation(): the last step rendered no images; call step(action, look=True) first")
        return self._observation

    def present_pose(self) -> np.ndarray:
        """The absolute action (7,) that keeps the hand where it is, with an open gripper."""
        import mujoco

        quaternion, turn = np.empty(4), np.empty(3)
        mujoco.mju_mat2Quat(quaternion, self.controller.ee_ori_mat.ravel())
        mujoco.mju_quat2Vel(turn, quaternion, 1.0)
        return np.concatenate((self.controller.ee_pos, turn, WAIT_ACTION[-1:]))

    def close(self) -> None:
        """Free the simulation and its rendering context."""
        self._env.close()

    def save_state(self) -> Callable[[], None]:
        """Capture the simulation; the returned function undoes what follows, within this episode. The same actions then
        give the same trajectory."""
        import mujoco

        spec, episode = mujoco.mjtState.mjSTATE_INTEGRATION, self._episode
        physics = np.empty(mujoco.mj_stateSize(self.model, spec))
        mujoco.mj_getState(self.model, self.data, physics, spec)
        inner = self._env.env
        robot = inner.robots[0]
        controller = _plain(self.controller)
        gripper = np.array(robot.gripper.current_action, dtype=np.float64)
        environment = {k: getattr(inner, k) for k in ("timestep", "cur_time", "done")}
        names = ("_time_since_last_sample", "_sampled", "_current_observed_value")
        observables = {k: {n: copy.copy(getattr(o, n)) for n in names} for k, o in inner._observables.items()}
        success, observation = self.success, self._observation

        def restore() -> None:
            if episode != self._episode:
                raise SimulatorError("restore: the state was saved before the last reset")
            mujoco.mj_setState(self.model, self.data, physics, spec)
            vars(self.controller).update(copy.deepcopy(controller))
            robot.gripper.current_action = gripper.copy()
            vars(inner).update(environment)
            for name, values in observables.items():
                vars(inner._observables[name]).update({n: copy.copy(value) for n, value in values.items()})
            self.success, self._observation = success, observation
            # Derived quantities for readers. Positions only: a full forward pass would move the solver's warm start.
            mujoco.mj_kinematics(self.model, self.data)

        return restore

    # -- privileged access, for scripted experts ----------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The raw `mujoco.MjModel`."""
        return self._env.sim.model._model

    @property
    def data(self) -> Any:
        """The raw `mujoco.MjData`. Poses derived from qpos are one physics step (2 ms) old after `step`."""
        return self._env.sim.data._data

    @property
    def controller(self) -> Any:
        """robosuite's controller of the hand's pose. Its `ee_pos` (3,) and `ee_ori_mat` (3, 3) are those of the last
        physics step."""
        return self._env.env.robots[0].controller

    @property
    def goal(self) -> list[list[str]]:
        """The goal's predicates, e.g. `[["on", "akita_black_bowl_1", "plate_1"]]`."""
        return self._env.env.parsed_problem["goal_state"]

    def body_id(self, name: str) -> int:
        """MuJoCo's body of an object or fixture named as in the task description."""
        return self._env.env.obj_body_id[name]

    @property
    def gripper_site_id(self) -> int:
        """MuJoCo's site between the fingertips: the end effector whose position actions move."""
        return self._env.env.robots[0].eef_site_id

    @property
    def finger_addresses(self) -> tuple[list[int], list[int]]:
        """Addresses of the two finger joints in qpos and in qvel."""
        robot = self._env.env.robots[0]
        return robot._ref_gripper_joint_pos_indexes, robot._ref_gripper_joint_vel_indexes

    @property
    def arm_addresses(self) -> list[int]:
        """Addresses of the seven arm joints in qpos, base first."""
        return self._env.env.robots[0]._ref_joint_pos_indexes

    @property
    def object_qpos(self) -> dict[str, int]:
        """Where each movable object's pose (xyz, quaternion wxyz) starts in qpos."""
        inner = self._env.env
        return {
            name: int(self.model.jnt_qposadr[self.model.body_jntadr[inner.obj_body_id[name]]])
            for name in inner.objects_dict
        }

    def _move_camera(self, rng: np.random.Generator) -> None:
        # A generator of its own: NumPy's global one places what the start state leaves open.
        direction = rng.standard_normal(3)
        moved = self._camera * direction / np.linalg.norm(direction)
        self.model.camera(THIRD_PERSON).pos[:] = self._camera_place + moved

    def _enable_cameras(self, on: bool) -> None:
        clock = self._env.env._observables[PROPRIO[0]]
        for name in CAMERAS.values():
            camera = self._env.env._observables[name]
            camera.set_enabled(on)
            camera.set_active(on)
            # Run the camera on the clock of the observables that were never off: it then samples when they do.
            camera._time_since_last_sample, camera._sampled = clock._time_since_last_sample, clock._sampled


def _plain(thing: Any) -> dict[str, Any]:
    """The attributes of an object that are numbers, arrays or None: its memory, without its references."""
    kinds = (bool, int, float, np.ndarray, np.generic, type(None))
    return {k: copy.deepcopy(v) for k, v in vars(thing).items() if isinstance(v, kinds)}
