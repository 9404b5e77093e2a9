"""The systems that `vla-accel bench` times: configurations and other projects' code with random weights of a published
size, or a checkpoint in several configurations."""

from __future__ import annotations

import functools
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from vla_accel.config import CheckpointSpec, EngineSpec, Kernels, NativeOptions, PolicyConfig, load_config
from vla_accel.errors import ConfigError, DependencyError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import Family, quantised_configs
from vla_accel.families.loading import base_and_lora, family_of, load
from vla_accel.fp8 import FORMATS, Scales
from vla_accel.measure.bench import System, peak, run
from vla_accel.measure.overlap import recorded
from vla_accel.measure.random_policy import noise_scales, random_policy
from vla_accel.measure.roofline import Ceilings, floors_ms
from vla_accel.nn.calibration import load_modelopt
from vla_accel.policy import OptimizedPolicy


def system_name(name: str) -> str:
    """The name of a system in reports: with hyphens instead of the underscores of configuration files."""
    return name.replace("_", "-")


def configs(family: Family[Any, Any, Any]) -> dict[str, PolicyConfig]:
    """Return this package's systems by name: eager, native BF16, and the shipped FP8 and INT8 configurations.

    Systems that end in "-host" have all components in 8 bits and the embeddings in host memory: the least memory of a
    GPU. "portable" systems run without Hopper's own kernels, as on other GPUs; "triton" systems also without the
    persistent denoise kernel.
    """

    def every(engine: Any) -> PolicyConfig:
        return PolicyConfig().with_specs({name: EngineSpec(engine) for name in family.parts})

    shipped = quantised_configs(family)
    shipped |= {name: shipped[file] for name, file in bench_card(family).aliases.items()}
    native = {"native-bf16": every("native"), **{system_name(name): shipped[name] for name in sorted(shipped)}}
    for name, config in [*native.items()]:
        if all(spec.precision in FORMATS for spec in config.specs(family.parts).values()):
            native[f"{name}-host"] = replace(config, native=NativeOptions(embeddings="host"))
    others = {
        name.replace("native", kernels): replace(config, native=replace(config.native, kernels=kernels))
        for kernels in get_args(Kernels)[1:]
        for name, config in native.items()
    }
    return {"eager": every("eager"), **native, **others}


REALTIME_VLA_STEPS = 10
"""Denoising steps that realtime-vla's kernels are written for."""
ORDINARY_TOKENS = 20
"""Default length of realtime-vla's prompt, about that of this package's example."""
_HELD = 1 << 20
"""Bytes. If a baseline allocates less, its project's model was already loaded."""


class _Policies:
    """The policies that a factory has made, and their memory while they loaded."""

    def __init__(self, device: str | None, ceilings: Ceilings | None, tokens: int | None) -> None:
        self.device, self.ceilings, self.tokens = device, ceilings, tokens
        self.processor: Any = None
        self.policies: dict[str, OptimizedPolicy] = {}
        self.loading: dict[str, int] = {}
        """Peak bytes of making each policy, in addition to those allocated before."""

    def _system(self, name: str, steps: int, build: Callable[[], OptimizedPolicy]) -> System:
        started = time.perf_counter()
        with peak() as loading:
            if name not in self.policies:
                self.policies[name] = build()
                self.processor = self.policies[name].processor
            system = timed(name, self.policies[name].with_steps(steps), started, self.ceilings, self.tokens)
        if loading and system.memory is not None:  # with other steps nothing is loaded again
            system.memory["peak_loading"] = self.loading.setdefault(name, loading[0])
        return system


