"""The pickles of an openvla-oft run as safetensors, so that its folder loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.pickles import read_pickle
from vla_accel.checkpoints.weights import listing, read_json
from vla_accel.checkpoints.writer import save_weights
from vla_accel.errors import CheckpointError
from vla_accel.families.openvla_oft.checkpoint import HEAD, PROJECTOR, UNSUPPORTED, is_openvla

_NOISE = "noise_predictor."
_KEPT = ("*.json", "model*.safetensors", "tokenizer*")


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of an openvla-oft run."""
    path = folder / "config.json"
    return any(folder.glob(f"{HEAD}--*.pt")) or (path.is_file() and is_openvla(read_json(path)))


def convert(run: Path, output: Path) -> dict[str, Any]:
    """Write the head and the projector of the state as safetensors, and return what is in them.

    Args:
        run: The folder with `action_head--NAME.pt`.
        output: `run`, or another folder, which gets links to the other files, or copies on another disk.

    Raises:
        CheckpointError: The pickle of the head is missing or holds other objects, or the run has a diffusion head or
            FiLM.
    """
    for name, why in UNSUPPORTED.items():
        if found := sorted(run.glob(f"{name}--*")):
            raise CheckpointError(f"checkpoint {run}: {found[0].name}: {why}")
    files = [*run.glob(f"{HEAD}--*.pt"), *run.glob(f"{PROJECTOR}--*.pt")]
    if not any(file.name.startswith(HEAD) for file in files):
        raise CheckpointError(f"checkpoint {run}: expected {HEAD}--*.pt, found {listing(run)}")
    tensors = {file.stem: {n.removeprefix("module."): t for n, t in read_pickle(file).items()} for file in files}
    if any(name.startswith(_NOISE) for content in tensors.values() for name in content):
        raise CheckpointError(f"checkpoint {run}: {UNSUPPORTED['noisy_action_projector']}")
    output.mkdir(parents=True, exist_ok=True)
    for name, content in tensors.items():
        save_weights(content, output / f"{name}.safetensors")
    if output.resolve() != run.resolve():
        for file in sorted({path for pattern in _KEPT for path in run.glob(pattern)}):
            _link(file.resolve(), output / file.name)
    parameters = sum(t.numel() for content in tensors.values() for t in content.values())
    return {"schema": "vla_accel.conversion/1", "output": str(output), "kind": "openvla_oft", "parameters": parameters,
            "tensors": sum(map(len, tensors.values()))}  # fmt: skip


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)
