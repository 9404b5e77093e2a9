"""Which systems `vla-accel bench` times, and what it measures in addition to single calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError, DependencyError
from vla_accel.families.bench import bench_card
from vla_accel.measure.bench import System, run
from vla_accel.measure.overlap import recorded
from vla_accel.measure.systems import REALTIME_VLA_STEPS, CheckpointFactory, Factory, system_name

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
            raise ConfigError(f"steps: expected {reason['steps']} among them for {name}, got {got}")
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
                         "engines": policy.ledger.as_list()})  # fmt: skip
    return rows


def profile(factory: AnyFactory, name: str, steps: int) -> dict[str, Any]:
    """List the kernels of one call (`measure.overlap`); `graph`: whether it replays a CUDA graph."""
    policy = factory.policies[name].with_steps(steps)
    policy.warm_up()
    observation = policy.processor.example()
    found = recorded(lambda: policy.infer(observation))
    return {"steps": steps, "graph": policy.pipelines.newest.captured is not None, **found}