class Factory(_Policies):
    """Makes the systems of one family with the same random weights. `checkout`: of realtime-vla, adds its systems."""

    def __init__(
        self, family: Family, *, views: int, horizon: int, device: str | None, ceilings: Ceilings | None,
        checkout: Path | None = None, tokens: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device, ceilings, tokens)
        card = bench_card(family)
        self.family, self.card, self.views, self.horizon, self.sweep = family, card, views, horizon, card.sweep
        self.checkout, self.configs = checkout, configs(family)
        self.default = ("eager", "native-bf16", *map(system_name, card.quantised))
        self.baselines = (*card.baselines, *(card.realtime_vla if checkout is not None else ()))
        self.names = (*self.configs, *self.baselines)
        self.scales: Scales | None = None
        self.held: dict[str, dict[str, int]] = {}
        """Memory of each other project's model."""

    def make(self, name: str, steps: int) -> System:
        """Return a system of `names`. Raises DependencyError for a baseline that is not installed."""
        if name in self.baselines:
            return self._baseline(name, steps)
        sizes: dict[str, Any] = {"horizon": self.horizon, "views": self.views, "device": self.device}
        if self.scales is None:
            # Before the measurement of memory: calibration needs the memory of the whole module.
            self.scales = noise_scales(self.family, self.configs[name], **sizes)

        def build() -> OptimizedPolicy:
            return random_policy(self.family, self.configs[name].with_steps(steps), scales=self.scales, **sizes)[0]

        return self._system(name, steps, build)

    def _baseline(self, name: str, steps: int) -> System:
        """Return another project's code. Its memory is what the GPU's allocator handed out while it was made."""
        free()
        project, before = name.partition("-")[0], allocated()
        started = time.perf_counter()
        with peak() as loading:
            if self.checkout is not None and name in self.card.realtime_vla:
                infer = self.card.from_checkout(
                    name, self.checkout, views=self.views, horizon=self.horizon, tokens=self.tokens or ORDINARY_TOKENS
                )
            else:
                infer = self.card.baseline(name, horizon=self.horizon, steps=steps, device=self.device or "cuda")
        system = System(name, infer, steps, time.perf_counter() - started)
        if loading and (total := allocated() - before) > _HELD:
            self.held[project] = {"total": total, "peak_loading": loading[0]}
        if project in self.held:
            system.memory = dict(self.held[project])
        return system

    def source(self) -> dict[str, Any]:
        """Return the argument of `measure.start.starts`."""
        return {"family": self.family.name, "views": self.views, "horizon": self.horizon}

    def about(self) -> dict[str, Any]:
        """Return a description of the model, for the report."""
        (policy, *_) = self.policies.values()
        return {**asdict(policy.model.config), "kind": self.family.name, "views": self.views}


class CheckpointFactory(_Policies):
    """Makes the systems of one checkpoint: a policy for each configuration, by its name or file."""

    def __init__(
        self, checkpoint: str, names: Sequence[str], *, device: str | None, ceilings: Ceilings | None,
        tokens: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device, ceilings, tokens)
        self.checkpoint, self.names, self.baselines, self.default = checkpoint, tuple(names), (), tuple(names)
        given = {name: load_config(name) for name in names}
        # Configurations without `preset` and `checkpoint`, such as eager, take those of the others: all must agree.
        nothing = (None, CheckpointSpec())
        robots = {name: (config.preset, config.checkpoint) for name, config in given.items()}
        preset, spec = next((robot for robot in robots.values() if robot != nothing), nothing)
        silent = {n: replace(given[n], preset=preset, checkpoint=spec) for n in names if robots[n] == nothing}
        self.configs = {**given, **silent}
        self.family = family_of(base_and_lora(checkpoint)[0])

    @functools.cached_property
    def sweep(self) -> tuple[int, ...]:
        """Default numbers of denoising steps, from the checkpoint's settings."""
        found = load(self.checkpoint, next(iter(self.configs.values())), whole=False)
        return bench_card(self.family).sweep_of(found.model.config)

    def make(self, name: str, steps: int) -> System:
        """Return the system of a configuration, with its own weights."""

        def build() -> OptimizedPolicy:
            settings = self.configs[name].with_steps(steps)
            return OptimizedPolicy.from_pretrained(self.checkpoint, settings, device=self.device)

        return self._system(name, steps, build)

    def source(self) -> dict[str, Any]:
        """Return the argument of `measure.start.starts`."""
        return {"checkpoint": self.checkpoint}

    def about(self) -> dict[str, Any]:
        """Return a description of the model, for the report."""
        return {"name": self.checkpoint, **next(iter(self.policies.values())).metadata["model"]}


