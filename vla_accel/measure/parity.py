"""Agreement of a policy with the FP32 eager reference: the final actions, and component by component for blame.

Both get the same observations and the same noise. Judged on the final actions only: a component may be 0.999 alike and
ten steps garbage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_accel.checkpoints.loading import Checkpoint
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.numeric import cosine
from vla_accel.policy import OptimizedPolicy

SCHEMA = "vla_accel.parity/1"


@dataclass(frozen=True)
class Thresholds:
    """Smallest cosine of the final (normalised) actions with the reference, by the lowest precision in use."""

    fp32: float = 0.999999
    bf16: float = 0.9995
    fp16: float = 0.9995
    fp8: float = 0.998

    def of(self, specs: Mapping[str, EngineSpec], dtype: torch.dtype) -> float:
        """The threshold for a policy: that of the coarsest of its components."""
        own = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, "bf16")
        return min(getattr(self, own if s.precision == "auto" else s.precision) for s in specs.values())


THRESHOLDS = Thresholds()
FLIPPED = 1.0
"""An error of a normalised action, half of its range of 2, from which on a command was decided the other way."""


@dataclass(frozen=True)
class Agreement:
    """Two arrays compared: cosine of the whole, median and smallest cosine of one observation, errors."""

    cosine: float
    median_cosine: float
    worst_cosine: float
    max_error: float
    mean_error: float

    @classmethod
    def of(cls, got: np.ndarray, want: np.ndarray) -> Agreement:
        """Arrays with observations along the first axis."""
        got, want = got.astype(np.float64), want.astype(np.float64)
        error = np.abs(got - want)
        rows = [cosine(a, b) for a, b in zip(got, want, strict=True)]
        return cls(cosine(got, want), float(np.median(rows)), min(rows), float(error.max()), float(error.mean()))


@dataclass(frozen=True)
class Report:
    """A comparison. `dimensions`: the errors of each action dimension, robot's units.

    `draws`: noises an observation. `flipped`: chunks in which a command fell the other way, as a gripper's does where
    noise decides it; `rest_cosine`: of the others, None if there are none. Both explain the judgement and are no part
    of it.
    """

    name: str
    passed: bool
    threshold: float
    observations: int
    num_steps: int
    actions: Agreement
    robot_actions: Agreement
    dimensions: list[dict[str, float]]
    components: dict[str, Agreement]
    engines: list[dict[str, object]]
    draws: int = 1
    flipped: int = 0
    rest_cosine: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data (schema `vla_accel.parity/1`)."""
        return {"schema": SCHEMA, **asdict(self)}


def reference_of(settings: PolicyConfig, checkpoint: Checkpoint) -> OptimizedPolicy:
    """The FP32 eager policy of a checkpoint with float32 weights of its own (the model is cast in place)."""
    eager = settings.with_specs({name: EngineSpec("eager") for name in checkpoint.family.parts})
    return OptimizedPolicy(checkpoint, replace(eager, precision="fp32", cuda_graph=False))


def compare(
    policy: OptimizedPolicy,
    reference: OptimizedPolicy,
    observations: Sequence[Mapping[str, Any]],
    *,
    name: str,
    seed: int = 0,
    threshold: float | None = None,
    draws: int = 1,
) -> Report:
    """Run both on every observation, with the same noise, one at a time; `draws` noises each."""
    shape = policy.family.action_shape(policy.model.config)
    rng = np.random.default_rng(seed)
    got, want = _Kept(), _Kept()
    for observation, draw in ((o, d) for o in observations for d in range(draws)):
        noise = rng.standard_normal(shape).astype(np.float32)
        # The prefix does not see the noise: once is enough.
        got.add(policy, observation, noise, components=draw == 0)
        want.add(reference, observation, noise, components=draw == 0)
    normalised, exact = got.stacked("actions"), want.stacked("actions")
    actions = Agreement.of(normalised, exact)
    kept = np.abs(normalised - exact).reshape(len(exact), -1).max(axis=1) < FLIPPED
    robot, true = got.stacked("robot"), want.stacked("robot")
    error = np.abs(robot - true)
    dimensions = [
        {
            "cosine": cosine(robot[..., d], true[..., d]),
            "max_error": float(error[..., d].max()),
            "mean_error": float(error[..., d].mean()),
        }
        for d in range(robot.shape[-1])
    ]
    components = {n: Agreement.of(got.stacked(n), want.stacked(n)) for n in got.internals}
    limit = THRESHOLDS.of(policy.specs, policy.model.dtype) if threshold is None else threshold
    return Report(
        name=name,
        passed=actions.cosine >= limit,
        threshold=limit,
        observations=len(observations),
        num_steps=policy.num_steps,
        actions=actions,
        robot_actions=Agreement.of(robot, true),
        dimensions=dimensions,
        components=components,
        engines=policy.ledger.as_list(),
        draws=draws,
        flipped=int((~kept).sum()),
        rest_cosine=cosine(normalised[kept], exact[kept]) if kept.any() else None,
    )


class _Kept:
    """What is compared, of every observation."""

    def __init__(self) -> None:
        self.rows: dict[str, list[np.ndarray]] = {}

    @property
    def internals(self) -> list[str]:
        """What there is besides the actions."""
        return [name for name in self.rows if name not in ("robot", "actions")]

    def add(
        self, policy: OptimizedPolicy, observation: Mapping[str, Any], noise: np.ndarray, *, components: bool
    ) -> None:
        result, raw = policy.infer_with_internals(observation, noise=noise)
        for key, value in {"robot": result["actions"], **raw}.items():
            # A few numbers of each tensor are enough to find a culprit, and all of them would not fit in memory.
            if key not in ("robot", "actions") and not components:
                continue
            flat = value if key in ("robot", "actions") else value.reshape(-1)[:: max(1, value.size // 65_536)]
            self.rows.setdefault(key, []).append(np.asarray(flat))

    def stacked(self, key: str) -> np.ndarray:
        return np.stack(self.rows[key])
