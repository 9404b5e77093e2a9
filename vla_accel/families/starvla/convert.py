"""A checkpoint of starVLA, a pickle of tensors or a safetensors file, as a folder that loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from vla_accel.checkpoints.pickles import read_pickle
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
    tensors = read_pickle(checkpoint) if checkpoint.suffix == ".pt" else _floating(SafetensorsWeights(checkpoint))
    output.mkdir(parents=True, exist_ok=True)
    save_weights(tensors, output / "model.safetensors")
    write_json(output / "config.json", {**settings, "type": TYPE})
    write_json(output / STATISTICS, statistics)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return {"schema": "vla_accel.conversion/1", "output": str(output), "kind": TYPE, "parameters": parameters,
            "tensors": len(tensors)}  # fmt: skip


def _floating(weights: SafetensorsWeights) -> dict[str, Tensor]:
    return {name: weights.read(name) for name in weights.shapes if name not in weights.integers}
