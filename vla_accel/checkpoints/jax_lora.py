"""openpi's LoRA adapters in its JAX parameters, folded into their weights.

Adapters of attention are scaled by alpha / rank, those of the MLP are not. No parameter shows alpha: openpi's variants
(`gemma_2b_lora`, `gemma_300m_lora`) have alpha = rank, a scale of one. Source: openpi's `models/lora.py` and
`models/gemma.py` (Physical Intelligence, Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from vla_accel.errors import CheckpointError

_MARK = "lora"


class Parameters(Protocol):
    """JAX parameters by name, joined by slashes, read one at a time."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str) -> np.ndarray: ...


class FoldedParameters:
    """`Parameters` without adapters: reading a weight folds its adapter in, in float32.

    Args:
        parameters: The parameters with adapters.
        scale: alpha / rank of the attention's adapters.
        where: The checkpoint, for errors.

    Attributes:
        adapters: Number of weights with an adapter.
        scaled: Number of those that `scale` applies to.

    Raises:
        CheckpointError: An adapter has no weight or no second factor, or does not fit its weight.
    """

    def __init__(self, parameters: Parameters, scale: float = 1.0, where: str = "memory") -> None:
        self._parameters, self._scale = parameters, scale
        self._pairs = _pairs(parameters.shapes, where)
        self.adapters = len(self._pairs)
        self.scaled = sum("/attn/" in name for name in self._pairs)
        halves = {half for pair in self._pairs.values() for half in pair}
        self.shapes = {name: shape for name, shape in parameters.shapes.items() if name not in halves}
        self.dtypes = {name: dtype for name, dtype in parameters.dtypes.items() if name not in halves}

    def read(self, name: str) -> np.ndarray:
        weight = self._parameters.read(name)
        if name not in self._pairs:
            return weight
        a, b = (self._parameters.read(half).astype(np.float32) for half in self._pairs[name])
        folded = weight.astype(np.float32)
        scale = self._scale if "/attn/" in name else 1.0
        for layer in range(len(folded)):  # one at a time: a whole stack may be gigabytes
            folded[layer] += scale * _product(name, a[layer], b[layer])
        return folded


def _product(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the change of one layer's weight from its factors (..., rows, rank) and (..., rank, columns)."""
    if "/attn_vec_einsum" not in name:
        return a @ b
    # The heads are summed before the rank and again after it, not head by head.
    return a @ b.sum(axis=0)


def _pairs(shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, tuple[str, str]]:
    """Return the names of the two factors of each weight."""
    pairs: dict[str, tuple[str, str]] = {}
    for name in sorted(name for name in shapes if _MARK in name.lower()):
        stem, other = name[:-1], {"a": "b", "b": "a"}.get(name[-1], "")
        # q_einsum/lora_a is of q_einsum/w, linear_lora_a of linear.
        weight = stem.removesuffix("lora_") + "w" if stem.endswith("/lora_") else stem.removesuffix("_lora_")
        if not stem.endswith("lora_") or weight not in shapes or stem + other not in shapes:
            raise CheckpointError(f"checkpoint {where}: expected LoRA factors a and b of a weight, got {name}")
        pairs[weight] = (stem + "a", stem + "b")
    for weight, (a, b) in pairs.items():
        *outer, rows, columns = shapes[weight]
        rank = shapes[a][-1]
        if (shapes[a], shapes[b]) != ((*outer, rows, rank), (*outer, rank, columns)):
            raise CheckpointError(
                f"checkpoint {where}: {a}, {b}: expected factors of a weight {shapes[weight]}, got {shapes[a]} and "
                f"{shapes[b]}"
            )
    return pairs
