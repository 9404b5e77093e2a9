"""`vla-accel prompts CHECKPOINT INSTRUCTION …`: encode the instructions of a robot, once, next to its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from vla_accel.cli.options import Argument, Written
from vla_accel.config import load_config
from vla_accel.files import require_writable


@dataclass(frozen=True)
class Prompts:
    """Encode instructions with FastWAM's text encoder and add them to the checkpoint's prompts.safetensors, so that a
    policy never loads the encoder, which has 11 GB."""

    checkpoint: Annotated[str, Argument("CHECKPOINT", positional=True)]
    """A folder, or owner/name[@revision][/folder] on the hub."""
    instructions: Annotated[tuple[str, ...], Argument("INSTRUCTION", positional=True)]
    """The robot's instructions, word for word."""
    config: Annotated[str | None, Argument("CONFIG")] = None
    """A YAML or JSON file with settings that the checkpoint lacks: checkpoint.wan, checkpoint.tokenizer."""
    output: Annotated[Path | None, Written(suffix=".safetensors")] = None
    """Another file than the checkpoint's own."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""


def main(options: Prompts, words: list[str]) -> int:
    """Encode and write; the exit status."""
    from vla_accel.families.fastwam.text import FILE, write_prompts
    from vla_accel.families.loading import family_of, find

    settings = load_config(options.config)
    settings = settings if options.device is None else replace(settings, device=options.device)
    folder = find(options.checkpoint)
    path = options.output or folder / FILE
    require_writable(path, "output")
    prompts = family_of(folder).prompts(folder, settings)
    known = len(prompts.rows)
    for instruction in options.instructions:
        prompts.of(instruction, "instruction")
    write_prompts(path, prompts.template, prompts.rows)
    print(f"{path}: {len(prompts.rows)} instructions, {len(prompts.rows) - known} of them new")
    return 0
