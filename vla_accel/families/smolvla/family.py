"""SmolVLA: vision → image_tokens → kv_cache → keys, values → denoise → actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_accel.checkpoints.checkpoint import is_own
from vla_accel.families.prompted import DenoisingFamily
from vla_accel.families.smolvla.checkpoint import SIGNS, load_folder
from vla_accel.families.smolvla.native import SmolVlaStore
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig


class SmolVlaFamily(DenoisingFamily[SmolVlaConfig]):
    """SmolVLA of any size, with any pattern of crossing layers."""

    name, signs = "smolvla", SIGNS
    network_class, store_class = SmolVla, SmolVlaStore

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return content.get("family") == self.name if is_own(content) else super().recognises(content, shapes)

    load = staticmethod(load_folder)


SMOLVLA = SmolVlaFamily()
