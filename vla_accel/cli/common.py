"""What commands share: options, the policy they work on, tables, reports."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro

from vla_accel import machine
from vla_accel.cli.options import Count, OutputFile, Text, read
from vla_accel.config import PolicyConfig, load_config
from vla_accel.errors import ConfigError
from vla_accel.files import replacing

Dtype = Literal["fp32", "bf16", "fp16"]
T = TypeVar("T")


@dataclass(frozen=True)
class BenchOptions:
    """Options of every benchmark of image models."""

    dtype: Dtype = "bf16"
    rounds: Count = 5
    """Calls timed of each system; the systems take turns."""
    device: str = "auto"
    output: OutputFile = None
    """Also write the JSON here."""


Checkpoint = Annotated[
    str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]", help_behavior_hint="(default: demo)")
]


@dataclass(frozen=True)
class PolicySource:
    """What a command of policies works on."""

    checkpoint: Checkpoint = None
    """A folder, a bundled checkpoint's name or one on the hub."""
    config: Annotated[str | None, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="(default: auto)")] = None
    """How it runs: a shipped configuration's name (native_fp8), or a YAML or JSON file. auto takes the fastest engines
    that lose nothing on this machine."""
    lora: Text = None
    """A LoRA adapter's folder or name on the hub, folded into the checkpoint's weights."""

    def settings(self) -> PolicyConfig:
        """The configuration, with what the options say beside it."""
        settings = load_config(self.config)
        return settings if self.lora is None else settings.with_lora(self.lora)


S = TypeVar("S", bound=PolicySource)
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


def parse_source(kind: type[S], arguments: Sequence[str], program: str) -> S:
    """Options of a command on a checkpoint; also in the former spelling, `CONFIG.yaml --checkpoint CHECKPOINT`."""
    words, named = without_option(arguments, "--checkpoint")
    given = parse(kind, words, program)
    first = given.checkpoint
    if first is not None and first.endswith(CONFIG_SUFFIXES):
        if given.config is not None:
            raise ConfigError(f"config: expected one, got {first} and {given.config}")
        return replace(given, checkpoint=named, config=first)
    if named is None:
        return given
    if first is not None:
        raise ConfigError(f"checkpoint: expected one, got {first} and {named}")
    return replace(given, checkpoint=named)


def without_option(arguments: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """The words of a command line without `option VALUE` or `option=VALUE`, and the value."""
    words = list(arguments)
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            return words[:index] + words[index + 2 :], words[index + 1]
        if word.startswith(f"{option}="):
            return words[:index] + words[index + 1 :], word.partition("=")[2]
    return words, None


def parse(kind: type[T], arguments: Sequence[str], program: str, description: str | None = None) -> T:
    """Options of a command from its words (`options.read`).

    `description`: for `--help`; the docstring of `kind` if not given.
    """
    return read(kind, list(arguments), program, inspect.cleandoc(description or kind.__doc__ or ""))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on the console; numbers to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 1 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A file or pipe has no width to keep to.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


PARITY_COLUMNS = ("MSE", "cosine", "max error", "PSNR dB")


def parity_cells(parity: Mapping[str, float | None]) -> list[str]:
    """The cells of `PARITY_COLUMNS`; what is not finite is a dash."""
    formats = {"mse": ".2e", "cosine": ".6f", "max_error": ".3g", "psnr_db": ".1f"}
    return ["-" if parity[k] is None else format(parity[k], f) for k, f in formats.items()]


def say(text: str) -> None:
    """A line for people: how far it is, where something was written."""
    print(text, file=sys.stderr, flush=True)


def write_json(path: Path | None, content: Any) -> None:
    """Write a JSON file whole, if a path is given."""
    if path is not None:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")


def report(
    command: str, options: BenchOptions, device: torch.device, began: float, passed: bool, content: Mapping[str, Any]
) -> dict[str, Any]:
    """What every benchmark's JSON holds, round its own content. `began`: `time.perf_counter()` at the start."""
    return {
        "command": command,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "hardware": machine.hardware(device),
        "software": machine.software(),
        **content,
        "seconds": round(time.perf_counter() - began, 1),
        "passed": passed,
    }


def finish(summary: dict[str, Any], output: Path | None) -> int:
    """Write a report and print it as the last line; the exit status."""
    write_json(output, summary)
    print(json.dumps(summary))
    return 0 if summary["passed"] else 1
