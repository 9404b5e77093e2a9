"""The native programs of SmolVLA."""

from __future__ import annotations

from vla_accel.models.smolvla import SmolVla
from vla_accel.native.store import NativeStore


class SmolVlaStore(NativeStore[SmolVla]):
    """Prepared weights of one SmolVLA."""
