"""The options that the commands of all benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eval.harness.benchmark import Benchmark
from eval.harness.policies import Chunking
from eval.harness.protocol import REPLAN_STEPS, SEED
from vla_accel.cli.options import Argument, Number, OutputFile, OutputFolder, ViewTarget, Within, Written

RUNS = Path("runs")
"""Folder of results without a name."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of every benchmark. The command of a benchmark sets defaults for `suite` and `policy`."""

    suite: str
    """Which tasks; several suites with commas between them."""
    steps: Annotated[tuple[int, ...], Within(1)] = ()
    """Denoising steps: 3, or 1,2,3,5,10 for a sweep. Default: the policy's own."""
    quick: bool = False
    """The first 3 tasks with 3 trials each, and a rollout video; --tasks and --trials go first."""
    tasks: Annotated[str | None, Argument("N,...")] = None
    """Task indices, such as "0-2,5". Default: all."""
    trials: int | None = None
    """Episodes per task, each from a shipped start state. Default: the benchmark's."""
    policy: str
    """A checkpoint's folder or name on the hub, or ws://host:port."""
    config: str | None = None
    """Of a policy in this process: a PolicyConfig file (YAML or JSON), or a shipped configuration's name. Default: the
    policy's own."""
    api_key_file: Path | None = None
    """Of a policy at ws://host:port: the file with the server's key."""
    tls_ca: Path | None = None
    """Of a policy at wss://host:port: the file with the certificates to trust. Default: the system's."""
    device: str = "auto"
    """auto, cpu or cuda."""
    seed: int = SEED
    """Seed of the simulator and of the policy's noise."""
    output: Annotated[Path | None, Written(suffix=".json")] = None
    """Result JSON. Default: runs/BENCHMARK/, named after the run. The episode log goes into the same folder."""
    video: OutputFolder = None
    """Folder for videos of the first trial of each task. With --quick one is made in any case."""
    film_all: bool = False
    """Film every episode, with the images of the policy, into --video's folder or one named after the output, so that
    `eval.paired --report` can show failed episodes next to those of the reference."""
    report: OutputFile = None
    """HTML file that opens offline: pictures, tables, videos, conditions. With --quick one is made in any case."""
    view: ViewTarget = None
    """Show camera images, chunks, executed actions and latencies in rerun: "rerun" starts its viewer,
    "rerun://HOST:PORT" names one that runs, "rerun:FILE.rrd" records into a file. For one simulator in this process."""
    compare: tuple[Path, ...] = ()
    """Result files whose latencies the figures also show. Default: stored runs of the same model on the
    same kind of device."""
    workers: Number = None
    """Simulators that play at once. More are faster, but they slow down each other's policy calls. Default: 1, or one
    for each core of a Ray cluster."""
    ray: str | None = None
    """Play on a Ray cluster: "auto" for the one that this machine belongs to, HOST:PORT for another, "local" for one
    that is started here and ends with the run. One policy for each GPU, or each machine if there is none."""
    max_steps: int | None = None
    """Actions before an episode counts as a failure. Default: the benchmark's limit for the suite."""
    stress: Annotated[str | None, Argument("NAME=VALUE,...")] = None
    """Disturbances of what the policy sees, such as "noise=0.1,brightness=0.8", or of when its actions arrive
    ("latency=2", in control ticks). An unknown name lists all of them."""
    chunking: Chunking = "plain"
    """rtc: each chunk is guided to join the rest of the last one (real-time chunking). warm: each chunk starts from the
    rest of the last one, for a configuration with warm_start."""
    expert: bool = False
    """Play the scripted expert instead of a policy, to check the simulator."""
    target_hz: float = 20.0
    """Rate for which the report computes what each component would have to reach."""
    replan: int = REPLAN_STEPS
    """Actions executed of each predicted chunk."""
    overwrite: bool = False
    """Start again instead of continuing an earlier run."""
    retry_errors: bool = False
    """Play episodes again that an earlier launch ended with an error."""
    shard: Annotated[str | None, Argument("K/N")] = None
    """Play a part of the run, such as "3/16" (counted from 1), for `python -m eval.merge` to put together."""

    def played(self, benchmark: Benchmark) -> Benchmark:
        """The benchmark as these arguments have it."""
        return benchmark
