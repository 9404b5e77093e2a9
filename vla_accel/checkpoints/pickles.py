"""Pickles of tensors, for conversions alone: no loading of a checkpoint opens one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vla_accel.errors import CheckpointError


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the floating-point tensors of a pickle by name; of those that share memory, the first one.

    torch opens it with `weights_only=True`, which makes tensors and plain containers and nothing else. Raises
    CheckpointError for other files and other objects.
    """
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
