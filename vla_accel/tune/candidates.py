"""What is tried: engines, precisions of components, products that stay as they are, attention, steps.

Each stage looks at what was found so far and proposes more. A stage knows a family by its component names and by what
its engines compute in FP8, and no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from vla_accel.config import Attention, EngineName, EnginePrecision, EngineSpec, PolicyConfig
from vla_accel.engines import ENGINES
from vla_accel.fp8 import FORMATS, Products, can_quantise
from vla_accel.kernels.gpu import Gpu
from vla_accel.tune.search import REFERENCE, Candidate, Stage, Tried

Lower = Mapping[str, Mapping[str, Products]]
"""By component, then engine: the products that it can compute in FP8, and the native engine in INT8."""
LOWER_PRECISIONS: tuple[EnginePrecision, ...] = ("fp8", "int8")
WITH_ATTENTION = ("vision", "kv_cache")
"""Components whose native programs can take a library's attention (`EngineSpec.attention`)."""


def reference(base: PolicyConfig, parts: Sequence[str]) -> Candidate:
    """FP32 eager, what everything is compared with."""
    config = replace(base, precision="fp32", cuda_graph=False)
    return Candidate(REFERENCE, config.with_specs({name: EngineSpec("eager") for name in parts}), "the reference")


def engines(base: PolicyConfig, parts: Sequence[str], device: torch.device) -> tuple[Stage, dict[str, str]]:
    """The stage that tries each engine that this machine can run, for all components; why the others are left out.

    The native engine is tried with portable kernels, too, where it would take others: those of a GPU with more than an
    Ada one has. They are made for small models as well as for large ones.
    """
    reasons = {name: engine.why_not(device) for name, engine in ENGINES.items()}
    able = cast(list[EngineName], [name for name, reason in reasons.items() if reason is None])
    gpu = Gpu.of(device)
    more_than_portable = gpu is not None and gpu.portable.capability != gpu.capability

    def stage(_: Sequence[Tried]) -> list[Candidate]:
        found = []
        for name in able:
            config = replace(base, precision="bf16", strict=True).with_specs({n: EngineSpec(name) for n in parts})
            found.append(Candidate(f"{name} bf16", config, f"engine {name} for every component, BF16"))
            if name == "native" and more_than_portable and base.native.kernels == "auto":
                options = replace(base.native, kernels="portable")
                why = "engine native for every component, BF16, without the kernels that this GPU alone has"
                found.append(Candidate("native portable bf16", replace(config, native=options), why))
        return found

    return stage, {name: reason for name, reason in reasons.items() if reason is not None}


def precisions(lower_of: Callable[[], Lower]) -> Stage:
    """FP8 and INT8 in every set of components that can have it, in the fastest engine so far. `lower_of`: asked only
    then. A GPU without the type refuses it, and the search says so."""

    def stage(tried: Sequence[Tried]) -> list[Candidate]:
        best = fastest(tried)
        if best is None:
            return []
        lower, found = lower_of(), []
        specs = best.candidate.config.specs(list(lower))
        for precision in LOWER_PRECISIONS:
            able = [name for name, spec in specs.items() if can_quantise(lower[name], spec.engine, precision)]
            sets = [chosen for n in range(1, len(able) + 1) for chosen in itertools.combinations(able, n)]
            for chosen in sets:
                low = {name: replace(specs[name], precision=precision) for name in chosen}
                name = f"{best.candidate.name.removesuffix(' bf16')} {precision} {' '.join(chosen)}"
                config = best.candidate.config.with_specs({**specs, **low})
                found.append(Candidate(name, config, f"{', '.join(chosen)} in {precision.upper()}"))
        return found

    return stage


