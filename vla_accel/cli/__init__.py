"""The command line: `vla-accel COMMAND …`. Each command is a module of this package."""

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
    "doctor": ("doctor", "doctor.Doctor", "check what this machine can run; print a checkpoint's statistics"),
    "bench": ("bench", "bench.Bench", "time whole calls of a policy and its baselines; compute their floor"),
    "parity": ("parity", "parity.Parity", "compare a configuration with FP32 eager; fail if it disagrees"),
    "flow": ("flow", "flow.Flow", "find the fewest denoising steps that are no further from the exact flow"),
    "tune": ("tune", "tune.Tune", "find the fastest configuration without regressions on this machine"),
    "calibrate": ("calibrate", "calibrate.Calibrate", "measure FP8 scales of a checkpoint on recorded observations"),
    "build": ("build", "build.Build", "build TensorRT engines of a configuration, also for other GPUs"),
    "cache": ("cache", "cache.Cache", "list, verify or clear built engines and compiled kernels"),
    "export": ("export", "export.Export", "write a policy as ONNX graphs or torch.export programs"),
    "inspect": ("inspect", "inspect.Inspect", "show layers, precisions, profiles and size of a built engine"),
    "convert": ("convert", "convert.Convert", "convert an openpi JAX, starVLA or OpenVLA-OFT checkpoint"),
    "prompts": ("prompts", "prompts.Prompts", "encode instructions for FastWAM, so that it needs no text encoder"),
    "serve": ("serve", "serve.Serve", "serve a policy to openpi's clients"),
    "bench-server": ("bench_server", "bench_server.BenchServer", "measure the latency that the server adds to a call"),
    "build-vae": ("build_images", "image_options.BuildVae", "build TensorRT engine files of an autoencoder"),
    "build-unet": (
        "build_images",
        "image_options.BuildUnet",
        "build a TensorRT engine file of Stable Diffusion's UNet",
    ),
    "bench-vae": (
        "bench_vae",
        "image_options.BenchVae",
        "time an autoencoder: eager, compiled, native, TensorRT",
    ),
    "bench-unet": ("bench_unet", "image_options.BenchUnet", "time Stable Diffusion: eager, compiled, native, TensorRT"),
    "bench-qwen": (
        "bench_qwen",
        "image_options.BenchQwen",
        "time Qwen-Image with and without acceleration",
    ),
    "txt2img": ("generate", "image_options.TextToImage", "generate an image from a prompt"),
    "img2img": ("generate", "image_options.ImageToImage", "generate an image from an image and a prompt"),
    "precision": (
        "precision",
        "image_options.Precision",
        "compare a model in BF16 or FP16 with FP32: ranges, memory, latency",
    ),
}
"""By command: its module in `vla_accel.cli`, the module and class of its options, and one line of help. The
module has `main(chosen: OPTIONS, words: list[str]) -> int`; `words` are the arguments as typed, for the record."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for wrong usage, otherwise as in `ended`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    status, message = ended(lambda: run(words))
    if message is not None:
        print(f"vla-accel {words[0]}: {message}", file=sys.stderr)
    return status


def run(words: list[str]) -> int:
    """Read the options of one command, then run it."""
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

    options = read(options_of(name), rest, f"vla-accel {name}")
    return importlib.import_module(f"vla_accel.cli.{COMMANDS[name][0]}").main(options, rest)


def options_of(name: str) -> Any:
    """Return the options class of a command."""
    module, _, kind = COMMANDS[name][1].partition(".")
    return getattr(importlib.import_module(f"vla_accel.cli.{module}"), kind)


def ended(run: Callable[[], int]) -> tuple[int, str | None]:
    """Run a program; return its exit status and the message to print. 0: done; 1: a check failed, or an error that
    the user can fix; 130: interrupted; 141: nobody reads the output."""
    # SIGTERM, sent by `timeout` or a scheduler, interrupts like Ctrl-C, so that cleanup runs and no process stays.
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    # A shell script ignores Ctrl-C for its background processes.
    handled = (signal.SIGTERM, *([signal.SIGINT] if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else []))
    before = {number: signal.signal(number, interrupt) for number in handled}
    # Without logging set up, print the package's own messages (not a server's) and all warnings to standard error.
    log, plain = logging.getLogger("vla_accel"), logging.StreamHandler()
    level = log.level
    plain.addFilter(lambda r: not logging.root.handlers and (r.name == log.name or r.levelno > logging.INFO))
    log.addHandler(plain)
    log.setLevel(logging.INFO)
    # Importing diffusers' pipelines warns that torchvision is missing, which no user needs.
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
    try:
        try:
            return run(), None
        except Exception as error:
            # A library may turn an interrupt into an error of its own, as matplotlib does.
            if interrupted:
                raise KeyboardInterrupt from error
            raise
        finally:
            print(end="", flush=True)  # not at the interpreter's exit, where no error can be reported
    except VlaAccelError as error:
        return 1, str(error)
    except OSError as error:
        gone = isinstance(error, BrokenPipeError) and _reader_is_gone()
        # An error that names a file explains itself; any other one, except a full disk, is a bug.
        if error.filename is None and not gone and error.errno != errno.ENOSPC:
            raise
        if error.filename is None:
            sys.stdout = None  # pyright: ignore[reportAttributeAccessIssue]  # the unwritten rest would fail again at exit
        owner = f"namei -l {shlex.quote(str(error.filename))} shows whose it is" * (error.errno == errno.EACCES)
        return (141, None) if gone else (1, ": ".join(filter(None, (error.filename, error.strerror, owner))))
    except KeyboardInterrupt:
        return 130, "interrupted"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        log.removeHandler(plain)
        log.setLevel(level)


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe whose reader has exited, such as `| head`."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def usage() -> str:
    """The list of commands."""
    width = max((len(name) for name in COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {help_line}" for name, (*_, help_line) in COMMANDS.items()]
    return "\n".join(
        ["usage: vla-accel COMMAND [options]", "", *lines, "", "vla-accel COMMAND --help lists its options."]
    )
