"""The memory of one GPU, shared by the tests of several processes."""

from __future__ import annotations

import fcntl
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from benchmarks.memory import parameters
from vla_accel.families.family import Family

Reserve: TypeAlias = Callable[[float], None]
"""The fixture `reserve` of tests/gpu: hold so many gigabytes until the test ends."""
SHARED = 0.25
"""The share of a GPU's memory that no test reserves: for the contexts and small models of all processes."""


def gigabytes(family: Family, bytes_each: int = 6) -> float:
    """What policies of a family's published size need: by default one in BF16 and one in FP32, of six bytes a
    parameter, and their buffers."""
    return 2 + 1.15 * bytes_each * parameters(family.name) / 1e9


def free() -> None:
    """Free what no variable holds any more."""
    # pytest keeps the frames of the last failure, and with them its models.
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def reserved(wanted: float, total: float | None = None, folder: Path | None = None) -> Iterator[None]:
    """Hold gigabytes of a GPU that has `total`, or all that can be held, by a lock on one file each in `folder`. The
    system drops the locks of a process that ends."""
    whole = torch.cuda.get_device_properties(0).total_memory / 1e9 * (1 - SHARED) if total is None else total
    folder = folder or Path(tempfile.gettempdir()) / "vla_accel_gpu_memory"
    folder.mkdir(exist_ok=True)
    units = [folder / f"{index}" for index in range(int(whole))]
    missing = min(len(units), math.ceil(wanted))
    with ExitStack() as held:
        # One process at a time collects: two could each hold what the other waits for.
        with (folder / "turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            while missing:
                for path in units:
                    if missing and _locked(path, held):
                        missing -= 1
                time.sleep(0.2 if missing else 0)
        yield


def _locked(path: Path, held: ExitStack) -> bool:
    """Return whether the file could be locked, which `held` then ends."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    held.enter_context(file)
    return True
