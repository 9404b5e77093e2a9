"""Numbers from whoever sends them. NumPy would read text, booleans, dates and complex values as numbers, in silence."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_accel.errors import ObservationError


def real_numbers(value: Any, name: str) -> np.ndarray:
    """`value` (an array, a scalar, nested lists) as a new float64 array of its shape.

    Raises ObservationError that names `name` for anything but integers and floats, and for NaN and infinity.
    """
    try:
        given = np.asarray(value)
    except (TypeError, ValueError) as error:  # lists of unequal length, a tensor that lies on a GPU
        raise ObservationError(f"{name}: expected numbers, got a {type(value).__name__} ({error})") from error
    if given.dtype.kind not in "iuf":
        raise ObservationError(f"{name}: expected numbers, got dtype {given.dtype}")
    numbers = np.array(given, np.float64)
    if not np.isfinite(numbers).all():
        raise ObservationError(f"{name}: expected finite numbers, got NaN or infinity")
    return numbers
