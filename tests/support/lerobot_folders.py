"""Folders of every policy class that lerobot saves, with one writer and one observation each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support import published_folders, tiny_pi0_fast, tiny_smolvla
from tests.support.lerobot_saved import Change, saved_files, state_files, together
from tests.support.tiny import tiny_observation
from vla_accel.families.loading import Checkpoint, load

KINDS = ("pi0", "pi05", "pi0_fast", "smolvla")
OBSERVATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(("pi0", "pi05"), tiny_observation),
    "pi0_fast": tiny_pi0_fast.observation,
    "smolvla": tiny_smolvla.observation,
}


def write(folder: Path, kind: Any, *changes: Change, release: str = "0.6.1") -> Path:
    """A folder as a release saves it, its JSON files edited by `changes`."""
    if kind in ("pi0", "pi05"):
        published_folders.write_lerobot(folder, kind, together(*changes), release=release)
    else:
        module = tiny_pi0_fast if kind == "pi0_fast" else tiny_smolvla
        module.write_lerobot(folder, change=together(*changes), release=release)
    return folder


def made(folder: Path, kind: Any, *changes: Change, release: str = "0.6.1") -> Checkpoint:
    return load(write(folder, kind, *changes, release=release))


def cameras(kind: str) -> tuple[str, str]:
    """lerobot's names of the two cameras."""
    return tiny_smolvla.LIBERO_CAMERAS if kind in ("pi0", "pi05") else tiny_smolvla.CAMERAS


def edit_tensors(path: Path, changes: Mapping[str, Any]) -> None:
    """Change tensors of a file; None removes one."""
    table: dict[str, Any] = {**load_file(path), **changes}
    save_file({name: torch.as_tensor(value).contiguous() for name, value in table.items() if value is not None}, path)


def edit_statistics(folder: Path, changes: Mapping[str, Any], *, both: bool = True) -> None:
    """Change the statistics of the preprocessor, or of both pipelines."""
    for name in state_files(saved_files(folder))[: 1 + both]:
        edit_tensors(folder / name, changes)


def state_of(observation: Mapping[str, Any]) -> np.ndarray:
    (state,) = (v for v in observation.values() if isinstance(v, np.ndarray) and v.ndim == 1)
    return np.asarray(state, np.float64)
