"""The exact flow of recorded observations, and the errors of actions that end elsewhere.

The flow is dx/dt = v(x, t) from noise at t = 1 to actions at t = 0. Every schedule starts from the same noise in FP32
eager, so that an error is the schedule's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError, ObservationError, of_one
from vla_accel.families.loading import base_and_lora, family_of, load
from vla_accel.machine import resolve_device
from vla_accel.measure.parity import reference_of
from vla_accel.nn.flow import Schedule
from vla_accel.policy import OptimizedPolicy
from vla_accel.progress import counted

BATCH = 16
"""Observations at most whose velocity is evaluated at once."""
FINE = 200
"""Euler steps of the finest grid of the exact flow."""
BINARY = 0.05
"""A dimension of the action is binary if a smaller share of its values lies in the middle half of their range."""


class Flow(Protocol):
    """A flow from fixed noise for N observations. `motion_dims`: dimensions of the robot's action that are a velocity
    or a step, and so never binary."""

    motion_dims: tuple[int, ...]

    def integrate(self, schedule: Schedule) -> np.ndarray:
        """Return the normalized actions float64 (N, H, A) at the end of the schedule's Euler steps."""
        ...

    def robot(self, actions: np.ndarray) -> np.ndarray:
        """Convert normalized actions to the robot's, float64 (N, H, R)."""
        ...


def exact_policy(checkpoint: str, settings: PolicyConfig) -> OptimizedPolicy:
    """Return a checkpoint as an FP32 eager policy with its own denoising steps and all weights in memory. Raises
    ConfigError for a model without a flow."""
    family = family_of(base_and_lora(checkpoint, settings.checkpoint.lora)[0])
    settings = replace(settings, num_steps=None, schedule=None)
    found = load(checkpoint, settings, device=resolve_device(settings.device), dtype=torch.float32)
    if not family.has_flow(found.model.config):
        raise ConfigError(f"flow: expected a model whose steps integrate a flow, got {family.name}")
    return reference_of(settings, found)


class PolicyFlow:
    """The flow of a policy. The prefix of every observation is computed once."""

    def __init__(
        self, policy: OptimizedPolicy, observations: Sequence[Mapping[str, Any]], *, seed: int = 0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Run an FP32 eager policy on each observation. Raises ObservationError for observations of another robot."""
        preset = getattr(policy.processor, "preset", None)
        self.motion_dims: tuple[int, ...] = () if preset is None else preset.motion_dims or ()
        self._policy, self._inputs = policy, []
        for index, one in enumerate(observations):
            with of_one(index, len(observations)):
                self._inputs.append(policy.processor.prepare(one))
        noise = policy.family.drawn(np.random.default_rng(seed), (len(observations), *policy.action_shape))
        shape_of = [policy.family.shape(policy.model.config, [i], policy.schedule, policy.specs) for i in self._inputs]
        self._batches: list[tuple[list[int], Any, dict[str, torch.Tensor]]] = []
        tell, done = counted("observations read", progress), 0
        for shape in dict.fromkeys(shape_of):
            alike = [index for index, other in enumerate(shape_of) if other == shape]
            for rows in (alike[start : start + BATCH] for start in range(0, len(alike), BATCH)):
                policy.infer_batch([observations[row] for row in rows], noise=noise[rows])
                pipeline = policy.pipelines.newest
                inputs = {name: tensor.clone() for name, tensor in pipeline.engines[-1][1].inputs.items()}
                self._batches.append((rows, pipeline.shape, inputs))
                tell(done := done + len(rows), len(observations))

    @torch.inference_mode()
    def integrate(self, schedule: Schedule) -> np.ndarray:
        """See `Flow`."""
        policy = self._policy
        found = np.empty((len(self._inputs), *policy.action_shape))
        for rows, shape, inputs in self._batches:
            shape = replace(shape, schedule=schedule)
            component = policy.family.components(policy.model, shape, rtc=policy.config.rtc)[-1]
            component.weights()
            result = component.module(*(inputs[spec.name] for spec in component.inputs))
            found[rows] = policy.family.normalised(policy.processor, result.cpu().numpy())
        return found

    def robot(self, actions: np.ndarray) -> np.ndarray:
        """See `Flow`."""
        processor = self._policy.processor
        return np.stack([processor.unnormalize_actions(a, i) for a, i in zip(actions, self._inputs, strict=True)])


@dataclass(frozen=True)
class Exact:
    """The exact flow's end.

    Attributes:
        actions: the robot's, float64 (N, H, R): Euler's error is a series in 1 / steps, of which 2 E(n) - E(n / 2)
            leaves the second order (Richardson), on the grid t = (1 - k / n)³.
        half: the same with half as many steps.
        euler: by as many uniform Euler steps.
    """

    actions: np.ndarray
    half: np.ndarray
    euler: np.ndarray

    @classmethod
    def of(cls, flow: Flow) -> Exact:
        fine, middle, coarse = (flow.integrate(Schedule.cubic(FINE // part)) for part in (1, 2, 4))
        normalized = (2 * fine - middle, 2 * middle - coarse, flow.integrate(Schedule.uniform(FINE)))
        return cls(*map(flow.robot, normalized))


@dataclass(frozen=True)
class Errors:
    """Distances from the exact flow's actions.

    Attributes:
        share: (N,) mean error of an observation's chunk over the continuous dimensions, each divided by its spread.
        robot: (N, R) mean error of each dimension in the robot's units.
        flips: (N,) binary commands of the chunk that have the other value.
    """

    share: np.ndarray
    robot: np.ndarray
    flips: np.ndarray

    def __getitem__(self, rows: Sequence[int] | np.ndarray) -> Errors:
        return Errors(self.share[rows], self.robot[rows], self.flips[rows])


@dataclass(frozen=True)
class Units:
    """What errors are measured in, by dimension of the robot's action (R,).

    Attributes:
        spread: standard deviation of the exact actions over all observations.
        binary: dimensions with two values, such as a gripper's command, which flip at `threshold`.
        threshold: the middle of the range.
    """

    spread: np.ndarray
    binary: np.ndarray
    threshold: np.ndarray

    @classmethod
    def of(cls, exact: np.ndarray, motion_dims: Sequence[int] = ()) -> Units:
        """Measure the exact actions (N, H, R). Raises ObservationError if none of them changes continuously."""
        values = exact.reshape(-1, exact.shape[-1])
        low, high = np.quantile(values, (0.01, 0.99), axis=0)
        inside = np.abs(values - (low + high) / 2) < (high - low) / 4
        binary = (high > low) & (inside.mean(axis=0) < BINARY)
        binary[list(motion_dims)] = False
        units = cls(values.std(axis=0), binary, (low + high) / 2)
        if not units.continuous.any():
            raise ObservationError("observations: expected ones whose actions differ, got equal or binary actions only")
        return units

    @property
    def continuous(self) -> np.ndarray:
        """The dimensions of `Errors.share`: neither binary nor constant."""
        return ~self.binary & (self.spread > 0)

    def errors(self, actions: np.ndarray, exact: np.ndarray) -> Errors:
        """Compare actions (N, H, R) of the robot."""
        robot = np.abs(actions - exact).mean(axis=1)
        share = (robot / np.where(self.spread > 0, self.spread, 1))[:, self.continuous].mean(axis=1)
        turned = (actions > self.threshold) != (exact > self.threshold)
        return Errors(share, robot, (turned & self.binary).sum(axis=(1, 2)))
