"""What the commands of the machine and of built engines may be asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vla_accel.cli.asked.policies import Checkpoint, CheckpointSource
from vla_accel.cli.options import Argument, Count, Folder


@dataclass(frozen=True)
class Doctor(CheckpointSource):
    """Say what this machine can run, and test it with the bundled checkpoint: one call in the default engine and one
    in FP32 eager must agree. The exit status is the test's. On a GPU the very first test compiles kernels.

    With a checkpoint, show its statistics of states and actions instead, and with recorded observations the share of
    values outside of them; the exit status is 1 where some are far outside."""

    checkpoint: Checkpoint = None
    """A folder, a bundled checkpoint's name or one on the hub."""
    config: str | None = None
    """Of a checkpoint: a YAML or JSON file with what the checkpoint does not say of itself: preset, tokenizer,
    embodiment."""
    observations: Path | None = None
    """Of a checkpoint: observations that vla_accel.measure.recording.save_observations wrote; a key `actions` holds
    the robot's actions."""
    count: Count = 256
    """Observations at most, spread over the file."""
    json: bool = False
    """Print one JSON document instead of the summary."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is the GPU if there is one."""


@dataclass(frozen=True)
class Cache:
    """List, check or empty the cache of built engines."""

    action: Annotated[Literal["list", "clear", "verify"], Argument(positional=True)]
    """list: what is there. verify: read every engine and compare it with its description; exit status 1 if one is
    damaged. clear: remove all."""
    cache: Folder = None
    """Folder of the engines; the user's cache folder if not given."""


@dataclass(frozen=True)
class Inspect:
    """Show what is inside an engine file."""

    engine: Annotated[Path, Argument("ENGINE", positional=True)]
    """A .engine file, or what the name of one in the user's cache folder begins with, as `vla-accel cache list`
    has it."""
    layers: bool = False
    """List every layer, in the table and in the JSON."""
