"""Plays one episode after the other in this process, keeping the environment of the current task."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from eval.harness.benchmark import Benchmark, Environment, Task
from eval.harness.figures import VideoRecorder, write_video
from eval.harness.policies import PolicySource
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import Actor, EpisodeResult, run_episode
from vla_accel import machine
from vla_accel.view import OFF, View

PACKAGES = ("numpy", "imageio-ffmpeg")
VIDEO_EVERY = 2  # actions between two frames


@dataclass(frozen=True)
class Setup:
    """What a process needs to play episodes; travels to workers.

    Attributes:
        threads: for torch in a worker with its own policy; None leaves torch's default.
        video_folder: where videos of the episodes `video_keys` go, or None for none.
        video_every: actions between two frames.
        view: shows the episodes; only for episodes in the process that opened it.
    """

    benchmark: Benchmark
    protocol: Protocol
    source: PolicySource
    threads: int | None = None
    video_folder: Path | None = None
    video_keys: frozenset[EpisodeKey] = frozenset()
    video_every: int = VIDEO_EVERY
    view: View = OFF


def software(benchmark: Benchmark) -> dict[str, str]:
    """Versions on this machine that an episode depends on; a missing optional package has none."""
    versions = dict(machine.software())
    for name in (*benchmark.packages, *PACKAGES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


class Runner:
    """Plays episodes with one actor.

    Args:
        setup: what is played, and the rules.
        actor: who drives the arm.

    Raises (from `run`):
        SimulatorError: the environment cannot be built. Crashes later on are in the result.
    """

    def __init__(self, setup: Setup, actor: Actor) -> None:
        self._setup = setup
        self._actor = actor
        self._suites = {name: setup.benchmark.load_suite(name) for name in setup.protocol.suites}
        self._task: Task | None = None
        self._env: Environment | None = None

    def run(self, key: EpisodeKey) -> EpisodeResult:
        """Play one episode, and film it if it is among `video_keys`."""
        setup, folder = self._setup, self._setup.video_folder
        suite = setup.protocol.suite_of(key)
        task = self._suites[suite].tasks[key.task_id]
        env = self._environment(task, key)
        recorder = None
        if folder is not None and key in setup.video_keys:
            recorder = VideoRecorder(
                setup.benchmark.cameras, every=setup.video_every, control_hz=setup.benchmark.control_hz
            )
        idle = setup.benchmark.idle
        setup.view.began(f"{suite}, {key}: {task.instruction}")
        shown = {"recorder": recorder, "view": setup.view}
        result = run_episode(env, task, self._actor, key, setup.protocol, **shown, idle=idle)
        if result.error:
            self.close()  # its simulator may be broken: the next episode gets a new one
        if folder is not None and recorder is not None and recorder.frames:
            video = write_video(recorder, folder / video_name(suite, key))
            result = replace(result, video=video.name)
        return result

    def close(self) -> None:
        """Free the environment; the next episode builds a new one."""
        env, self._env, self._task = self._env, None, None
        if env is not None:
            env.close()

    def _environment(self, task: Task, key: EpisodeKey) -> Environment:
        if self._env is None or self._task is not task:
            self.close()
            setup = self._setup
            films = any(other.task == key.task for other in setup.video_keys)
            stress = {n: v for n, v in setup.protocol.stress.items() if n in setup.benchmark.stresses}
            settings = {**setup.protocol.settings, **stress}
            self._env = setup.benchmark.make_environment(task, settings, films or self._actor.looks)
            self._task = task
            self._actor.warm_up(task.instruction)
        return self._env


def video_name(suite: str, key: EpisodeKey) -> str:
    """The name of an episode's film, without its suffix."""
    steps = "" if key.steps is None else f"-steps{key.steps}"
    return f"{suite}-task{key.task_id}-trial{key.trial}{steps}"
