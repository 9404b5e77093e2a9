"""A checkpoint of starVLA, a pickle of tensors or a safetensors file, as a folder that loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_accel.checkpoints.weights import SafetensorsWeights, listing, read_json
from vla_accel.checkpoints.writer import save_weights
from vla_accel.config.mapping import read_mapping
from vla_accel.errors import CheckpointError
from vla_accel.families.starvla.checkpoint import STATISTICS, TYPE
from vla_accel.files import write_json


def convert(checkpoint: Path, output: Path) -> dict[str, Any]:
    """Write the folder and return what is in it.

    torch opens the pickle with `weights_only=True`, which makes tensors and plain containers and nothing else.

    Args:
        checkpoint: `RUN/checkpoints/NAME.pt` or `NAME.safetensors`, whose run has config.yaml and
            dataset_statistics.json.
        output: The folder to write; made as needed.

    Raises:
        CheckpointError: Another file, or files of the run are missing.
    """
    run = checkpoint.parent.parent
    for name in ("config.yaml", STATISTICS):
        if not (run / name).is_file():
            raise CheckpointError(f"checkpoint {checkpoint}: expected {name} in {run}, found {listing(run)}")
    settings, statistics = read_mapping(run / "config.yaml"), read_json(run / STATISTICS)
    tensors = _tensors(checkpoint) if checkpoint.suffix == ".pt" else _floating(SafetensorsWeights(checkpoint))
    output.mkdir(parents=True, exist_ok=True)
    save_weights(tensors, output / "model.safetensors")
    write_json(output / "config.json", {**settings, "type": TYPE})
    write_json(output / STATISTICS, statistics)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return {"schema": "vla_accel.conversion/1", "output": str(output), "kind": TYPE, "parameters": parameters,
            "tensors": len(tensors)}  # fmt: skip


def _floating(weights: SafetensorsWeights) -> dict[str, Tensor]:
    return {name: weights.read(name) for name in weights.shapes if name not in weights.integers}


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, those that lie in one place once."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch's errors of a damaged file and of a pickle with other objects have no common base.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint {path}: expected a pickle of tensors, got: {reason:.200}") from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"checkpoint {path}: expected tensors by name, got {type(content).__name__}")
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in content.items():
        seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    kept = {name for name in seen.values()} | {name for name, tensor in content.items() if not tensor.numel()}
    return {name: tensor for name, tensor in content.items() if name in kept and tensor.is_floating_point()}
