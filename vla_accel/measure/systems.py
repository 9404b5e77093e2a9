"""What `vla-accel bench` can time: this package's engines on weights of a family's published size, and the family's
baselines (openpi's own PyTorch for π0 and π0.5)."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.measure.bench import System
from vla_accel.measure.roofline import Ceilings, floors_ms
from vla_accel.measure.synthetic import random_policy
from vla_accel.models.family import Family
from vla_accel.models.network import Network
from vla_accel.policy import OptimizedPolicy


def configs(family: Family) -> dict[str, PolicyConfig]:
    """This package's systems by name: eager, native in BF16, and native with what the family can do in FP8."""

    def config(engine: Any, fp8: tuple[str, ...] = ()) -> PolicyConfig:
        specs = {n: EngineSpec(engine, precision="fp8" if n in fp8 else "auto") for n in family.parts}
        return PolicyConfig().with_specs(specs)

    fp8 = {name: config("native", parts) for name, parts in family.fp8_systems.items()}
    return {"eager": config("eager"), "native-bf16": config("native"), **fp8}


class Factory:
    """Makes the systems of one model; all of ours share its weights."""

    def __init__(
        self, family: Family, *, views: int, horizon: int, device: str | None, ceilings: Ceilings | None
    ) -> None:
        self.family, self.views, self.horizon = family, views, horizon
        self.device, self.ceilings = device, ceilings
        self.configs = configs(family)
        self.names = (*self.configs, *family.baselines)
        self.model: Network | None = None
        self.processor: Any = None
        self.policies: dict[str, OptimizedPolicy] = {}

    def make(self, name: str, steps: int) -> System:
        """A system by name. Raises ConfigError for an unknown one, DependencyError for a baseline not installed."""
        started = time.perf_counter()
        if name in self.family.baselines:
            infer = self.family.baseline(name, horizon=self.horizon, steps=steps, device=self.device or "cuda")
            return System(name, infer, steps, time.perf_counter() - started)
        if name not in self.configs:
            raise ConfigError(f"systems: expected some of {', '.join(self.names)}, got {name!r}")
        if name not in self.policies:
            policy, _ = random_policy(
                self.family, self.configs[name], horizon=self.horizon, views=self.views, steps=steps,
                device=self.device, model=self.model,
            )  # fmt: skip
            self.policies[name], self.model, self.processor = policy, policy.model, policy.processor
        policy = self.policies[name].with_steps(steps)
        policy.warm_up()
        system = System(name, policy.infer, steps, time.perf_counter() - started)
        example = policy.processor.prepare(policy.processor.example())
        work = self.family.work(policy.model.config, example, steps, policy.specs)
        if self.ceilings is not None:
            system.floors = floors_ms(work, self.ceilings)
        system.notes = {"engines": policy.ledger.as_list(), "work": {n: asdict(w) for n, w in work.items()}}
        return system


def free() -> None:
    """Give back what dropped systems held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def without_graph(config: PolicyConfig) -> PolicyConfig:
    """The same engines launched one by one, for a profile."""
    return replace(config, cuda_graph=False)


def describe_sizes(family: Family, config: Any, views: int) -> dict[str, Any]:
    """What was timed, for the record."""
    return {**asdict(config), "kind": family.name, "views": views}
