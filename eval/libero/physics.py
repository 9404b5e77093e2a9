"""Simulate an action in less time, with bit-identical results.

robosuite executes an action in 25 physics steps. In each it computes the state's derivatives three times (before the
controller, in the controller, in the step itself) though positions and velocities change once, looks the same names up,
polls observables that are off, and judges the goal twice at the end. Here what has not changed is not computed again.
"""

# MuJoCo ships no types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def quickened(inner: Any) -> Iterator[None]:
    """For one `step` of robosuite's environment `inner`, in which nothing but its physics steps moves or remodels
    anything, and no observable is turned on or off. The reward is 0."""
    import mujoco
    from robosuite.controllers.base_controller import Controller

    model, data = inner.sim.model._model, inner.sim.data._data
    robot, velocities = inner.robots[0], mujoco.mjtStage.mjSTAGE_VEL
    enabled = [observable for observable in inner._observables.values() if observable.is_enabled()]
    controller, nv = robot.controller, model.nv
    site = model.site(controller.eef_name).id
    along, around, masses = np.empty((3, nv)), np.empty((3, nv)), np.empty((nv, nv))
    current = False
    """Whether the derived quantities belong to the current positions and velocities."""

    def forward() -> None:
        nonlocal current
        if current:
            # Actuators may have other commands, and the solver begins where it ended.
            mujoco.mj_forwardSkip(model, data, velocities, False)
        else:
            mujoco.mj_forward(model, data)
        current = True

    def step(with_udd: bool = True) -> None:
        nonlocal current
        # As mj_step has it.
        mujoco.mj_checkPos(model, data)
        mujoco.mj_checkVel(model, data)
        forward()
        mujoco.mj_checkAcc(model, data)
        mujoco.mj_Euler(model, data)
        current = False

    def update(force: bool = False) -> None:
        if not (controller.new_update or force):
            return
        inner.sim.forward()
        mujoco.mj_jacSite(model, data, along, around, site)
        mujoco.mj_fullM(model, masses, data.qM)
        joints, dofs = controller.qpos_index, controller.qvel_index
        controller.ee_pos = np.array(data.site_xpos[site])
        controller.ee_ori_mat = np.array(data.site_xmat[site].reshape(3, 3))
        controller.ee_pos_vel, controller.ee_ori_vel = np.dot(along, data.qvel), np.dot(around, data.qvel)
        controller.joint_pos, controller.joint_vel = np.array(data.qpos[joints]), np.array(data.qvel[dofs])
        controller.J_pos, controller.J_ori = np.array(along[:, dofs]), np.array(around[:, dofs])
        controller.J_full = np.array(np.vstack([controller.J_pos, controller.J_ori]))
        controller.mass_matrix = masses[dofs, :][:, dofs]
        controller.new_update = False

    def pre_action(action: Any, policy_step: bool = False) -> None:
        robot.control(action, policy_step=policy_step)

    def update_observables(force: bool = False) -> None:
        for observable in enabled:
            observable.update(timestep=inner.model_timestep, obs_cache=inner._obs_cache, force=force)

    with contextlib.ExitStack() as stack:
        euler = model.opt.integrator == mujoco.mjtIntegrator.mjINT_EULER
        if euler and not model.opt.enableflags:  # which are further parts of mj_step
            _replaced(stack, inner.sim, forward=forward, step=step)
        if type(controller).update is Controller.update:
            _replaced(stack, controller, update=update)
        _replaced(
            stack, inner, reward=lambda action=None: 0.0, _pre_action=pre_action, _update_observables=update_observables
        )
        yield


def _replaced(stack: contextlib.ExitStack, thing: Any, **methods: Any) -> None:
    """An object's own methods in the place of its class's, until the stack is left."""
    for name, method in methods.items():
        assert name not in vars(thing), name
        setattr(thing, name, method)
        stack.callback(delattr, thing, name)
