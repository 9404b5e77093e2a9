"""Agreement of a policy with the FP32 eager reference: the final actions, and component by component for blame.

Both get the same observations and the same noise. Judged on the final actions only: a component may be 0.999 alike and
ten steps garbage. Three things are asked of them: that commands, such as a gripper's, do not fall the other way more
often than a rate; that the chunks in which none did point the same way (cosine); and that the error of all is small
beside what another observation changes (a policy that ignores its images must fail, however little they matter). A
command that fell the other way is as large as a whole chunk may differ: the cosine of all chunks would count such once
more, without an interval, and a handful among a thousand would decide it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.families.loading import Checkpoint
from vla_accel.measure.proportion import wilson
from vla_accel.numeric import cosine
from vla_accel.policy import OptimizedPolicy
from vla_accel.progress import counted

SCHEMA = "vla_accel.parity/1"
Rows = np.ndarray | Sequence[np.ndarray]


@dataclass(frozen=True)
class Limits:
    """What is asked of the final (normalised) actions.

    Attributes:
        cosine: with the reference, at least, of the chunks in which no command fell the other way.
        relative: root mean square of the error, in units of what another observation changes, at most.
    """

    cosine: float
    relative: float


LIMITS = {
    "fp32": Limits(0.999999, 0.005),
    "bf16": Limits(0.9995, 0.06),
    "fp16": Limits(0.9995, 0.06),
    "fp8": Limits(0.998, 0.20),
    "int8": Limits(0.998, 0.20),
}
"""By the lowest precision in use. Another prompt changes the actions of random weights by about a third of what another
observation does, so that the loosest limit still notices a wrong K/V cache."""
FLIP_RATE = 0.01
"""Share of chunks in which a command may fall the other way. Judged by the lower end of its 95 % interval: few chunks
that happen to flip are no proof."""
COMPARED = 32
"""Observations at most for which the reference is asked what another one would change."""
FLIPPED = 1.0
"""An error of a normalised action, half of its range of 2, from which on a command was decided the other way."""


@dataclass(frozen=True)
class Agreement:
    """What two computed, compared: cosine of the whole, median and smallest cosine of one observation, errors."""

    cosine: float
    median_cosine: float
    worst_cosine: float
    max_error: float
    mean_error: float

    @classmethod
    def of(cls, got: Rows, want: Rows) -> Agreement:
        """An array of each observation, of shapes that may differ with the prompt's length."""
        rows = [cosine(a, b) for a, b in zip(got, want, strict=True)]
        mine, true = (np.concatenate([row.ravel() for row in side]).astype(np.float64) for side in (got, want))
        error = np.abs(mine - true)
        return cls(cosine(mine, true), float(np.median(rows)), min(rows), float(error.max()), float(error.mean()))


def limits_of(specs: Mapping[str, EngineSpec], dtype: torch.dtype) -> Limits:
    """The limits for a policy: those of the coarsest of its components."""
    own = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, "bf16")
    return min((LIMITS[own if s.precision == "auto" else s.precision] for s in specs.values()), key=lambda x: x.cosine)


@dataclass(frozen=True)
class Report:
    """A comparison. `dimensions`: the errors of each action dimension, robot's units.

    `draws`: noises an observation. `flipped`: chunks in which a command fell the other way, as a gripper's does where
    noise decides it, with the 95 % interval of their share (`flipped_low`, `flipped_high`); `rest_cosine`: of the other
    chunks, which `threshold` is for, None if there are none. `sensitivity`: how much another observation changes the
    reference's actions, as a share of their norm; `relative_error`: the error in units of that change; both None for a
    single observation. `reasons`: why it did not pass.
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
    flipped_low: float = 0.0
    flipped_high: float = 1.0
    sensitivity: float | None = None
    relative_error: float | None = None
    relative_threshold: float | None = None
    reasons: tuple[str, ...] = ()

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
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run both on every observation, with the same noise, one at a time; `draws` noises each. `threshold`: a cosine
    instead of the usual one. `progress` is told now and then how far all of it is."""
    shape = policy.family.action_shape(policy.model.config)
    rng = np.random.default_rng(seed)
    got, want, changed, tell = _Kept(), _Kept(), [], counted("calls of each", progress)
    count, todo = len(observations), len(observations) * draws
    chosen = np.unique(np.linspace(0, count - 1, min(count, COMPARED)).astype(int)) if count > 1 else ()
    for done, (i, draw) in enumerate(((i, d) for i in range(count) for d in range(draws)), 1):
        noise = rng.standard_normal(shape).astype(np.float32)
        # The prefix does not see the noise: once is enough.
        got.add(policy, observations[i], noise, components=draw == 0)
        want.add(reference, observations[i], noise, components=draw == 0)
        if draw == 0 and i in chosen:
            # Half the recording away, which in a recording of several tasks is another task's.
            _, other = reference.infer_with_internals(observations[(i + count // 2) % count], noise=noise)
            changed.append(other["actions"])
        tell(done, todo)
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
    components = {n: Agreement.of(got.rows[n], want.rows[n]) for n in got.internals}
    limits = limits_of(policy.specs, policy.model.dtype)
    limits = limits if threshold is None else replace(limits, cosine=threshold)
    # What another observation changes in the reference's actions, the noise being the same.
    same = exact[::draws][list(chosen)]
    change = _rms(np.stack(changed) - same) if changed else None
    relative = None if not change else _rms(normalised - exact) / change
    flipped = int((~kept).sum())
    low, high = wilson(flipped, len(kept))
    rest = cosine(normalised[kept], exact[kept]) if kept.any() else None
    reasons = []
    if rest is not None and not rest >= limits.cosine:
        reasons.append(f"cosine {rest:.6f}, at least {limits.cosine} wanted")
    if change == 0:
        reasons.append("another observation changes nothing, so that agreement says nothing")
    if relative is not None and not relative <= limits.relative:
        reasons.append(
            f"error {100 * relative:.1f} % of what another observation changes, "
            f"at most {100 * limits.relative:g} % wanted"
        )
    if low > FLIP_RATE:
        reasons.append(
            f"commands fell the other way in at least {100 * low:.1f} % of chunks, {100 * FLIP_RATE:g} % allowed"
        )
    return Report(
        name=name,
        passed=not reasons,
        threshold=limits.cosine,
        observations=len(observations),
        num_steps=policy.num_steps,
        actions=actions,
        robot_actions=Agreement.of(robot, true),
        dimensions=dimensions,
        components=components,
        engines=policy.ledger.as_list(),
        draws=draws,
        flipped=flipped,
        rest_cosine=rest,
        flipped_low=low,
        flipped_high=high,
        sensitivity=None if change is None else change / _rms(same),
        relative_error=relative,
        relative_threshold=limits.relative,
        reasons=tuple(reasons),
    )


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x.astype(np.float64)).mean()))


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
