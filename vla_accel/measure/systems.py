"""What `vla-accel bench` can time: this package's engines on weights of a family's published size, the family's
baselines (openpi's own PyTorch for π0 and π0.5), or a checkpoint in several configurations."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_accel.checkpoints.loading import family_of, find
from vla_accel.config import EnginePrecision, EngineSpec, NativeOptions, PolicyConfig, load_config
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.measure.bench import System, peak
from vla_accel.measure.random_policy import random_policy
from vla_accel.measure.roofline import Ceilings, floors_ms
from vla_accel.models.family import Family
from vla_accel.models.network import Network
from vla_accel.policy import OptimizedPolicy


def configs(family: Family) -> dict[str, PolicyConfig]:
    """This package's systems by name: eager, native in BF16, and native with what the family can do in FP8 and INT8."""

    def config(engine: Any, low: Mapping[str, EnginePrecision]) -> PolicyConfig:
        specs = {n: EngineSpec(engine, precision=low.get(n, "auto")) for n in family.parts}
        return PolicyConfig().with_specs(specs)

    native = {name: config("native", low) for name, low in {"native-bf16": {}, **family.systems}.items()}
    # What a GPU without Hopper's own kernels runs.
    portable = {
        name.replace("native", "portable"): replace(made, native=NativeOptions(kernels="portable"))
        for name, made in native.items()
    }
    return {"eager": config("eager", {}), **native, **portable}


REALTIME_VLA_STEPS = 10
"""Denoising steps that realtime-vla's kernels are written for."""


class Factory:
    """Makes the systems of one model; all of ours share its weights."""

    def __init__(
        self, family: Family, *, views: int, horizon: int, device: str | None, ceilings: Ceilings | None,
        checkout: Path | None = None, tokens: int | None = None,
    ) -> None:  # fmt: skip
        """`checkout`: of realtime-vla, whose systems are then made, too; `tokens`: of the prompt there."""
        self.family, self.views, self.horizon = family, views, horizon
        self.device, self.ceilings, self.checkout, self.tokens = device, ceilings, checkout, tokens or 20
        self.configs = configs(family)
        self.default = ("eager", "native-bf16", *family.systems_in("fp8"))
        self.baselines = (*family.baselines, *(family.realtime_vla if checkout is not None else ()))
        self.names = (*self.configs, *self.baselines)
        self.model: Network | None = None
        self.processor: Any = None
        self.policies: dict[str, OptimizedPolicy] = {}

    def make(self, name: str, steps: int) -> System:
        """A system by name. Raises ConfigError for an unknown one, DependencyError for a baseline not installed."""
        started = time.perf_counter()
        if self.checkout is not None and name in self.family.realtime_vla:
            infer = self.family.from_checkout(
                name, self.checkout, views=self.views, horizon=self.horizon, tokens=self.tokens
            )
            return System(name, infer, steps, time.perf_counter() - started)
        if name in self.family.baselines:
            infer = self.family.baseline(name, horizon=self.horizon, steps=steps, device=self.device or "cuda")
            return System(name, infer, steps, time.perf_counter() - started)
        if name not in self.configs:
            raise ConfigError(f"systems: expected some of {', '.join(self.names)}, got {name!r}")
        with peak() as loading:
            if name not in self.policies:
                policy, _ = random_policy(
                    self.family, self.configs[name], horizon=self.horizon, views=self.views, steps=steps,
                    device=self.device, model=self.model,
                )  # fmt: skip
                self.policies[name], self.model, self.processor = policy, policy.model, policy.processor
            system = timed(name, self.policies[name].with_steps(steps), started, self.ceilings)
        return with_peak(system, loading)

    def source(self) -> dict[str, Any]:
        """What `measure.start` is to start."""
        return {"family": self.family.name, "views": self.views, "horizon": self.horizon}

    def about(self) -> dict[str, Any]:
        """What was timed, for the record."""
        return {} if self.model is None else describe_sizes(self.family, self.model.config, self.views)


