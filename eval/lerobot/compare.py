"""Choose a folder of a training run, and compare lerobot's own code with this package on held-out start states.

    python -m eval.lerobot.compare runs/lerobot/act --selection runs/lerobot/selection \\
        --held-out runs/lerobot/held_out --output act.json

The last `--tried` folders that `eval.lerobot.train` saved play the start states for the selection, in BF16. The best
one, of equals the latest, then plays the held-out ones: by lerobot's code, by this package in eager FP32, and in native
BF16. The JSON is that of `eval.paired`, with lerobot's code as the reference.

Results are in `episodes` of the run. The same command continues an interrupted comparison, and plays episodes again
that ended in an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from eval import paired
from eval.harness.log import log_path
from eval.harness.report import read_result
from eval.script import run_script
from vla_accel.cli.common import say
from vla_accel.cli.options import Argument, Count, OutputFile, Within
from vla_accel.errors import ConfigError

PLAYED = {"lerobot": (), "eager_fp32": ("--config", "eager_fp32"), "native": ("--config", "native")}
"""Options of each run over the held-out start states, the reference first."""


@dataclass(frozen=True)
class Arguments:
    """Compare lerobot's code with this package on a policy that lerobot trained."""

    run: Annotated[Path, Argument("RUN", positional=True)]
    """Output of eval.lerobot.train."""
    selection: Path
    """Start states for the selection (eval.demo.states): a folder that has one of the suite."""
    held_out: Path
    """Start states for the comparison, as `selection`."""
    output: OutputFile = None
    """JSON report."""
    suite: str = "libero_spatial"
    """Suite of the task."""
    task: Annotated[int, Within(0)] = 0
    """The task."""
    tried: Count = 5
    """Folders for the selection, the last ones."""
    selection_trials: Count = 48
    """Episodes of each folder for the selection."""
    trials: Count = 200
    """Episodes of the comparison."""
    replan: Count = 8
    """Actions executed of each chunk."""
    workers: Count = 1
    """Simulators that play at once."""
    device: str = "auto"
    """auto, cpu or cuda."""


def best(results: Mapping[Path, Mapping[str, Any]]) -> Path:
    """The folder with the most episodes won, of equals the latest. Raises ConfigError if an episode crashed."""
    won: dict[Path, int] = {}
    for folder, result in results.items():
        episodes = result["episodes"]
        if crashed := next((one["error"] for one in episodes if one["error"]), None):
            raise ConfigError(f"{folder}: expected episodes without errors, got {crashed}")
        won[folder] = sum(one["success"] for one in episodes)
        say(f"{folder}: {won[folder]} of {len(episodes)} episodes")
    return max(sorted(won), key=lambda folder: (won[folder], folder.name))


def play(chosen: Arguments, policy: str, starts: Path, trials: int, output: Path, options: Sequence[str]) -> Any:
    """Play the episodes that `output` lacks, in a process of its own; returns the result. Raises ConfigError if it
    cannot be played, or `output` is the result of another policy, other start states or other options."""
    words = ["--policy", policy, "--suite", chosen.suite, "--tasks", str(chosen.task), "--trials", str(trials)]
    words += ["--starts", str(starts), "--replan", str(chosen.replan), "--workers", str(chosen.workers)]
    words += ["--device", chosen.device, "--retry-errors", "--output", str(output), *options]
    if log_path(output).is_file():
        output.unlink(missing_ok=True)  # a traceback, whose status is 1 too, must not leave an earlier result
    command = [sys.executable, "-m", "eval.libero", *words]
    status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if status not in (0, 1):  # 1: some episodes ended in an error
        raise ConfigError(
            f"{policy}: python -m eval.libero ended with status {status}, for the reason above; if {output} belongs to "
            "another run, move it and its log away"
        )
    return read_result(output)[0]


def run(chosen: Arguments) -> None:
    """Select, play and compare."""
    folders = sorted(one for one in chosen.run.glob("checkpoints/[0-9]*") if (one / "pretrained_model").is_dir())
    if not folders:
        raise ConfigError(f"run: expected checkpoints/<step>/pretrained_model, found none in {chosen.run}")
    folders, results = folders[-chosen.tried :], chosen.run / "episodes"
    if chosen.output is not None and results.resolve() in chosen.output.resolve().parents:
        raise ConfigError(f"output: expected a file outside {results}, where the runs are, got {chosen.output}")

    def policy(folder: Path) -> str:
        return str(folder / "pretrained_model")

    folder = best(
        {
            one: play(chosen, policy(one), chosen.selection, chosen.selection_trials,
                      results / f"selection_{one.name}.json", PLAYED["native"])
            for one in folders
        }
    )  # fmt: skip
    say(f"chosen: {folder}")
    paths = [results / f"{name}.json" for name in PLAYED]
    for (name, options), path in zip(PLAYED.items(), paths, strict=True):
        prefix = "lerobot:" if name == "lerobot" else ""
        play(chosen, f"{prefix}{policy(folder)}", chosen.held_out, chosen.trials, path, options)
    training = json.loads((folder / "pretrained_model" / "train_config.json").read_text())
    note = (
        f"Task {chosen.task}, one policy of lerobot's trainer after {int(folder.name)} updates of "
        f"{training['batch_size']} observations. The simulators of a run shared one policy and its GPU, which also "
        "rendered."
    )
    paired.run(paired.Arguments(paths[0], tuple(paths[1:]), output=chosen.output, note=note))


if __name__ == "__main__":
    sys.exit(run_script("eval.lerobot.compare", Arguments, run, None))
