"""The command line: `vla-accel COMMAND …`. Each command is a module of its own, imported when it is called."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

from vla_accel.errors import VlaAccelError

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("vla_accel.cli.doctor", "what this machine can run, what is missing, and a self-test"),
    "bench": ("vla_accel.cli.bench", "time a policy beside its baselines and its floor, in turns"),
    "parity": ("vla_accel.cli.parity", "how well a configuration agrees with FP32 eager; fails where it does not"),
    "tune": ("vla_accel.cli.tune", "the fastest configuration on this machine that loses nothing, with evidence"),
    "calibrate": ("vla_accel.cli.calibrate", "FP8 scales of a checkpoint from recorded observations"),
    "build": ("vla_accel.cli.build", "build the TensorRT engines of a configuration, also for other GPUs"),
    "cache": ("vla_accel.cli.cache", "list, verify or clear the built engines"),
    "inspect": ("vla_accel.cli.inspect", "layers, precisions, profiles and size of a built engine"),
    "convert": ("vla_accel.cli.convert", "an openpi JAX checkpoint to safetensors"),
    "serve": ("vla_accel.cli.serve", "serve a policy to openpi's clients"),
    "bench-server": ("vla_accel.cli.bench_server", "time calls over a server: what it adds, and where"),
    "build-vae": ("vla_accel.cli.build_vae", "build TensorRT engine files of an autoencoder"),
    "build-unet": ("vla_accel.cli.build_unet", "build a TensorRT engine file of Stable Diffusion's UNet"),
    "bench-vae": ("vla_accel.cli.bench_vae", "time an autoencoder: eager, torch.compile, native, TensorRT in turns"),
    "bench-unet": ("vla_accel.cli.bench_unet", "time Stable Diffusion the same way"),
    "bench-qwen": ("vla_accel.cli.bench_qwen", "time Qwen-Image end to end: transformer and autoencoder, fast or not"),
    "txt2img": ("vla_accel.cli.txt2img", "a prompt to a picture"),
    "img2img": ("vla_accel.cli.img2img", "a picture and a prompt to a picture"),
    "precision": ("vla_accel.cli.precision", "a model in BF16 or FP16: dtypes, ranges, memory, latency"),
}
"""Command to (module, one line of help). The module has `main(arguments: list[str]) -> int`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 a check failed or an error was reported, 2 wrong usage, 130
    interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from vla_accel import __version__

        print(f"vla-accel {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f": did you mean {nearest[0]}?" if nearest else ""
        print(f"vla-accel: unknown command {name}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    status, said = ended(lambda: importlib.import_module(COMMANDS[name][0]).main(rest))
    if said is not None:
        print(f"vla-accel {name}: {said}", file=sys.stderr)
    return status


def ended(run: Callable[[], int]) -> tuple[int, str | None]:
    """The exit status of a program, and what is to be said of its end: 1 an error that a user can mend, 130
    interrupted."""
    try:
        return run(), None
    except VlaAccelError as error:
        return 1, str(error)
    except OSError as error:
        # A file that cannot be read says so best itself; anything else is a mistake of ours.
        if error.filename is None:
            raise
        return 1, f"{error.filename}: {error.strerror}"
    except KeyboardInterrupt:
        return 130, "interrupted"


def usage() -> str:
    """The list of commands."""
    width = max((len(name) for name in COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items()]
    return "\n".join(["usage: vla-accel COMMAND [options]", "", *lines, "", "vla-accel COMMAND --help says more."])
