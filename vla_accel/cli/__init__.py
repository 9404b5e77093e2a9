"""The command line: `vla-accel COMMAND …`. Each command is a module of its own, imported once its options are read."""

from __future__ import annotations

import errno
import importlib
import logging
import select
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vla_accel.errors import VlaAccelError, nearest

COMMANDS: dict[str, tuple[str, str, str]] = {
    "doctor": ("doctor", "engines.Doctor", "say what this machine can run; show a checkpoint's statistics"),
    "bench": ("bench", "policies.Bench", "time whole calls of a policy beside its baselines and its floor, in turns"),
    "parity": ("parity", "policies.Parity", "compare a configuration with FP32 eager; fails where it does not agree"),
    "tune": ("tune", "policies.Tune", "find the fastest configuration here that loses nothing, with the evidence"),
    "calibrate": ("calibrate", "policies.Calibrate", "measure FP8 scales of a checkpoint on recorded observations"),
    "build": ("build", "policies.Build", "build the TensorRT engines of a configuration, also for other GPUs"),
    "cache": ("cache", "engines.Cache", "list, verify or clear the built engines; clear compiled kernels, too"),
    "inspect": ("inspect", "engines.Inspect", "show layers, precisions, profiles and size of a built engine"),
    "convert": ("convert", "policies.Convert", "turn an openpi JAX checkpoint into safetensors"),
    "serve": ("serve", "serve.Serve", "serve a policy to openpi's clients"),
    "bench-server": ("bench_server", "bench_server.BenchServer", "time calls over a server: what it adds, and where"),
    "build-vae": ("build_images", "images.BuildVae", "build TensorRT engine files of an autoencoder"),
    "build-unet": ("build_images", "images.BuildUnet", "build a TensorRT engine file of Stable Diffusion's UNet"),
    "bench-vae": ("bench_vae", "images.BenchVae", "time an autoencoder: eager, compiled, native, TensorRT, in turns"),
    "bench-unet": ("bench_unet", "images.BenchUnet", "time Stable Diffusion the same way"),
    "bench-qwen": ("bench_qwen", "images.BenchQwen", "time Qwen-Image: transformer and autoencoder, fast or not"),
    "txt2img": ("generate", "images.TextToImage", "make a picture from a prompt"),
    "img2img": ("generate", "images.ImageToImage", "make a picture from a picture and a prompt"),
    "precision": ("precision", "images.Precision", "show a model in BF16 or FP16: dtypes, ranges, memory, latency"),
}
"""By command: its module in `vla_accel.cli`, its options (in that module, or in `asked`), and one line of help. The
module has `main(chosen: OPTIONS, words: list[str]) -> int`; `words` are the arguments as typed, for the record."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 2 wrong usage, else as `ended` says."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    status, said = ended(lambda: run(words))
    if said is not None:
        print(f"vla-accel {words[0]}: {said}", file=sys.stderr)
    return status


def run(words: list[str]) -> int:
    """One command: its options are read, then its module is imported, which takes seconds."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from vla_accel import __version__

        print(f"vla-accel {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        print(f"vla-accel: unknown command {name}{hint or '; vla-accel --help lists them'}", file=sys.stderr)
        return 2
    from vla_accel.cli.options import read

    chosen = read(options_of(name), rest, f"vla-accel {name}")
    return importlib.import_module(f"vla_accel.cli.{COMMANDS[name][0]}").main(chosen, rest)


def options_of(name: str) -> Any:
    """The options class of a command."""
    module, options, _ = COMMANDS[name]
    home, _, kind = options.partition(".")
    package = "vla_accel.cli" if home == module else "vla_accel.cli.asked"
    return getattr(importlib.import_module(f"{package}.{home}"), kind)


def ended(run: Callable[[], int]) -> tuple[int, str | None]:
    """The exit status of a program, and what is to be said of its end: 0 done, 1 a check failed or an error that a user
    can mend, 130 interrupted, 141 what read its output has gone."""
    # SIGTERM, of `timeout` or a scheduler, is an interrupt like Ctrl-C: what was begun is put away, no process stays.
    asked = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    # A shell's script ignores Ctrl-C for what it runs in the background.
    heard = (signal.SIGTERM, *([signal.SIGINT] if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else []))
    before = {number: signal.signal(number, interrupt) for number in heard}
    # Unless somebody set up logging, what the package tells (not a server) stands on standard error as all warnings do.
    log, plain = logging.getLogger("vla_accel"), logging.StreamHandler()
    level = log.level
    plain.addFilter(lambda r: not logging.root.handlers and (r.name == log.name or r.levelno > logging.INFO))
    log.addHandler(plain)
    log.setLevel(logging.INFO)
    # What diffusers' pipelines import would rather have torchvision, and warns a user who can change nothing.
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
    try:
        try:
            return run(), None
        except Exception as error:
            # A library in whose code the interrupt came may have made an error of its own of it: matplotlib does.
            if asked:
                raise KeyboardInterrupt from error
            raise
        finally:
            print(end="", flush=True)  # not at the interpreter's end, where nobody could say what went wrong
    except VlaAccelError as error:
        return 1, str(error)
    except OSError as error:
        gone = isinstance(error, BrokenPipeError) and _reader_is_gone()
        # A file that cannot be read says so best itself; of the rest, what is no full disk is a mistake of ours.
        if error.filename is None and not gone and error.errno != errno.ENOSPC:
            raise
        if error.filename is None:
            sys.stdout = None  # pyright: ignore[reportAttributeAccessIssue]  # what is left would fail again at the end
        whose = f"namei -l {shlex.quote(str(error.filename))} shows whose it is" * (error.errno == errno.EACCES)
        return (141, None) if gone else (1, ": ".join(filter(None, (error.filename, error.strerror, whose))))
    except KeyboardInterrupt:
        return 130, "interrupted"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        log.removeHandler(plain)
        log.setLevel(level)


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as `| head` that has seen enough."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def usage() -> str:
    """The list of commands."""
    width = max((len(name) for name in COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {help_line}" for name, (*_, help_line) in COMMANDS.items()]
    return "\n".join(["usage: vla-accel COMMAND [options]", "", *lines, "", "vla-accel COMMAND --help says more."])
