"""Exceptions of vla_accel. Every message names the thing, what was expected and what was found."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


def nearest(name: object, known: Iterable[str], before: str = "") -> str:
    """Return ": did you mean NAME?" for the most similar known name, or "". `before`: a prefix of the name."""
    found = difflib.get_close_matches(str(name), list(known), n=1)
    return f": did you mean {before}{found[0]}?" if found else ""


def unknown(thing: str, name: object, known: Iterable[str], other: str = "") -> str:
    """Return the message for an unknown name. `other`: what else is accepted, such as "a file or "."""
    known = list(known)
    return f"{thing}: expected {other}one of {', '.join(known)}, got {name!r}{nearest(name, known)}"


class VlaAccelError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ConfigError(VlaAccelError, ValueError):
    """A configuration file or value is wrong (unknown key, wrong type, impossible combination)."""


class OutputError(VlaAccelError, OSError):
    """A file or folder cannot be written: it does not exist, permissions are missing, or the disk is full."""


class ObservationError(VlaAccelError, ValueError):
    """An observation has a missing key, or a wrong shape, dtype or value range."""


class ActionError(VlaAccelError):
    """The output of a model is not a valid action chunk."""


class CheckpointError(VlaAccelError):
    """A checkpoint is missing, damaged, incomplete or does not fit the model."""


class EngineError(VlaAccelError):
    """An engine could not be built or run as requested."""


class DeviceMemoryError(EngineError):
    """A policy does not fit into the memory of its device."""


class DependencyError(VlaAccelError):
    """An optional package that the call needs is missing or has a version that does not work."""


class SimulatorError(VlaAccelError):
    """The robot simulator could not start, render or take the call."""


class WireError(VlaAccelError, ValueError):
    """Bytes are not a well-formed message, or the wire format cannot carry a value."""


class ServerError(VlaAccelError):
    """A policy server cannot be reached, did not answer in time, or reported an error."""


@contextlib.contextmanager
def of_one(index: int, count: int) -> Iterator[None]:
    """Prefix errors of the block with "observations[index]: " if there is more than one observation."""
    try:
        yield
    except VlaAccelError as error:
        if count == 1:
            raise
        raise type(error)(f"observations[{index}]: {error}") from error
