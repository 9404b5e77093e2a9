"""`vla-accel img2img`: a picture and a prompt to a PNG that carries its parameters."""

from __future__ import annotations

from vla_accel.cli.common import parse
from vla_accel.cli.generate import ImageOptions, run


def main(arguments: list[str]) -> int:
    """Run the command; the exit status."""
    return run(parse(ImageOptions, arguments, "vla-accel img2img", __doc__))
