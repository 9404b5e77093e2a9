"""The native programs of π0-FAST: vision and prefix are those of every PaliGemma."""

from __future__ import annotations

from vla_accel.models.pi0_fast import Pi0Fast
from vla_accel.native.paligemma import PaliGemmaStore


class Pi0FastStore(PaliGemmaStore[Pi0Fast]):
    """Prepared weights of one π0-FAST."""
