"""What `vla-accel bench` can time: this package's engines on weights of a family's published size, the family's
baselines (openpi's own PyTorch for π0 and π0.5), or a checkpoint in several configurations."""

from __future__ import annotations

import functools
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_accel.config import CheckpointSpec, EnginePrecision, EngineSpec, NativeOptions, PolicyConfig, load_config
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families.family import Family
from vla_accel.families.loading import base_and_lora, family_of, load
from vla_accel.fp8 import Scales
from vla_accel.measure.bench import System, peak
from vla_accel.measure.random_policy import noise_scales, random_policy
from vla_accel.measure.roofline import Ceilings, floors_ms
from vla_accel.nn.network import Network
from vla_accel.policy import OptimizedPolicy


def configs(family: Family) -> dict[str, PolicyConfig]:
    """This package's systems by name: eager, native in BF16, and native with what the family can do in FP8 and INT8.
    Those with nothing left in BF16 are there with their embeddings in host memory, too: as small as a policy can be."""

    def config(engine: Any, low: Mapping[str, EnginePrecision]) -> PolicyConfig:
        specs = {n: EngineSpec(engine, precision=low.get(n, "auto")) for n in family.parts}
        return PolicyConfig().with_specs(specs)

    native = {name: config("native", low) for name, low in {"native-bf16": {}, **family.systems}.items()}
    native |= {
        f"{name}-host": replace(native[name], native=NativeOptions(embeddings="host"))
        for name, low in family.systems.items() if {*low} == {*family.parts}
    }  # fmt: skip
    # What a GPU without Hopper's own kernels runs.
    portable = {
        name.replace("native", "portable"): replace(made, native=replace(made.native, kernels="portable"))
        for name, made in native.items()
    }
    return {"eager": config("eager", {}), **native, **portable}


REALTIME_VLA_STEPS = 10
"""Denoising steps that realtime-vla's kernels are written for."""
ORDINARY_TOKENS = 20
"""Of realtime-vla's prompt, unless another length is asked for: about those of this package's example."""
_HELD = 1 << 20
"""Bytes; where making a baseline allocated less, its project's model was there already."""


class Factory:
    """Makes the systems of one model. All of ours have the same weights, and each holds what it needs of them alone."""

    def __init__(
        self, family: Family, *, views: int, horizon: int, device: str | None, ceilings: Ceilings | None,
        checkout: Path | None = None, tokens: int | None = None,
    ) -> None:  # fmt: skip
        """`checkout`: of realtime-vla, whose systems are then made, too; `tokens`: of the prompt, an ordinary one's
        if not given."""
        self.family, self.views, self.horizon, self.sweep = family, views, horizon, family.sweep
        self.device, self.ceilings, self.checkout, self.tokens = device, ceilings, checkout, tokens
        self.configs = configs(family)
        self.default = ("eager", "native-bf16", *family.systems_in("fp8"))
        self.baselines = (*family.baselines, *(family.realtime_vla if checkout is not None else ()))
        self.names = (*self.configs, *self.baselines)
        self.model: Network | None = None
        self.processor: Any = None
        self.scales: Scales | None = None
        self.policies: dict[str, OptimizedPolicy] = {}
        self.loading: dict[str, int] = {}
        """Of each policy, the most bytes that making it took beside what was there."""
        self.held: dict[str, dict[str, int]] = {}
        """Of each other project, the memory that its model took when it was made."""

    def make(self, name: str, steps: int) -> System:
        """A system by name. Raises ConfigError for an unknown one, DependencyError for a baseline not installed."""
        if name in self.baselines:
            return self._baseline(name, steps)
        if name not in self.configs:
            raise ConfigError(f"systems: expected some of {', '.join(self.names)}, got {name!r}")
        if self.scales is None:
            # Beforehand: a policy that acts has its scales, and calibrating takes the whole module's memory.
            self.scales = noise_scales(
                self.family, self.configs[name], horizon=self.horizon, views=self.views, device=self.device
            )
        started = time.perf_counter()
        with peak() as loading:
            if name not in self.policies:
                policy, _ = random_policy(
                    self.family, self.configs[name], horizon=self.horizon, views=self.views, steps=steps,
                    device=self.device, scales=self.scales,
                )  # fmt: skip
                self.policies[name], self.model, self.processor = policy, policy.model, policy.processor
            system = timed(name, self.policies[name].with_steps(steps), started, self.ceilings, self.tokens)
        return with_peak(system, loading, self.loading)

    def _baseline(self, name: str, steps: int) -> System:
        """Another project's code. What it holds is what the GPU's allocator gave out while it was made."""
        free()
        project, before = name.partition("-")[0], allocated()
        started = time.perf_counter()
        with peak() as loading:
            if self.checkout is not None and name in self.family.realtime_vla:
                infer = self.family.from_checkout(
                    name, self.checkout, views=self.views, horizon=self.horizon, tokens=self.tokens or ORDINARY_TOKENS
                )
            else:
                infer = self.family.baseline(name, horizon=self.horizon, steps=steps, device=self.device or "cuda")
        system = System(name, infer, steps, time.perf_counter() - started)
        if loading and (total := allocated() - before) > _HELD:
            self.held[project] = {"total": total, "peak_loading": loading[0]}
        if project in self.held:
            system.memory = dict(self.held[project])
        return system

    def source(self) -> dict[str, Any]:
        """What `measure.start` is to start."""
        return {"family": self.family.name, "views": self.views, "horizon": self.horizon}

    def about(self) -> dict[str, Any]:
        """What was timed, for the record."""
        if self.model is None:
            return {}
        return {**asdict(self.model.config), "kind": self.family.name, "views": self.views}


