"""Agreement of a policy with the FP32 eager reference, on the same observations and noise.

The final actions alone decide, by three measures: the share of chunks in which a command, such as a gripper's, flipped;
the cosine of the other chunks (one flip costs the cosine of all chunks as much as a whole chunk may differ); and the
error relative to the change between observations, so that a policy that ignores its images fails. Agreement by
component only helps to find the culprit.
"""

from __future__ import annotations

import itertools
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
    """Limits of the final (normalised) actions: the smallest `cosine` of the chunks without a flipped command, and the
    largest rms error `relative` to what another observation changes."""

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
observation does, so the loosest limit still notices a wrong K/V cache."""
FLIP_RATE = 0.01
"""Largest share of chunks with a flipped command, compared with the lower end of its 95 % interval."""
COMPARED = 32
"""Most observations for which the reference also runs on another one."""
FLIPPED = 1.0
"""Smallest error of a normalised action, half of its range of 2, that counts as a flipped command."""
SAMPLED = 65_536
"""Most values kept of each internal tensor: enough to find a culprit."""


@dataclass(frozen=True)
class Agreement:
    """Cosine of all values, median and smallest cosine of one observation, largest and mean error."""

    cosine: float
    median_cosine: float
    worst_cosine: float
    max_error: float
    mean_error: float

    @classmethod
    def of(cls, got: Rows, want: Rows) -> Agreement:
        """Compare one array for each observation; shapes may differ with the prompt's length."""
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
    """A comparison.

    Attributes:
        dimensions: errors of each action dimension, in the robot's units.
        schedule: flow times of the steps, None for equal steps.
        draws: noise draws of each observation.
        flipped: chunks with a flipped command; `flipped_low` and `flipped_high`: the 95 % interval of their share.
        rest_cosine: of the other chunks, which `threshold` is for; None if there are none.
        sensitivity: how much another observation changes the reference's actions, as a share of their norm.
        relative_error: the error in units of that change. Both are None for a single observation.
        reasons: why it did not pass.
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
    schedule: list[float] | None = None
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
    """Run both on every observation with the same noise, `draws` times. `threshold` replaces the usual cosine."""
    rng, shape = np.random.default_rng(seed), policy.noise_shape
    got: dict[str, list[np.ndarray]] = {}
    want: dict[str, list[np.ndarray]] = {}
    count, changed, tell = len(observations), [], counted("calls of each", progress)
    chosen = np.unique(np.linspace(0, count - 1, min(count, COMPARED)).astype(int)) if count > 1 else ()
    for done, (i, draw) in enumerate(itertools.product(range(count), range(draws)), 1):
        noise = policy.family.drawn(rng, shape)
        for side, kept in ((policy, got), (reference, want)):
            result, internals = side.infer_with_internals(observations[i], noise=noise)
            kept.setdefault("robot", []).append(np.asarray(result["actions"]))
            for what, value in internals.items():
                if what == "actions" or draw == 0:  # the other internals do not depend on the noise
                    kept.setdefault(what, []).append(sampled(what, value))
        if draw == 0 and i in chosen:
            # Half the recording away, which in a recording of several tasks is another task.
            _, other = reference.infer_with_internals(observations[(i + count // 2) % count], noise=noise)
            changed.append(other["actions"])
        tell(done, count * draws)
    (normalised, robot), (exact, true) = ([np.stack(k[name]) for name in ("actions", "robot")] for k in (got, want))
    kept = np.abs(normalised - exact).reshape(len(exact), -1).max(axis=1) < FLIPPED
    error = np.abs(robot - true)
    dimensions = [
        {
            "cosine": cosine(robot[..., d], true[..., d]),
            "max_error": float(error[..., d].max()),
            "mean_error": float(error[..., d].mean()),
        }
        for d in range(robot.shape[-1])
    ]
    limits = limits_of(policy.specs, policy.model.dtype)
    limits = limits if threshold is None else replace(limits, cosine=threshold)
    same = exact[::draws][list(chosen)]
    change = _rms(np.stack(changed) - same) if changed else None
    relative = None if not change else _rms(normalised - exact) / change
    flipped = int((~kept).sum())
    low, high = wilson(flipped, len(kept))
    rest = cosine(normalised[kept], exact[kept]) if kept.any() else None
    reasons = []
    if rest is not None and not rest >= limits.cosine:
        reasons.append(f"cosine {rest:.6f}, at least {limits.cosine} required")
    if change == 0:
        reasons.append("another observation changes nothing, so agreement proves nothing")
    if relative is not None and not relative <= limits.relative:
        most = f"at most {100 * limits.relative:g} % allowed"
        reasons.append(f"error {100 * relative:.1f} % of the change between observations, {most}")
    if low > FLIP_RATE:
        allowed = f"at most {100 * FLIP_RATE:g} % allowed"
        reasons.append(f"commands flipped in at least {100 * low:.1f} % of chunks, {allowed}")
    return Report(
        name=name,
        passed=not reasons,
        threshold=limits.cosine,
        observations=count,
        num_steps=policy.num_steps,
        actions=Agreement.of(normalised, exact),
        robot_actions=Agreement.of(robot, true),
        dimensions=dimensions,
        components={n: Agreement.of(got[n], want[n]) for n in got if n not in ("robot", "actions")},
        engines=policy.ledger.as_list(),
        schedule=policy.schedule.described.get("schedule"),
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


def sampled(name: str, value: np.ndarray) -> np.ndarray:
    """All actions, or every n-th value of another tensor."""
    return np.asarray(value if name == "actions" else value.reshape(-1)[:: max(1, value.size // SAMPLED)])


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x.astype(np.float64)).mean()))
