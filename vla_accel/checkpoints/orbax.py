"""openpi's JAX parameters as its training saves them with orbax, read one array at a time on the CPU.

The only module that needs jax and orbax.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.errors import CheckpointError, DependencyError


def check_folder(folder: Path) -> None:
    """Raise CheckpointError if a folder neither contains `params/` nor is it."""
    if any((folder / name).exists() for name in ("params", "_METADATA", "manifest.ocdbt")):
        return
    weights, inside = (sorted(folder.glob(name)) for name in ("*.safetensors", "*/params"))
    if not (weights or inside):
        raise CheckpointError(f"checkpoint: expected a folder with params/, got {str(folder)!r}")
    those = f"those of {', '.join(str(path.parent) for path in inside)}: name one of them"
    found = f"{weights[0].name}, which needs no conversion" if weights else those
    raise CheckpointError(f"checkpoint {folder}: expected a folder with params/, found {found}")


class OrbaxParameters:
    """The parameters of a checkpoint. Names are joined by slashes, without openpi's outer `params` and nnx's inner
    `value`.

    Args:
        folder: A checkpoint with `params/` in it, or that folder itself.

    Raises:
        CheckpointError: orbax cannot read the folder.
        DependencyError: jax or orbax is not installed.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)  # before the error of a missing jax
        inner = folder / "params"
        self.folder = (inner if inner.is_dir() else folder).resolve()
        # orbax's threads would print tracebacks in addition to its error.
        if (self.folder / "manifest.ocdbt").is_file() and not any(self.folder.rglob("d/*")):
            raise CheckpointError(f"checkpoint {self.folder}: expected arrays in d/, found none: copy it whole")
        self._orbax, self._jax = _import()
        try:
            with _quiet():
                metadata: Any = self._orbax.PyTreeCheckpointer().metadata(self.folder)
        # orbax's errors have no common base.
        except Exception as error:
            raise CheckpointError(f"checkpoint {self.folder}: expected an orbax checkpoint, got: {error}") from error
        # Older versions give the tree itself, newer ones wrap it.
        for wrapper in ("item_metadata", "tree"):
            metadata = getattr(metadata, wrapper, metadata)
        if not metadata:
            raise CheckpointError(f"checkpoint {self.folder}: expected parameters of orbax, found none: copy it whole")
        self._paths: dict[str, tuple[str, ...]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for path, leaf in self._jax.tree_util.tree_flatten_with_path(metadata)[0]:
            keys = tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
            name = "/".join(keys).removeprefix("params/").removesuffix("/value")
            self._paths[name] = keys
            self.shapes[name], self.dtypes[name] = tuple(leaf.shape), str(np.dtype(leaf.dtype))

    def read(self, name: str) -> np.ndarray:
        """Read an array in its stored dtype. Raises CheckpointError for damaged data."""
        orbax, keys = self._orbax, self._paths[name]
        how = orbax.RestoreArgs(restore_type=np.ndarray)
        # A tree with a single leaf reads that leaf only.
        arguments = orbax.args.PyTreeRestore(item=_nested(keys, 0), restore_args=_nested(keys, how), transforms={})
        try:
            with _quiet():
                tree = orbax.PyTreeCheckpointer().restore(self.folder, arguments)
        except Exception as error:
            raise CheckpointError(f"checkpoint {self.folder}: {name}: damaged: {error}") from error
        for key in keys:
            tree = tree[key]
        array = np.asarray(tree)
        if array.shape != self.shapes[name]:
            raise CheckpointError(
                f"checkpoint {self.folder}: {name}: expected shape {self.shapes[name]}, got {array.shape}"
            )
        return array


def _nested(keys: tuple[str, ...], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


@functools.cache
def _import() -> tuple[Any, Any]:
    # Reading needs no accelerator and must not reserve GPU memory.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        import jax
        import orbax.checkpoint
    except ImportError as error:
        raise DependencyError(f"openpi's JAX checkpoints need pip install 'vla_accel[jax]': {error}") from error
    # If arrays are missing, tensorstore's threads outlive orbax's loop, and each would print a traceback.
    before = sys.unraisablehook
    sys.unraisablehook = lambda event: None if "Event loop is closed" in str(event.exc_value) else before(event)
    return orbax.checkpoint, jax


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide orbax's deprecation warning for every array."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
