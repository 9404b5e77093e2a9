"""Weights and JAX parameters in memory instead of in files, and loaders of π0 and π0.5 for either."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vla_accel.checkpoints.checkpoint import read_config
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.families.pi0.checkpoint import load_weights
from vla_accel.families.pi0.network import Pi0, Pi0Config


class MemoryWeights:
    """Implements `checkpoints.weights.Weights` with tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes: dict[str, tuple[int, ...]] = {k: tuple(v.shape) for k, v in tensors.items()}
        self.sizes: dict[str, int] = {k: v.numel() * v.element_size() for k, v in tensors.items()}
        self.integers: dict[str, str] = {k: str(v.dtype) for k, v in tensors.items() if not v.is_floating_point()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class ParameterTree:
    """Implements `checkpoints.convert.Parameters` with arrays."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self.shapes: dict[str, tuple[int, ...]] = {k: v.shape for k, v in arrays.items()}
        self.dtypes: dict[str, str] = {k: str(v.dtype) for k, v in arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]


def load_file_or_folder(path: Path, config: Pi0Config | None = None, dtype: torch.dtype | None = None) -> Pi0:
    """All weights of a file or folder; `config`: where the folder has none of ours."""
    config = config or read_config(path, Pi0Config)
    return load_weights(SafetensorsWeights(path), config, str(path)).placed(torch.device("cpu"), dtype).whole()


def load_tensors(tensors: Mapping[str, Tensor], config: Pi0Config, where: str) -> Pi0:
    """As `load_file_or_folder`, of any dialect."""
    return load_weights(MemoryWeights(tensors), config, where).placed(torch.device("cpu"), None).whole()