class CheckpointFactory:
    """Makes the systems of one checkpoint: a policy a configuration, by its name or file."""

    def __init__(
        self, checkpoint: str, names: Sequence[str], *, device: str | None, ceilings: Ceilings | None,
        tokens: int | None = None,
    ) -> None:  # fmt: skip
        """`tokens`: of the prompt, an ordinary one's if not given."""
        self.checkpoint, self.device, self.ceilings, self.tokens = checkpoint, device, ceilings, tokens
        self.names, self.baselines, self.default = tuple(names), (), tuple(names)
        given = {name: load_config(name) for name in names}
        # What one says of checkpoint and robot holds for those that say nothing, such as eager: all see the same.
        nothing = (None, CheckpointSpec())
        robots = {name: (config.preset, config.checkpoint) for name, config in given.items()}
        preset, spec = next((robot for robot in robots.values() if robot != nothing), nothing)
        silent = {n: replace(given[n], preset=preset, checkpoint=spec) for n in names if robots[n] == nothing}
        self.configs = {**given, **silent}
        self.family = family_of(base_and_lora(checkpoint)[0])
        self.processor: Any = None
        self.policies: dict[str, OptimizedPolicy] = {}
        self.loading: dict[str, int] = {}

    @functools.cached_property
    def sweep(self) -> tuple[int, ...]:
        """Denoising steps that are timed unless others are requested. Reads the checkpoint's settings."""
        found = load(self.checkpoint, next(iter(self.configs.values())), whole=False)
        return self.family.sweep_of(found.model.config)

    def make(self, name: str, steps: int) -> System:
        """A system by its configuration's name, with weights of its own."""
        started = time.perf_counter()
        with peak() as loading:
            if name not in self.policies:
                settings = self.configs[name]
                policy = OptimizedPolicy.from_pretrained(self.checkpoint, settings, device=self.device, num_steps=steps)
                self.policies[name], self.processor = policy, policy.processor
            system = timed(name, self.policies[name].with_steps(steps), started, self.ceilings, self.tokens)
        return with_peak(system, loading, self.loading)

    def source(self) -> dict[str, Any]:
        """What `measure.start` is to start."""
        return {"checkpoint": self.checkpoint}

    def about(self) -> dict[str, Any]:
        """What was timed, for the record."""
        return {"name": self.checkpoint, **next(iter(self.policies.values())).metadata["model"]}


def timed(
    name: str, policy: OptimizedPolicy, started: float, ceilings: Ceilings | None, tokens: int | None = None
) -> System:
    """A policy as a system, warm. `started`: `time.perf_counter()` before it was made; its work, and so its floors, are
    of an observation with a prompt of `tokens`, as `observer` makes them. Raises ConfigError as that does."""
    policy.warm_up()
    system = System(name, policy.infer, policy.num_steps, time.perf_counter() - started)
    system.memory = policy.memory()
    example = policy.processor.prepare(policy.processor.example() | _prompt(policy.processor, tokens))
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
    prompt = _prompt(processor, tokens)

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


def _prompt(processor: Any, tokens: int | None) -> dict[str, str]:
    """What an observation says in words so that its prompt has so many tokens; nothing for an ordinary one."""
    if tokens is None:
        return {}
    length, told = 0, {}
    for words in range(1, tokens + 1):
        told = processor.example(" ".join(["pick"] * words))
        try:
            length = len(processor.prepare(told).tokens)
        except ObservationError as error:
            raise ConfigError(f"prompt_tokens: expected at most {length}, got {tokens}") from error
        if length >= tokens:
            break
    if length != tokens:
        raise ConfigError(
            f"prompt_tokens: a prompt of this model has not {tokens}; the nearest that was tried {length}"
        )
    return {key: value for key, value in told.items() if isinstance(value, str)}


def with_peak(system: System, loading: Sequence[int], known: dict[str, int]) -> System:
    """The system, whose memory also says how much making its policy took at most: now, or, if it is in `known`, when
    it was made for another number of steps."""
    if loading and system.memory is not None:
        system.memory["peak_loading"] = known.setdefault(system.name, loading[0])
    return system


def allocated() -> int:
    """Bytes that this process has on the GPU now; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def free() -> None:
    """Give back what dropped systems held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
