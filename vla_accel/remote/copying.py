"""Copies of observations, for a thread that reads them after the caller has written its next frame."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_accel.errors import ObservationError

_IMMUTABLE = (str, bytes, bool, int, float, complex, type(None), np.generic)


def copied(value: Any, name: str = "observation") -> Any:
    """Copy a value so that no later write to the original changes the copy.

    Args:
        value: an observation: mappings, lists and tuples, nested to any depth, of NumPy arrays, torch tensors (also on
            a GPU), PIL images, bytearrays, memoryviews, numbers and text. Other objects are copied by
            `copy.deepcopy`.
        name: how an error names `value`.

    Returns:
        The copy. Mappings become dictionaries; everything else keeps its type. A torch tensor keeps its device and
        dtype and loses its gradient.

    Raises:
        ObservationError: an object that cannot be copied.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, Mapping):
        return {key: copied(one, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        items = [copied(one, f"{name}[{index}]") for index, one in enumerate(value)]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return items
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    if isinstance(value, memoryview):
        return np.array(value).data  # keeps shape and format, which `memoryview.tobytes` does not
    if isinstance(value, bytearray):
        return bytearray(value)
    # An object of these classes can exist only after their module was imported; a robot without torch stays so.
    torch, pillow = sys.modules.get("torch"), sys.modules.get("PIL.Image")
    if torch is not None and isinstance(value, torch.Tensor):
        return _copied_tensor(torch, value)
    if pillow is not None and isinstance(value, pillow.Image):
        return value.copy()
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise ObservationError(
            f"{name}: expected an array, a tensor, an image, numbers or text, which can be copied for another thread, "
            f"got a {type(value).__name__} ({type(error).__name__}: {error})"
        ) from error


def _copied_tensor(torch: Any, tensor: Any) -> Any:
    clone = tensor.detach().clone()  # not deepcopy, which copies the whole storage of a view
    if clone.is_cuda:
        # The clone is only enqueued on this thread's stream; the other thread reads it on a stream of its own.
        torch.cuda.current_stream(clone.device).synchronize()
    return clone
