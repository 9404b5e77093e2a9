"""`vla-accel parity CHECKPOINT`: how well a configuration agrees with FP32 eager; exit status 1 where it does not."""

from __future__ import annotations

from pathlib import Path

import torch

from vla_accel.cli.asked.policies import Parity
from vla_accel.cli.common import print_json, print_table, say, write_asked
from vla_accel.config import AUTO
from vla_accel.errors import ConfigError
from vla_accel.families.loading import load
from vla_accel.files import require_writable_folder
from vla_accel.machine import hardware, software
from vla_accel.measure.parity import compare, reference_of
from vla_accel.measure.random_policy import random_observations, random_policy
from vla_accel.measure.recording import load_observations, named
from vla_accel.measure.statistics import fits
from vla_accel.policy import OptimizedPolicy, agreement
from vla_accel.progress import going_on
from vla_accel.report.page import check_path, write
from vla_accel.report.parity import page


def main(chosen: Parity, words: list[str]) -> int:
    """Compare and report; 0 if the threshold holds."""
    if chosen.report is not None:
        check_path(chosen.report)
    if chosen.keep and (chosen.observations is None or chosen.threshold is not None or chosen.model):
        got = next((f"--{n}" for n in ("model", "threshold") if getattr(chosen, n) is not None), "no --observations")
        raise ConfigError(f"keep: expected a checkpoint, --observations and no --threshold of its own, got {got}")
    if chosen.model and (beside := chosen.checkpoint or chosen.lora):
        raise ConfigError(f"model: expected no checkpoint beside it, got {beside}")
    checkpoint, name = chosen.checkpoint or "demo", Path(chosen.config or AUTO).stem
    settings = chosen.settings()
    recorded = None if chosen.observations is None else load_observations(chosen.observations, chosen.count)
    kept = None if chosen.model else load(checkpoint, settings, whole=False).kept
    if chosen.keep and kept is not None:
        require_writable_folder(kept, "keep")
    with going_on(f"preparing {name} and FP32 eager", say):
        if chosen.model:
            policy, reference = random_policy(chosen.model, settings, seed=chosen.seed, steps=chosen.num_steps,
                                              device=chosen.device, with_reference=True)  # fmt: skip
        else:
            policy = OptimizedPolicy.from_pretrained(
                checkpoint, settings, device=chosen.device, num_steps=chosen.num_steps
            )
            exact = load(checkpoint, policy.config, device=policy.device, dtype=torch.float32)
            reference = reference_of(policy.config, exact)
    assert reference is not None
    observations = recorded or random_observations(policy, chosen.count, seed=chosen.seed)
    with named(chosen.observations):
        fit = [one for one in fits(policy.processor, recorded or ()) if one.rows]
        report = compare(policy, reference, observations, name=name, seed=chosen.seed, threshold=chosen.threshold,
                         draws=chosen.draws, progress=say)  # fmt: skip
    actions = {"actions (normalised)": report.actions, "actions (robot)": report.robot_actions}
    rows = []
    for label, a in {**report.components, **actions}.items():
        cosines = (f"{value:.6f}" for value in (a.cosine, a.median_cosine, a.worst_cosine))
        rows.append([label, *cosines, f"{a.max_error:.2e}", f"{a.mean_error:.2e}"])
    kind = "observations" if recorded else "random observations"
    title = f"{report.name} against FP32 eager, {report.observations} {kind}, {report.num_steps} steps"
    print_table(title, ["", "cosine", "median", "worst", "max error", "mean error"], rows)
    if report.flipped:
        chunks, rest = report.observations * report.draws, report.rest_cosine
        share = f"{100 * report.flipped_low:.2f} to {100 * report.flipped_high:.2f} % of them, 95 %"
        print(f"a command fell the other way in {report.flipped} of {chunks} chunks ({share})"
              + ("" if rest is None else f"; cosine of the rest {rest:.6f}"))  # fmt: skip
    if report.sensitivity is None:
        print("one observation: what another would change, and the error beside it, cannot be told")
    else:
        error = "" if report.relative_error is None else f"; the error is {100 * report.relative_error:.2f} % of that"
        print(f"another observation changes the actions by {100 * report.sensitivity:.1f} % of their norm{error}")
    for one in fit:
        print("\n".join(one.lines()))
    if report.passed:
        print(f"agrees: cosine {report.rest_cosine:.6f}, at least {report.threshold} wanted")
    else:
        print(f"does NOT agree: {'; '.join(report.reasons)}")
    for entry in policy.ledger.entries.values():
        if entry.fell_back:
            print(f"that is not {name}: {entry.component} ran in {entry.used}, not in {entry.requested}")
    content = {
        **report.as_dict(), "model": policy.metadata["model"], "weights": chosen.model or checkpoint,
        "recorded": chosen.observations.name if chosen.observations else None,
        "statistics": {one.name: one.as_dict() for one in fit},
        "fingerprint": agreement.weights_of(policy.model),
        "hardware": hardware(policy.device), "software": software(),
    }  # fmt: skip
    write_asked(chosen.output, content)
    if chosen.report is not None:
        say(f"report: {write(page(content, ['vla-accel', 'parity', *words]), chosen.report)}")
    if chosen.keep and kept is not None:
        say(f"kept: {agreement.keep(content, kept, policy.specs, name)}")
    print_json(content)
    return 0 if report.passed else 1
