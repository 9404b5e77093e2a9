"""`vla-accel txt2img`: a prompt to a PNG that carries its parameters."""

from __future__ import annotations

from vla_accel.cli.common import parse
from vla_accel.cli.generate import TextOptions, run


def main(arguments: list[str]) -> int:
    """Run the command; the exit status."""
    return run(parse(TextOptions, arguments, "vla-accel txt2img", __doc__))
