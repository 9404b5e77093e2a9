"""Exceptions of vla_accel: one base class, one class for each kind of thing that can be wrong.

Every message names the thing, what was expected and what was found. This module knows nothing else.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


def nearest(name: object, known: Iterable[str], before: str = "") -> str:
    """What ends a message about an unknown name: the known one that reads like it, if there is one, with what stands
    `before` it."""
    found = difflib.get_close_matches(str(name), list(known), n=1)
    return f": did you mean {before}{found[0]}?" if found else ""


def unknown(thing: str, name: object, known: Iterable[str], other: str = "") -> str:
    """The message about a name that is none of those known; `other`: what it may be instead, as "a file or "."""
    known = list(known)
    return f"{thing}: expected {other}one of {', '.join(known)}, got {name!r}{nearest(name, known)}"


class VlaAccelError(Exception):
    """Base class: `except VlaAccelError` catches everything this project raises on purpose."""


class ConfigError(VlaAccelError, ValueError):
    """A configuration file or value is wrong (unknown key, wrong type, impossible combination)."""


class OutputError(VlaAccelError, OSError):
    """A file or folder cannot be written: no such place, no right to, no room left."""


class ObservationError(VlaAccelError, ValueError):
    """An observation has a missing key, or a wrong shape, dtype or value range."""


class ActionError(VlaAccelError):
    """What a model answered is no chunk of actions."""


class CheckpointError(VlaAccelError):
    """A checkpoint is missing, damaged, incomplete or does not fit the model."""


class EngineError(VlaAccelError):
    """An engine could not be built or run as asked for."""


class DeviceMemoryError(EngineError):
    """A policy does not fit into its device's memory."""


class DependencyError(VlaAccelError):
    """An optional package that the call needs is missing or has a version that does not work."""


class SimulatorError(VlaAccelError):
    """The robot simulator could not start, render or take the call."""


class WireError(VlaAccelError, ValueError):
    """Bytes that are no well-formed message, or a value that the wire format does not carry."""


class ServerError(VlaAccelError):
    """A policy server cannot be reached, did not answer in time, or reported an error."""


@contextlib.contextmanager
def of_one(index: int, count: int) -> Iterator[None]:
    """What goes wrong inside is of one of `count` observations: where there are several, the error names it."""
    try:
        yield
    except VlaAccelError as error:
        if count == 1:
            raise
        raise type(error)(f"observations[{index}]: {error}") from error