AnyFactory = Factory | CheckpointFactory


def choose_systems(factory: AnyFactory, named: tuple[str, ...], *, fitted: bool) -> tuple[str, ...]:
    """Return the named systems, or the default ones with the first baseline, and those of a realtime-vla checkout
    unless some are named. `fitted`: images have the model's size; other sizes exclude the baselines."""
    if not isinstance(factory, Factory):
        return factory.names
    named = tuple(map(system_name, named))
    if not fitted:
        if others := [name for name in named if name in factory.baselines]:
            raise ConfigError(f"camera: expected systems that fit images themselves, got {', '.join(others)}")
        return named or tuple(dict.fromkeys((*factory.default[1:], "eager")))
    installed = factory.card.baselines
    systems = named or (*factory.default[1:], "eager", *installed[:1])
    of_checkout = factory.baselines[len(installed) :]
    return tuple(dict.fromkeys(systems if {*named} & {*of_checkout} else (*systems, *of_checkout)))


def without_scales(
    factory: AnyFactory, names: Sequence[str], say: Callable[[str], None], *, requested: bool
) -> dict[str, str]:
    """Return which systems are left out, and why, because nvidia-modelopt is missing to calibrate random weights.

    Raises DependencyError instead if the systems were requested by name.
    """
    if not isinstance(factory, Factory):
        return {}
    family = factory.family
    specs = {name: factory.configs[name].specs(family.parts) for name in names if name in factory.configs}
    calibrated = [name for name, spec in specs.items() if family.capabilities.needs_scales(spec)]
    try:
        if calibrated:
            load_modelopt()
    except DependencyError as error:
        if requested:
            raise
        say(f"left out: {', '.join(calibrated)}: {error}")
        return dict.fromkeys(calibrated, str(error))
    return {}


