"""`vla-accel flow CHECKPOINT`: the fewest denoising steps that end no further from the exact flow."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from vla_accel.cli.common import print_json, print_table, say
from vla_accel.cli.options import Count, OutputFile, PolicySource, Seed, Within, Written
from vla_accel.config import AUTO
from vla_accel.files import without_folders, write_json
from vla_accel.measure.host import busy_host
from vla_accel.measure.recording import load_observations, named
from vla_accel.progress import going_on
from vla_accel.report.flow import chosen_of, dimensions, judged, page, summary
from vla_accel.report.page import check_path, write


@dataclass(frozen=True)
class Flow(PolicySource):
    """Measure how far denoising schedules end from the exact flow of a checkpoint, and the time of a call with each.
    Writes flow.yaml with the fewest steps that end no further than the checkpoint's own, flow.json and a report."""

    observations: Path | None = None
    """Observations that vla_accel.measure.recording.save_observations wrote. Default: random images."""
    count: Count = 64
    """Maximum number of observations: one half searches times, the other evaluates."""
    steps: Annotated[tuple[int, ...], Within(1, 1000)] = (5, 4, 3, 2, 1)
    """Numbers of steps to try, with uniform and cubic times, and up to 5 with searched ones."""
    calls: Count = 50
    """Timed calls of each number of steps."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    seed: Seed = 0
    """Seed of the noise, the halves and random observations."""
    output: Annotated[Path, Written(folder=True)] = Path("runs/flow")
    """Folder of flow.yaml, flow.json and report.html."""
    report: OutputFile = None
    """HTML file. Default: report.html in the output folder."""


def main(options: Flow, words: list[str]) -> int:
    """Measure, write the files and report; the exit status."""
    from vla_accel.machine import hardware, software
    from vla_accel.measure.flow import PolicyFlow, exact_policy
    from vla_accel.measure.random_policy import random_observations
    from vla_accel.measure.schedules import check_count, judge, time_steps
    from vla_accel.measure.systems import free
    from vla_accel.policy import OptimizedPolicy
    from vla_accel.policy.agreement import weights_of
    from vla_accel.tune.search import write_config

    began = time.perf_counter()
    report = options.report or options.output / "report.html"
    check_path(report)
    checkpoint, settings = options.checkpoint or "demo", options.settings()
    settings = replace(settings, device=options.device or settings.device)
    recorded = None if options.observations is None else load_observations(options.observations, options.count)
    with named(options.observations):
        check_count(options.count if recorded is None else len(recorded))
    with going_on(f"preparing {checkpoint} in FP32 eager", say):
        exact = exact_policy(checkpoint, settings)
    if recorded is None:
        say("warning: random observations; the velocity may bend elsewhere on recorded ones (--observations)")
        recorded = random_observations(exact, options.count, seed=options.seed)
    configured = exact.family.schedule(exact.model.config, settings)
    with named(options.observations):
        flow = PolicyFlow(exact, recorded, seed=options.seed, progress=say)
        found = judge(flow, exact.schedule, steps=options.steps, configured=configured, seed=options.seed,
                      progress=say)  # fmt: skip
    del exact, flow
    free()
    with going_on(f"preparing {options.config or AUTO}", say):
        policy = OptimizedPolicy.from_pretrained(checkpoint, settings)
    cores: list[float | None] = []
    numbers = [row.schedule.steps for row in found.rows]
    timed = time_steps(policy, numbers, recorded, calls=options.calls, seed=options.seed, progress=say,
                       heard=cores.append)  # fmt: skip
    result = found.as_dict()
    kept = ("median_ms", "p10_ms", "p90_ms", "calls", "parts_ms")
    for row in result["rows"]:
        row |= {name: timed[row["num_steps"]][name] for name in kept}
    result |= {
        "checkpoint": checkpoint, "weights": weights_of(policy.model), "config": Path(options.config or AUTO).stem,
        "model": policy.metadata["model"],
        "observations": options.observations and options.observations.name, "engines": policy.ledger.as_list(),
        "others_busy": cores[0], "command": ["vla-accel", "flow", *without_folders(words)],
        "hardware": hardware(policy.device), "software": software(), "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    best, lines = found.chosen, summary(result)
    config = settings.with_steps(best.schedule.steps, best.setting)
    comment = "\n".join([f"Made by `{' '.join(result['command'])}`", *lines])
    written = write_config(config, options.output / "flow.yaml", comment)
    write_json(options.output / "flow.json", result)
    write(page(result), report)
    for table in (judged(result), dimensions(result)):
        print_table(table.title, table.header, [[*map(str, row)] for row in table.rows])
    print("\n".join(lines))
    if warning := busy_host({"cores": os.cpu_count(), "others_busy": cores[0] or 0.0}):
        say(f"warning: {warning}")
    say(f"configuration: {written}, as in `vla-accel serve {checkpoint} --config {written}`")
    say(f"report: {report}")
    line = {"chosen": chosen_of(result)["name"], "config": str(written), "output": str(options.output / "flow.json")}
    print_json({**line, "report": str(report)})
    return 0
