"""A process that plays episodes and labels what it sees: demonstrations and corrections (DAgger).

Every `REPLAN` actions it sends the observation, records the expert's next ten actions as the label, undoes them, and
then executes the expert's actions with noise, the policy's, or a mixture. It knows nothing about models: observations
go out and action chunks come back over a pipe. Trials start from held-out states, without noise or labels.
"""

from __future__ import annotations

import itertools
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from eval.demo.settings import TASKS, TrainConfig

HORIZON, REPLAN = 10, 5
AUX_DIM = 13
"""Privileged targets: see `privileged`."""


def privileged(env: Any, expert: Any) -> np.ndarray:
    """Targets of the training-only auxiliary loss, float32 (AUX_DIM,), metres times 10.

    The thing to move, its place and the grasp relative to the end effector (9), the thing (3), the gripper's opening.
    """
    seen = expert.landmarks(env)
    hand, thing = seen.arm.hand, seen.thing
    parts = (thing - hand, seen.place - hand, seen.grasp - hand, thing - (0.0, 0.0, 1.0), [seen.arm.width * 4])
    return np.concatenate(parts).astype(np.float32) * 10


def expert_chunk(env: Any, expert: Any) -> np.ndarray:
    """The expert's next `HORIZON` actions from here, float32 (HORIZON, 7); the simulation is put back."""
    restore = env.save_state()
    actions = np.empty((HORIZON, 7), np.float32)
    for i in range(HORIZON):
        actions[i] = expert.act(env)
        env.step(actions[i])
    restore()
    return actions


def collector(connection: Connection, index: int, tasks: list[int], config: TrainConfig, egl_device: int) -> None:
    """Play episodes until the pipe closes; render on GPU `egl_device`, unless it is negative. Messages out:

    ("look", images uint8 (2, 224, 224, 3), state (8,), task id), answered by (action chunk (10, 7) or None, share of
    policy episodes in [0, 1]) when it has one; ("label", (actions (10, 7), privileged (13,)) or None in a trial) after
    each look, before the answer is read; ("end", task id, mode, success, steps) after an episode; ("error", text) if it
    crashed.
    """
    try:
        _collect(connection, index, tasks, config, egl_device)
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        # The trainer is gone. Not an ordinary exit: EGL's own shutdown races with MuJoCo's and prints pages.
        os._exit(0)
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        raise


def _collect(connection: Connection, index: int, tasks: list[int], config: TrainConfig, egl_device: int) -> None:
    if egl_device >= 0:
        os.environ["MUJOCO_EGL_DEVICE_ID"] = str(egl_device)
    # After the device is chosen: importing the simulator starts its GL.
    from eval.libero.expert import Expert
    from eval.libero.simulator import LiberoEnv
    from eval.libero.suites import load_suite

    rng = np.random.default_rng([config.seed, index])
    suites = [load_suite(name) for name in config.suites]
    envs: dict[int, tuple[Any, Any]] = {}
    share = 0.0
    for task_id in itertools.cycle(tasks):
        suite = suites[task_id // TASKS]
        if task_id not in envs:
            envs[task_id] = LiberoEnv(suite.tasks[task_id % TASKS], render=True), Expert()
        env, expert = envs[task_id]
        mode = "expert"
        if rng.random() < share:
            mode = str(rng.choice(("policy", "mixed"), p=(0.7, 0.3)))
        if share and config.held_out and rng.random() < config.trial_share:
            mode = "trial"
        noise = config.noise * rng.choice((0.0, 0.5, 1.0)) if mode == "expert" else 0.0
        with np.load(config.start_states(task_id, held_out=mode == "trial")) as content:
            starts = content["states"]
        env.reset_to(starts[rng.integers(len(starts))])
        steps = 0
        while steps < suite.max_steps and not env.success:
            seen = env.observation()
            images = np.stack((seen["observation/image"], seen["observation/wrist_image"]))
            connection.send(("look", images, seen["observation/state"], task_id))
            label = None if mode == "trial" else (expert_chunk(env, expert), privileged(env, expert))
            connection.send(("label", label))
            chunk, share = connection.recv()
            follows_expert = mode == "expert" or (mode == "mixed" and rng.random() < 0.5)
            planned = None if follows_expert else chunk
            # A burst of noise in the middle of a policy's episode reaches states it would rarely visit itself.
            burst = mode in ("policy", "mixed") and rng.random() < 0.08
            for i in range(REPLAN):
                action = np.array(expert.act(env) if planned is None else planned[i], np.float64)
                if noise or burst:
                    action[:3] += rng.normal(0, noise or 0.6, 3)
                env.step(np.clip(action, -1, 1), look=i == REPLAN - 1)
                steps += 1
                if env.success:
                    break
        connection.send(("end", task_id, mode, bool(env.success), steps))
