"""Agreement of a policy with the FP32 eager reference, on the same observations and noise.

The final actions alone decide, by three measures: the share of chunks in which a command, such as a gripper's, flipped;
the cosine of the other chunks (one flip costs the cosine of all chunks as much as a whole chunk may differ); and the
error relative to the change between observations, so that a policy that ignores its images fails. Agreement by
component only helps to find the culprit.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.families.family import Family
from vla_accel.families.loading import Checkpoint
from vla_accel.measure.proportion import wilson
from vla_accel.numeric import cosine
from vla_accel.policy import OptimizedPolicy
from vla_accel.progress import counted

SCHEMA = "vla_accel.parity/1"
Rows = np.ndarray | Sequence[np.ndarray]


@dataclass(frozen=True)
class Limits:
    """Limits of the final (normalised) actions: the smallest `cosine` of the chunks without a flipped command, None for
    no limit, and the largest rms error `relative` to what another observation changes."""

    cosine: float | None
    relative: float


LIMITS = {
    "fp32": Limits(0.999999, 0.005),
    "bf16": Limits(0.9995, 0.06),
    "fp16": Limits(0.9995, 0.06),
    "fp8": Limits(0.998, 0.20),
    "int8": Limits(0.998, 0.20),
}
"""By the lowest precision in use. Another prompt changes the actions of random weights by about a third of what another
observation does, so these limits notice a wrong K/V cache."""
COARSER = {"fp8": 16.0, "int8": 16.0}
"""How much coarser than BF16 a precision may be with random weights: FP8 has three bits of a mantissa in place of
seven; INT8 shares a scale between the large and the small values of a row."""
RANDOM_RATIO, RANDOM_MOST = 2.0, 0.5
"""With random weights: the largest error compared with that of eager in the policy's dtype, and the largest of all."""
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


def coarsest(specs: Mapping[str, EngineSpec], dtype: torch.dtype) -> str:
    """The lowest precision in use, as in `LIMITS`."""
    own = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, "bf16")
    used = [own if spec.precision == "auto" else spec.precision for spec in specs.values()]
    return max(used, key=lambda name: LIMITS[name].relative)


def limits_of(specs: Mapping[str, EngineSpec], dtype: torch.dtype) -> Limits:
    """The limits for a policy: those of the coarsest of its components."""
    return LIMITS[coarsest(specs, dtype)]


def random_limits(specs: Mapping[str, EngineSpec], dtype: torch.dtype, eager_error: float) -> Limits:
    """The limits for a policy with random weights, which may amplify rounding more than trained ones do. `eager_error`:
    the relative error of eager in the policy's dtype."""
    lowest = coarsest(specs, dtype)
    ratio = COARSER.get(lowest, RANDOM_RATIO)
    return Limits(None, max(LIMITS[lowest].relative, min(ratio * eager_error, RANDOM_MOST)))


@dataclass(frozen=True)
class Report:
    """A comparison.

    Attributes:
        dimensions: errors of each action dimension, in the robot's units.
        schedule: flow times of the steps, None for equal steps.
        draws: noise draws of each observation.
        flipped: chunks with a flipped command; `flipped_low` and `flipped_high`: the 95 % interval of their share.
        threshold: the smallest cosine allowed; None: any.
        rest_cosine: of the other chunks, which `threshold` is for; None if there are none.
        sensitivity: how much another observation changes the reference's actions, as a share of their norm.
        relative_error: the error in units of that change. Both are None for a single observation.
        relative_threshold: the largest such error allowed.
        eager_error: with random weights, the same of eager in the policy's dtype.
        reasons: why it did not pass.
    """

    name: str
    passed: bool
    threshold: float | None
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
    eager_error: float | None = None
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data (schema `vla_accel.parity/1`)."""
        return {"schema": SCHEMA, **asdict(self)}


def eager_of(settings: PolicyConfig, family: Family) -> PolicyConfig:
    """The same settings with every component in eager, without CUDA graphs."""
    return replace(settings.with_specs(dict.fromkeys(family.parts, EngineSpec("eager"))), cuda_graph=False)


def reference_of(settings: PolicyConfig, checkpoint: Checkpoint) -> OptimizedPolicy:
    """The FP32 eager policy of a checkpoint with float32 weights of its own (the model is cast in place)."""
    return OptimizedPolicy(checkpoint, replace(eager_of(settings, checkpoint.family), precision="fp32"))


def compare(
    policy: OptimizedPolicy,
    reference: OptimizedPolicy,
    observations: Sequence[Mapping[str, Any]],
    *,
    name: str,
    seed: int = 0,
    limits: Limits | None = None,
    draws: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run both on every observation with the same noise, `draws` times. `limits`: in place of those of `limits_of`."""
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
    limits = limits or limits_of(policy.specs, policy.model.dtype)
    same = exact[::draws][list(chosen)]
    change = _rms(np.stack(changed) - same) if changed else None
    relative = None if not change else _rms(normalised - exact) / change
    flipped = int((~kept).sum())
    low, high = wilson(flipped, len(kept))
    rest = cosine(normalised[kept], exact[kept]) if kept.any() else None
    reasons = []
    if rest is not None and limits.cosine is not None and not rest >= limits.cosine:
        reasons.append(f"cosine {rest:.6f}, at least {limits.cosine} required")
    if change == 0:
        reasons.append("another observation changes nothing, so agreement proves nothing")
    if relative is not None and not relative <= limits.relative:
        most = f"at most {100 * limits.relative:.3g} % allowed"
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


class Remembered:
    """A policy that computes each answer once, as far as `compare` needs it."""

    def __init__(self, policy: OptimizedPolicy) -> None:
        self._policy: OptimizedPolicy = policy
        self._answers: dict[bytes, tuple[dict[str, Any], dict[str, np.ndarray]]] = {}

    def infer_with_internals(
        self, observation: Mapping[str, Any], *, noise: np.ndarray
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the remembered answer, or compute it."""
        digest = hashlib.sha256(noise.tobytes())
        for name in sorted(observation):
            digest.update(f"{name}:{observation[name]}".encode() if isinstance(observation[name], str)
                          else np.ascontiguousarray(observation[name]).tobytes())  # fmt: skip
        key = digest.digest()
        if key not in self._answers:
            result, raw = self._policy.infer_with_internals(observation, noise=noise)
            few = {name: sampled(name, value) for name, value in raw.items()}
            self._answers[key] = ({"actions": result["actions"]}, few)
        return self._answers[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def sampled(name: str, value: np.ndarray) -> np.ndarray:
    """All actions, or every n-th value of another tensor."""
    return np.asarray(value if name == "actions" else value.reshape(-1)[:: max(1, value.size // SAMPLED)])


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x.astype(np.float64)).mean()))
