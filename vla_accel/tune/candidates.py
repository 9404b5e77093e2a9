"""The candidates of `vla-accel tune`: engines, precisions, products kept in BF16, attention, steps. Each stage takes
what has been tried and returns more candidates."""

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
from vla_accel.tune.search import REFERENCE, Candidate, Tried

Lower = Mapping[str, Mapping[str, Products]]
"""By component, then engine: the products that it can compute in FP8, and the native engine in INT8."""
LOWER_PRECISIONS: tuple[EnginePrecision, ...] = ("fp8", "int8")
WITH_ATTENTION = ("vision", "kv_cache")
"""Components whose native programs have a choice of attention (`EngineSpec.attention`)."""
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "flash_attn", "fastest")


def reference(base: PolicyConfig, parts: Sequence[str]) -> Candidate:
    """FP32 eager, the reference of every comparison."""
    config = replace(base, precision="fp32", cuda_graph=False)
    return Candidate(REFERENCE, config.with_specs({name: EngineSpec("eager") for name in parts}), "the reference")


def engines(base: PolicyConfig, parts: Sequence[str], device: torch.device) -> tuple[list[Candidate], dict[str, str]]:
    """Each engine that this machine can run, for all components, and why the others are left out; on a GPU newer
    than Ada also the native engine with portable kernels, which can be faster for small models."""
    reasons = {name: engine.why_not(device) for name, engine in ENGINES.items()}
    gpu, found = Gpu.of(device), []
    for name in cast(list[EngineName], [name for name, reason in reasons.items() if reason is None]):
        config = replace(base, precision="bf16", strict=True).with_specs({n: EngineSpec(name) for n in parts})
        found.append(Candidate(f"{name} bf16", config, f"engine {name} for every component, BF16"))
        own_kernels = gpu is not None and gpu.portable.capability != gpu.capability
        if name == "native" and own_kernels and base.native.kernels == "auto":
            portable = replace(config, native=replace(base.native, kernels="portable"))
            why = "engine native for every component, BF16, without the kernels that this GPU alone has"
            found.append(Candidate("native portable bf16", portable, why))
    return found, {name: reason for name, reason in reasons.items() if reason is not None}


def precisions(tried: Sequence[Tried], lower_of: Callable[[], Lower]) -> list[Candidate]:
    """FP8 and INT8 in every set of components that can have it, in the fastest engine so far."""
    best = fastest(tried)
    if best is None:
        return []
    lower, found = lower_of(), []
    specs = best.candidate.config.specs(list(lower))
    for precision in LOWER_PRECISIONS:
        able = [name for name, spec in specs.items() if can_quantise(lower[name], spec.engine, precision)]
        for names in (names for n in range(1, len(able) + 1) for names in itertools.combinations(able, n)):
            low = {name: replace(specs[name], precision=precision) for name in names}
            title = f"{best.candidate.name.removesuffix(' bf16')} {precision} {' '.join(names)}"
            config = best.candidate.config.with_specs({**specs, **low})
            found.append(Candidate(title, config, f"{', '.join(names)} in {precision.upper()}"))
    return found


def products(tried: Sequence[Tried], lower_of: Callable[[], Lower], count: int) -> list[Candidate]:
    """Where a low precision in one component failed gate one: keep each set of `count` of its products in BF16, except
    sets that contain one that passed, which are slower. Weights alone are quantised in all products or none."""
    found = []
    for failed in tried:
        if failed.agreement is None or failed.agreement["passed"] or failed.candidate.other_policy:
            continue
        specs = failed.candidate.config.specs(list(lower_of()))
        low = [name for name, spec in specs.items() if spec.precision in FORMATS and not spec.keep]
        if len(low) != 1 or specs[low[0]].engine != "native" or not lower_of()[low[0]]["native"].activations:
            continue
        spec, names = specs[low[0]], lower_of()[low[0]]["native"].names
        passed = [t.candidate.config.specs(list(specs))[low[0]] for t in tried if t.dropped is None]
        enough = [set(one.keep) for one in passed if one.precision == spec.precision and one.keep]
        for keep in itertools.combinations(names, count) if count < len(names) else ():
            if not any(kept <= set(keep) for kept in enough):
                config = failed.candidate.config.with_specs({**specs, low[0]: replace(spec, keep=keep)})
                why = f"{spec.precision.upper()} without {' '.join(keep)}"
                found.append(Candidate(f"{failed.candidate.name}, but {' '.join(keep)}", config, why))
    return found


def together(tried: Sequence[Tried], parts: Sequence[str]) -> list[Candidate]:
    """The fastest low precision of each component that passed, combined, unless `precisions` has that combination."""
    best: dict[str, Tried] = {}
    for t in sorted((t for t in tried if t.dropped is None and t.latency), key=lambda t: t.ms):
        low = [n for n, s in t.candidate.config.specs(parts).items() if s.precision in FORMATS]
        if len(low) == 1:
            best.setdefault(low[0], t)
    specs = {name: t.candidate.config.specs(parts)[name] for name, t in best.items()}
    alike = len({spec.precision for spec in specs.values()}) == 1 and not any(s.keep for s in specs.values())
    if len(specs) < 2 or alike:
        return []
    base = next(iter(best.values())).candidate.config
    titles = (f"{s.precision} {n}" + (f" but {' '.join(s.keep)}" if s.keep else "") for n, s in specs.items())
    config = base.with_specs({**base.specs(parts), **specs})
    return [
        Candidate(f"native {', '.join(titles)}", config, "the low precisions that agreed, in all components at once")
    ]


def attentions(tried: Sequence[Tried], parts: Sequence[str]) -> list[Candidate]:
    """Other attention in the fastest so far, in the components that have a choice."""
    best = fastest(tried)
    specs = {} if best is None else best.candidate.config.specs(parts)
    native = {n: s for n, s in specs.items() if s.engine == "native" and n in WITH_ATTENTION}
    found = []
    for choice in ATTENTIONS if best is not None and native else ():
        assert best is not None
        config = best.candidate.config.with_specs(
            {**specs, **{n: replace(s, attention=choice) for n, s in native.items()}}
        )
        found.append(
            Candidate(f"{best.candidate.name}, {choice}", config, f"attention {choice} in {', '.join(native)}")
        )
    return found


def steps(tried: Sequence[Tried], numbers: Sequence[int]) -> list[Candidate]:
    """Other numbers of denoising steps in the fastest so far: another policy, which only success can judge."""
    best = (fastest(tried) or tried[0]).candidate
    unit = "step" if numbers == (1,) else "steps"
    return [
        Candidate(f"{best.name}, {n} {unit}", best.config.with_steps(n), f"{n} denoising step{'s' * (n > 1)}", True)
        for n in numbers
    ]


def fastest(tried: Sequence[Tried]) -> Tried | None:
    """The fastest that no gate dropped, except the reference."""
    kept = [t for t in tried[1:] if t.dropped is None and t.latency and not t.candidate.other_policy]
    return min(kept, key=lambda t: t.ms, default=None)
