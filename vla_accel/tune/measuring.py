"""Measure candidates on this machine: agreement by `measure.parity`, latency by `measure.bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from vla_accel.config import PolicyConfig
from vla_accel.fp8 import Products
from vla_accel.measure import bench, parity
from vla_accel.measure.flow import PolicyFlow, exact_policy
from vla_accel.measure.schedules import judge
from vla_accel.measure.systems import free, timed
from vla_accel.policy import OptimizedPolicy
from vla_accel.tune.search import Candidate


class PolicyBench:
    """Measures the candidates of one checkpoint: `draws` noises of each observation, `calls` timed calls."""

    def __init__(
        self, checkpoint: str, reference: Candidate, observations: Sequence[Mapping[str, Any]], *, draws: int = 1,
        calls: int = 100, seed: int = 0,
    ) -> None:  # fmt: skip
        self.checkpoint, self.reference = checkpoint, reference
        self.observations, self.draws, self.calls, self.seed = observations, draws, calls, seed
        self._lower: dict[str, Mapping[str, Products]] | None = None
        self._exact: dict[tuple[Any, Any], OptimizedPolicy] = {}
        """FP32 eager by number of steps and schedule, with its remembered answers."""
        self._loaded: tuple[str, OptimizedPolicy] | None = None

    def agreement(self, candidate: Candidate) -> dict[str, Any]:
        """Compare with FP32 eager of the same denoising steps on the recorded observations."""
        exact, policy = self._reference(candidate.config), self._policy(candidate)
        report = parity.compare(policy, exact, self.observations, name=candidate.name, seed=self.seed, draws=self.draws)
        return {
            "passed": report.passed,
            "reasons": list(report.reasons),
            "threshold": report.threshold,
            "relative_error": report.relative_error,
            **report.actions.__dict__,
            "cosine": report.actions.cosine if report.rest_cosine is None else report.rest_cosine,
            "flipped": report.flipped,
            "chunks": report.observations * report.draws,
            "components": {name: a.cosine for name, a in report.components.items()},
            "engines": report.engines,
        }

    def latency(self, candidate: Candidate) -> dict[str, Any]:
        """Time whole calls on the same observations."""
        (row,), cores = self._timed(self._policy(candidate))
        kept = ("median_ms", "p10_ms", "p90_ms", "calls", "parts_ms", "engines")
        return {**{name: row[name] for name in kept}, "others_busy": cores}

    def in_turns(self, candidate: Candidate) -> dict[str, Any]:
        """Time the reference and the candidate in turns."""
        (base, row), cores = self._timed(self._reference(self.reference.config), self._policy(candidate))
        medians = {"median_ms": row["median_ms"], "reference_ms": base["median_ms"]}
        return {**medians, "calls": row["calls"], "others_busy": cores}

    def has_flow(self) -> bool:
        """Return whether the model's steps integrate a flow."""
        policy = self._policy(self.reference)
        return policy.family.has_flow(policy.model.config)

    def flow(self, steps: Sequence[int], progress: Callable[[str], None]) -> dict[str, Any]:
        """Judge denoising schedules by their distance from the exact flow (`measure.schedules.judge`)."""
        self.release()
        exact = exact_policy(self.checkpoint, self.reference.config)
        found = judge(PolicyFlow(exact, self.observations, seed=self.seed, progress=progress), exact.schedule,
                      steps=steps, seed=self.seed, progress=progress)  # fmt: skip
        return found.as_dict()

    def release(self) -> None:
        """Free the loaded policies."""
        self._exact, self._loaded = {}, None
        free()

    def lower(self) -> dict[str, Mapping[str, Products]]:
        """By component, what each engine can compute in low precision with the scales that the checkpoint has."""
        if self._lower is not None:
            return self._lower
        policy = self._policy(self.reference)
        family, config = policy.family, policy.model.config
        inputs = policy.processor.prepare(policy.processor.example())
        shape = family.shape(config, [inputs], policy.schedule, policy.specs)
        scaled = policy.checkpoint.scales is not None
        self._lower = {
            c.name: {engine: p for engine, p in c.quantised.items() if scaled or not p.activations}
            for c in family.components(policy.model, shape)
        }
        return self._lower

    def _timed(self, *policies: OptimizedPolicy) -> tuple[list[dict[str, Any]], float | None]:
        """Rows of figures, and the cores that others kept busy. Turns are long, because the first call of a turn
        finds the other policy's weights in the caches."""
        systems = [timed(str(place), policy, 0.0, None) for place, policy in enumerate(policies)]
        cores: list[float | None] = []
        turn = max(1, min(10, self.calls // 2))
        rows = bench.run(systems, self._observe, calls=self.calls, turn=turn, seed=self.seed, heard=cores.append)
        return rows, cores[0]

    def _reference(self, config: PolicyConfig) -> OptimizedPolicy:
        """FP32 eager with the denoising steps of a candidate, and with its remembered answers."""
        own = (self.reference.config.num_steps, self.reference.config.schedule)
        if own not in self._exact:
            self._exact[own] = cast(OptimizedPolicy, parity.Remembered(self._policy(self.reference)))
        steps = (config.num_steps, config.schedule)
        if steps not in self._exact:
            self._exact[steps] = cast(OptimizedPolicy, parity.Remembered(self._exact[own].with_steps(*steps)))
        return self._exact[steps]

    def _observe(self, rng: np.random.Generator) -> dict[str, Any]:
        return dict(self.observations[int(rng.integers(len(self.observations)))])

    def _policy(self, candidate: Candidate) -> OptimizedPolicy:
        if self._loaded is None or self._loaded[0] != candidate.key:
            self._loaded = None  # before the next one is loaded: both might not fit
            free()
            self._loaded = (candidate.key, OptimizedPolicy.from_pretrained(self.checkpoint, candidate.config))
        return self._loaded[1]
