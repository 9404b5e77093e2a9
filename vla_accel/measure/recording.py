"""Recorded observations: one compressed NumPy file of arrays with the observations along the first axis, and prompts
as strings."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.errors import ObservationError
from vla_accel.files import replacing, user_path

RECORDED = "a recording by vla_accel.measure.recording.save_observations"
"""Tells a user without such a file how to write one."""


def save_observations(observations: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Write observations of the same keys and shapes. Nested values get keys with slashes; None is left out. Raises
    ObservationError for one unlike the first, and for values that are neither numbers nor text."""
    if isinstance(observations, Mapping) or not observations:
        got = "one that is in no list" if observations else "none"
        raise ObservationError(f"recording {path}: expected a list of at least one observation, got {got}")
    rows = [dict(_arrays(one, f"recording {path}: observation {n}: ")) for n, one in enumerate(observations, start=1)]
    first, *others = ({key: value.shape for key, value in row.items()} for row in rows)
    for number, shapes in enumerate(others, start=2):
        for key in first | shapes:
            if (expected := first.get(key, "none")) != (found := shapes.get(key, "none")):
                raise ObservationError(f"recording {path}: observation {number}: {key}: expected shape {expected}, as "
                                       f"in the first, got {found}; what differs needs a file of its own")  # fmt: skip
    columns = {key: np.stack([row[key] for row in rows]) for key in first}
    with replacing(user_path(path)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **columns)  # type: ignore[arg-type]


def _arrays(observation: Mapping[str, Any], where: str, above: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in observation.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _arrays(value, where, f"{key}/")
        elif value is not None:
            try:
                array = np.asarray(value)
            except ValueError:  # lists of several lengths
                array = np.empty(0, object)
            if array.dtype.hasobject:
                raise ObservationError(f"{where}{key}: expected numbers or a text, got {type(value).__name__}")
            yield key, array


def load_observations(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The observations of a file, at most `limit` of them, spread evenly. Raises ObservationError."""
    try:
        with np.load(path, allow_pickle=False) as content:
            columns = {key: content[key] for key in content.files}
    except OSError as error:
        raise ObservationError(f"recording {path}: expected a .npz of arrays: {error.strerror or error}") from error
    except (EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error):
        # NumPy's own words advise to unpickle. TypeError: a .npy, which holds one array without a name.
        raise ObservationError(
            f"recording {path}: expected a .npz of arrays, got another file or a damaged one"
        ) from None
    lengths = {key: len(column) if column.ndim else 0 for key, column in columns.items()}
    if len(set(lengths.values())) != 1 or not (count := min(lengths.values())):
        raise ObservationError(f"recording {path}: expected columns of one length, got {lengths}")
    chosen = range(count) if limit is None or limit >= count else np.linspace(0, count - 1, limit).astype(int)
    return [{k: v[i].item() if v[i].ndim == 0 else v[i] for k, v in columns.items()} for i in chosen]


@contextlib.contextmanager
def named(path: Path | None) -> Iterator[None]:
    """Within the block, an observation that is refused is one of this file, if there is one."""
    try:
        yield
    except ObservationError as error:
        if path is None:
            raise
        raise ObservationError(f"recording {path}: {error}") from error