class CheckpointFactory:
    """Makes the systems of one checkpoint: a policy a configuration, by its name or file."""

    def __init__(self, checkpoint: str, names: Sequence[str], *, device: str | None, ceilings: Ceilings | None) -> None:
        self.checkpoint, self.device, self.ceilings = checkpoint, device, ceilings
        self.names, self.baselines, self.default = tuple(names), (), tuple(names)
        self.configs = {name: load_config(name) for name in names}
        self.family = family_of(find(checkpoint))
        self.processor: Any = None
        self.policies: dict[str, OptimizedPolicy] = {}

    def make(self, name: str, steps: int) -> System:
        """A system by its configuration's name, with weights of its own."""
        started = time.perf_counter()
        with peak() as loading:
            if name not in self.policies:
                settings = self.configs[name]
                policy = OptimizedPolicy.from_pretrained(self.checkpoint, settings, device=self.device, num_steps=steps)
                self.policies[name], self.processor = policy, policy.processor
            system = timed(name, self.policies[name].with_steps(steps), started, self.ceilings)
        return with_peak(system, loading)

    def source(self) -> dict[str, Any]:
        """What `measure.start` is to start."""
        return {"checkpoint": self.checkpoint}

    def about(self) -> dict[str, Any]:
        """What was timed, for the record."""
        policy = next(iter(self.policies.values()))
        return {"name": self.checkpoint, **policy.metadata["model"]}


def timed(name: str, policy: OptimizedPolicy, started: float, ceilings: Ceilings | None) -> System:
    """A policy as a system, warm. `started`: `time.perf_counter()` before it was made."""
    policy.warm_up()
    system = System(name, policy.infer, policy.num_steps, time.perf_counter() - started)
    system.memory = policy.memory()
    example = policy.processor.prepare(policy.processor.example())
    work = policy.family.work(policy.model.config, example, policy.num_steps, policy.specs)
    if ceilings is not None:
        system.floors = floors_ms(work, ceilings)
    system.notes = {"engines": policy.ledger.as_list(), "work": {n: asdict(w) for n, w in work.items()}}
    return system


def observer(
    family: Family, processor: Any, tokens: int | None, camera: tuple[int, int] | None = None
) -> Callable[[np.random.Generator], dict[str, Any]]:
    """Makes random observations, with a prompt of `tokens` tokens and images of `camera` (height, width) if given.
    Raises ConfigError for a length that the model does not take."""
    prompt = {} if tokens is None else _prompt(processor, tokens)

    def observe(rng: np.random.Generator) -> dict[str, Any]:
        made = family.random_observation(processor, rng) | prompt
        images = [] if camera is None else [n for n, v in made.items() if isinstance(v, np.ndarray) and v.ndim == 3]
        return made | {name: rng.integers(0, 256, (*(camera or ()), 3), np.uint8) for name in images}

    return observe


def camera_size(text: str | None) -> tuple[int, int] | None:
    """Height and width in "480x640"; None of None. Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if found is None:
        raise ConfigError(f"camera: expected height and width such as 480x640, got {text!r}")
    return int(found[1]), int(found[2])


def _prompt(processor: Any, tokens: int) -> dict[str, str]:
    length, told = 0, {}
    for words in range(1, tokens + 1):
        told = processor.example(" ".join(["pick"] * words))
        try:
            length = len(processor.prepare(told).tokens)
        except ObservationError as error:
            raise ConfigError(f"prompt_tokens: {tokens}: {error}") from error
        if length >= tokens:
            break
    if length != tokens:
        raise ConfigError(
            f"prompt_tokens: a prompt of this model has not {tokens}; the nearest that was tried {length}"
        )
    return {key: value for key, value in told.items() if isinstance(value, str)}


def with_peak(system: System, loading: Sequence[int]) -> System:
    """The system, whose memory also says how much making it took at most."""
    if loading and system.memory is not None:
        system.memory["peak_loading"] = loading[0]
    return system


def free() -> None:
    """Give back what dropped systems held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_sizes(family: Family, config: Any, views: int) -> dict[str, Any]:
    """What was timed, for the record."""
    return {**asdict(config), "kind": family.name, "views": views}
