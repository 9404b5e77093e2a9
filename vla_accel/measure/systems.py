"""What `vla-accel bench` can time: this package's engines on weights of a family's published size, the family's
baselines (openpi's own PyTorch for π0 and π0.5), or a checkpoint in several configurations."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from vla_accel.checkpoints.loading import family_of, find
from vla_accel.config import EngineSpec, PolicyConfig, load_config
from vla_accel.errors import ConfigError
from vla_accel.measure.bench import System
from vla_accel.measure.random_policy import random_policy
from vla_accel.measure.roofline import Ceilings, floors_ms
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
        return timed(name, self.policies[name].with_steps(steps), started, self.ceilings)

    def about(self) -> dict[str, Any]:
        """What was timed, for the record."""
        return {} if self.model is None else describe_sizes(self.family, self.model.config, self.views)


class CheckpointFactory:
    """Makes the systems of one checkpoint: a policy a configuration, by its name or file."""

    def __init__(self, checkpoint: str, names: Sequence[str], *, device: str | None, ceilings: Ceilings | None) -> None:
        self.checkpoint, self.device, self.ceilings = checkpoint, device, ceilings
        self.names = tuple(names)
        self.configs = {name: load_config(name) for name in names}
        self.family = family_of(find(checkpoint))
        self.processor: Any = None
        self.policies: dict[str, OptimizedPolicy] = {}

    def make(self, name: str, steps: int) -> System:
        """A system by its configuration's name, with weights of its own."""
        started = time.perf_counter()
        if name not in self.policies:
            settings = self.configs[name]
            policy = OptimizedPolicy.from_pretrained(self.checkpoint, settings, device=self.device, num_steps=steps)
            self.policies[name], self.processor = policy, policy.processor
        return timed(name, self.policies[name].with_steps(steps), started, self.ceilings)

    def about(self) -> dict[str, Any]:
        """What was timed, for the record."""
        policy = next(iter(self.policies.values()))
        return {"name": self.checkpoint, **policy.metadata["model"]}


def timed(name: str, policy: OptimizedPolicy, started: float, ceilings: Ceilings | None) -> System:
    """A policy as a system, warm. `started`: `time.perf_counter()` before it was made."""
    policy.warm_up()
    system = System(name, policy.infer, policy.num_steps, time.perf_counter() - started)
    example = policy.processor.prepare(policy.processor.example())
    work = policy.family.work(policy.model.config, example, policy.num_steps, policy.specs)
    if ceilings is not None:
        system.floors = floors_ms(work, ceilings)
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