def timed_once(factory: AnyFactory, names: Sequence[str], sweep: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The number of steps, and the reason, for systems that are timed at one of several. Raises ConfigError if it is
    not in the sweep."""
    card = bench_card(factory.family)
    found = dict.fromkeys(card.baselines[1:], (sweep[0], "torch.compile takes minutes for each number"))
    found |= dict.fromkeys(card.realtime_vla, (REALTIME_VLA_STEPS, "its kernels are written for so many"))
    once = {name: {"steps": steps, "why": why} for name, (steps, why) in found.items() if name in names}
    for name, reason in once.items():
        if reason["steps"] not in sweep:
            got = ",".join(map(str, sweep))
            raise ConfigError(f"steps: expected a list with {reason['steps']} for {name}, got {got}")
    return once if len(sweep) > 1 else {}


def make_baselines(
    factory: AnyFactory, steps: Mapping[str, int], say: Callable[[str], None]
) -> tuple[dict[str, System], dict[str, str]]:
    """Make other projects' systems for these numbers of steps; return them, and why others are left out."""
    ready: dict[str, System] = {}
    left_out: dict[str, str] = {}
    for name, number in steps.items():
        try:
            ready[name] = factory.make(name, number)
        except DependencyError as error:
            left_out[name] = str(error)
            say(f"left out: {name}: {error}")
    return ready, left_out


def throughput(
    factory: AnyFactory, names: list[str], steps: int, batches: Sequence[int], calls: int, observer_of: Any,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Time batched calls of each policy; `observer_of(family, processor)` makes the observations."""
    rows = []
    for name in names:
        policy = factory.policies[name].with_steps(steps)
        observe = observer_of(policy.family, policy.processor)
        for batch in batches:
            rng = np.random.default_rng(batch)
            observations = [observe(rng) for _ in range(batch)]
            system = System(name, lambda _, p=policy, o=observations: p.infer_batch(o)[0], steps)
            row = run([system], lambda _: {}, calls=max(10, calls // 4))[0]
            say(f"{name}: batches of {batch}")
            rows.append({"system": name, "steps": steps, "batch": batch, "median_ms": row["median_ms"],
                         "per_second": 1e3 * batch / row["median_ms"], "parts_ms": row["parts_ms"],
                         "engines": policy.ledger.as_list(), **policy.schedule.described})  # fmt: skip
    return rows


def profile(factory: AnyFactory, name: str, steps: int) -> dict[str, Any]:
    """List the kernels of one call (`measure.overlap`); `graph`: whether it replays a CUDA graph."""
    policy = factory.policies[name].with_steps(steps)
    policy.warm_up()
    observation = policy.processor.example()
    found = recorded(lambda: policy.infer(observation))
    return {"steps": steps, "graph": policy.pipelines.newest.captured is not None, **found}


def timed(
    name: str, policy: OptimizedPolicy, started: float, ceilings: Ceilings | None, tokens: int | None = None
) -> System:
    """Return a warm policy as a system. `started`: `time.perf_counter()` before its making; `tokens`: as in
    `observer`. Raises ConfigError for a length of the prompt that the model does not take."""
    policy.warm_up()
    system = System(name, policy.infer, policy.num_steps, time.perf_counter() - started)
    system.memory = policy.memory()
    example = policy.processor.prepare(policy.processor.example() | _prompt(policy.processor, tokens))
    work = bench_card(policy.family).work(policy.model.config, example, policy.num_steps, policy.specs)
    if ceilings is not None:
        system.floors = floors_ms(work, ceilings)
    notes = {"engines": policy.ledger.as_list(), "work": {n: asdict(w) for n, w in work.items()}}
    system.notes = {**notes, **policy.schedule.described}
    return system


def observer(
    family: Family, processor: Any, tokens: int | None, camera: tuple[int, int] | None = None
) -> Callable[[np.random.Generator], dict[str, Any]]:
    """Return a function that makes random observations, with prompts of `tokens` tokens and images of `camera` (height,
    width) if these are not None. Raises ConfigError for a length that the model does not take."""
    card, prompt = bench_card(family), _prompt(processor, tokens)

    def observe(rng: np.random.Generator) -> dict[str, Any]:
        made = card.random_observation(processor, rng) | prompt
        images = [] if camera is None else [n for n, v in made.items() if isinstance(v, np.ndarray) and v.ndim == 3]
        return made | {name: rng.integers(0, 256, (*(camera or ()), 3), np.uint8) for name in images}

    return observe


def camera_size(text: str | None) -> tuple[int, int] | None:
    """Parse height and width in "480x640"; None gives None. Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if found is None:
        raise ConfigError(f"camera: expected height and width such as 480x640, got {text!r}")
    return int(found[1]), int(found[2])


def _prompt(processor: Any, tokens: int | None) -> dict[str, str]:
    """Return the text of an observation whose prompt has this many tokens; nothing for an ordinary one."""
    if tokens is None:
        return {}
    length, made = 0, {}
    for words in range(1, tokens + 1):
        made = processor.example(" ".join(["pick"] * words))
        try:
            length = len(processor.prepare(made).tokens)
        except ObservationError as error:
            raise ConfigError(f"prompt_tokens: expected at most {length}, got {tokens}") from error
        if length >= tokens:
            break
    if length != tokens:
        raise ConfigError(f"prompt_tokens: expected a length that a prompt can have, such as {length}, got {tokens}")
    return {key: value for key, value in made.items() if isinstance(value, str)}


def allocated() -> int:
    """Return the bytes that this process has on the GPU; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def free() -> None:
    """Release the memory of dropped systems."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
