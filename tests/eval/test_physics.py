"""A quickened step of the simulator is robosuite's own, to the bit: a state that differs in the last place is seen."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("libero", reason="needs LIBERO")

from eval.libero import simulator
from eval.libero.physics import quickened
from eval.libero.simulator import LiberoEnv
from eval.libero.suites import load_suite

SUITE = load_suite("libero_spatial")


def played(task: int, *, render: bool, steps: int) -> list[np.ndarray]:
    """All that an episode of random actions leaves in the simulation after each, and what is observed."""
    env, found = LiberoEnv(SUITE.tasks[task], render=render), []
    rng = np.random.default_rng(task)
    env.reset_to(SUITE.tasks[task].start_states[0], seed=(7, task))
    for i in range(steps):
        action = rng.uniform(-0.8, 0.8, 7) - [0, 0, 0.4, 0, 0, 0, 0]  # down, to where things touch
        look = render and i % 7 == 3
        won, data = env.step(action, look=look), env.data
        derived = (data.xpos.ravel(), data.qacc, data.sensordata, data.actuator_force, [won, data.time, data.ncon])
        found.append(np.concatenate([data.qpos, data.qvel, data.ctrl, data.qacc_warmstart, *derived]))
        if look:
            found += [value.astype(float).ravel() for value in env.observation().values()]
    env.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("task", "render", "steps"), [(0, True, 12), (4, False, 60), (7, False, 40)])
def test_a_step_is_robosuites_own(task: int, render: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = played(task, render=render, steps=steps)
    monkeypatch.setattr(simulator, "quickened", lambda inner: contextlib.nullcontext())
    plain = played(task, render=render, steps=steps)
    assert len(quick) == len(plain) >= steps
    for i, (one, other) in enumerate(zip(quick, plain, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"{i}")


@pytest.mark.slow
def test_nothing_stays_replaced() -> None:
    """Also after an error: what follows may move things by other means than physics steps."""
    env = LiberoEnv(SUITE.tasks[0], render=False)
    env.reset_to(SUITE.tasks[0].start_states[0], seed=(7, 0))
    inner: Any = env._env.env
    places = (inner, inner.sim, inner.robots[0].controller)
    before = [set(vars(place)) for place in places]
    with pytest.raises(ZeroDivisionError), quickened(inner):
        assert all(set(vars(place)) > names for place, names in zip(places, before, strict=True))
        raise ZeroDivisionError
    assert [set(vars(place)) for place in places] == before
    env.close()