def products(lower_of: Callable[[], Lower], count: int) -> Stage:
    """Where a low precision in one component failed gate one: each set of `count` of its products stays as it is, so
    that those that round worst are found. A set that holds one that sufficed is left out, because keeping more is
    slower. In denoise weights are stored in one byte all or none."""

    def stage(tried: Sequence[Tried]) -> list[Candidate]:
        found = []
        for failed in tried:
            if failed.agreement is None or failed.agreement["passed"] or failed.candidate.other_policy:
                continue
            specs = failed.candidate.config.specs(list(lower_of()))
            low = [name for name, spec in specs.items() if spec.precision in FORMATS and not spec.keep]
            if len(low) != 1 or specs[low[0]].engine != "native" or not lower_of()[low[0]]["native"].activations:
                continue
            spec, names = specs[low[0]], lower_of()[low[0]]["native"].names
            enough = [
                set(one.keep)
                for one in (t.candidate.config.specs(list(specs))[low[0]] for t in tried if t.dropped is None)
                if one.precision == spec.precision and one.keep
            ]
            for keep in itertools.combinations(names, count) if count < len(names) else ():
                if any(kept <= set(keep) for kept in enough):
                    continue
                config = failed.candidate.config.with_specs({**specs, low[0]: replace(spec, keep=keep)})
                why = f"{spec.precision.upper()} without {' '.join(keep)}"
                found.append(Candidate(f"{failed.candidate.name}, but {' '.join(keep)}", config, why))
        return found

    return stage


def together(parts: Sequence[str]) -> Stage:
    """The fastest low precision of each component that agreed, all at once, where they differ or a product of one had
    to be kept: all others are among `precisions`."""

    def stage(tried: Sequence[Tried]) -> list[Candidate]:
        best: dict[str, Tried] = {}
        for t in sorted((t for t in tried if t.dropped is None and t.latency), key=lambda t: t.ms):
            low = [n for n, s in t.candidate.config.specs(parts).items() if s.precision in FORMATS]
            if len(low) == 1:
                best.setdefault(low[0], t)
        chosen = {name: t.candidate.config.specs(parts)[name] for name, t in best.items()}
        alike = len({spec.precision for spec in chosen.values()}) == 1 and not any(s.keep for s in chosen.values())
        if len(chosen) < 2 or alike:
            return []
        base = next(iter(best.values())).candidate.config
        words = (f"{s.precision} {n}" + (f" but {' '.join(s.keep)}" if s.keep else "") for n, s in chosen.items())
        config = base.with_specs({**base.specs(parts), **chosen})
        why = "the low precisions that agreed, in all components at once"
        return [Candidate(f"native {', '.join(words)}", config, why)]

    return stage


def attentions(parts: Sequence[str], choices: Sequence[Attention] = ("sdpa", "flash_attn", "fastest")) -> Stage:
    """Other attention in the fastest so far, in those components of the native engine that have a choice."""

    def stage(tried: Sequence[Tried]) -> list[Candidate]:
        best = fastest(tried)
        if best is None:
            return []
        specs = best.candidate.config.specs(parts)
        native = {n: s for n, s in specs.items() if s.engine == "native" and n in WITH_ATTENTION}
        return [
            Candidate(
                f"{best.candidate.name}, {choice}",
                best.candidate.config.with_specs(
                    {**specs, **{name: replace(spec, attention=choice) for name, spec in native.items()}}
                ),
                f"attention {choice} in {', '.join(native)}",
            )
            for choice in choices
            if native
        ]

    return stage


def steps(numbers: Sequence[int]) -> Stage:
    """Fewer denoising steps in the fastest so far: another policy, for success alone to judge."""

    def stage(tried: Sequence[Tried]) -> list[Candidate]:
        best = fastest(tried) or (tried[0] if tried else None)
        if best is None:
            return []
        name = "step" if numbers == (1,) else "steps"
        return [
            Candidate(f"{best.candidate.name}, {n} {name}", replace(best.candidate.config, num_steps=n),
                      f"{n} denoising step{'s' * (n > 1)}", other_policy=True)
            for n in numbers
        ]  # fmt: skip

    return stage


def fastest(tried: Sequence[Tried]) -> Tried | None:
    """The fastest that no gate dropped, the reference aside; None where there is none."""
    kept = [t for t in tried[1:] if t.dropped is None and t.latency and not t.candidate.other_policy]
    return min(kept, key=lambda t: t.ms, default=None)
