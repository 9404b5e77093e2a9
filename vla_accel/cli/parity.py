"""`vla-accel parity CHECKPOINT`: compare a configuration with FP32 eager; exit status 1 if it disagrees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast

from vla_accel.cli.common import print_json, print_table, say, write_if
from vla_accel.cli.options import Argument, Count, OutputFile, PolicySource, Seed, StepOptions, Within
from vla_accel.config import AUTO
from vla_accel.errors import ConfigError
from vla_accel.files import require_writable_folder
from vla_accel.measure.recording import load_observations, named
from vla_accel.measure.statistics import fits
from vla_accel.progress import going_on
from vla_accel.report.page import check_path, write
from vla_accel.report.parity import agreement as figures
from vla_accel.report.parity import page, summary


@dataclass(frozen=True)
class Parity(StepOptions, PolicySource):
    """Compare final actions with the FP32 eager reference: same observations, same noise."""

    observations: Path | None = None
    """Observations that vla_accel.measure.recording.save_observations wrote. Default: random images."""
    model: str | None = None
    """Instead of a checkpoint: random weights of a model family's published size: pi05, pi0, smolvla, vla_jepa,
    evo1, molmoact2, starvla_groot, starvla_pi, starvla_oft, openvla_oft, groot (N1.7), groot_n16, groot_n15, act,
    diffusion_policy, multi_task_dit, fastwam or xvla."""
    count: Count = 64
    """Maximum number of observations."""
    draws: Count = 1
    """Noise draws for each observation."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    threshold: Annotated[float | None, Argument("COSINE"), Within(-1, 1)] = None
    """Smallest allowed cosine of the final actions. Default: by precision (BF16 0.9995, FP8 0.998); none with
    --model, where eager in the policy's dtype sets the largest error."""
    seed: Seed = 0
    """Seed of the noise and of random observations."""
    output: OutputFile = None
    """JSON report."""
    report: OutputFile = None
    """HTML file that opens offline: figures, tables, engines, conditions."""
    keep: bool = False
    """Keep the report next to the checkpoint, where engine auto reads it. Needs --observations and no --threshold."""


def main(options: Parity, words: list[str]) -> int:
    """Compare and report; 0 if the threshold holds."""
    import torch

    from vla_accel.families.family import family_named
    from vla_accel.families.loading import load
    from vla_accel.machine import hardware, software
    from vla_accel.measure.parity import Remembered, compare, eager_of, limits_of, random_limits, reference_of
    from vla_accel.measure.random_policy import random_observations, random_policy
    from vla_accel.policy import OptimizedPolicy, agreement

    if options.report is not None:
        check_path(options.report)
    if options.keep and (options.observations is None or options.threshold is not None or options.model):
        got = next((f"--{n}" for n in ("model", "threshold") if getattr(options, n) is not None), "no --observations")
        raise ConfigError(f"keep: expected a checkpoint, --observations and no --threshold of its own, got {got}")
    if options.model and (source := options.checkpoint or options.lora):
        raise ConfigError(f"model: expected no checkpoint with it, got {source}")
    checkpoint, name = options.checkpoint or "demo", Path(options.config or AUTO).stem
    settings = options.with_steps(options.settings())
    recorded = None if options.observations is None else load_observations(options.observations, options.count)
    if options.model and min(options.count, len(recorded or range(options.count))) < 2:
        raise ConfigError("count: expected at least 2 observations with --model, which compares errors between them")
    kept = None if options.model else load(checkpoint, settings, whole=False).kept
    if options.keep and kept is not None:
        require_writable_folder(kept, "keep")
    run = partial(compare, seed=options.seed, draws=options.draws, progress=say)
    eager_error = None
    with going_on(f"preparing {name} and FP32 eager", say):
        if options.model:
            family = family_named(options.model)
            drawn = partial(random_policy, family, seed=options.seed, device=options.device)
            policy, reference = drawn(eager_of(settings, family), with_reference=True)
            assert reference is not None
            reference = cast(OptimizedPolicy, Remembered(reference))  # eager and the policy are compared with it
        else:
            policy = OptimizedPolicy.from_pretrained(checkpoint, settings, device=options.device)
            exact = load(checkpoint, policy.config, device=policy.device, dtype=torch.float32)
            reference = reference_of(policy.config, exact)
    observations = recorded or random_observations(policy, options.count, seed=options.seed)
    with named(options.observations):
        if options.model:
            say("eager in the policy's dtype:")
            eager_error = run(policy, reference, observations, name="eager").relative_error
            del policy  # before another copy of the weights
            policy, _ = drawn(settings)
        precisions = policy.specs, policy.model.dtype
        limits = limits_of(*precisions) if eager_error is None else random_limits(*precisions, eager_error)
        if options.threshold is not None:
            limits = replace(limits, cosine=options.threshold)
        fit = [one for one in fits(policy.processor, recorded or ()) if one.rows]
        report = replace(run(policy, reference, observations, name=name, limits=limits), eager_error=eager_error)
    content = {
        **report.as_dict(), "model": policy.metadata["model"], "weights": options.model or checkpoint,
        "recorded": options.observations.name if options.observations else None,
        "statistics": {one.name: one.as_dict() for one in fit},
        "fingerprint": agreement.weights_of(policy.model),
        "hardware": hardware(policy.device), "software": software(),
    }  # fmt: skip
    kind = "observations" if recorded else "random observations"
    title = f"{report.name} against FP32 eager, {report.observations} {kind}, {policy.schedule}"
    table = figures(content)
    print_table(title, table.header, [[*map(str, row)] for row in table.rows])
    for one in fit:
        print("\n".join(one.lines()))
    print(summary(content))
    write_if(options.output, content)
    if options.report is not None:
        say(f"report: {write(page(content, ['vla-accel', 'parity', *words]), options.report)}")
    if options.keep and kept is not None:
        say(f"kept: {agreement.keep(content, kept, policy.specs, name)}")
    print_json(content)
    return 0 if report.passed else 1
