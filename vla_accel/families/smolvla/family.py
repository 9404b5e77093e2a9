"""SmolVLA: vision → image_tokens → kv_cache → keys, values → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from vla_accel.checkpoints.checkpoint import is_own
from vla_accel.checkpoints.lerobot import is_lerobot_config
from vla_accel.families.prompted import DenoisingFamily
from vla_accel.families.smolvla.checkpoint import SIGNS, load_folder
from vla_accel.families.smolvla.native import SmolVlaStore
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig, smolvla, smolvla_demo


class SmolVlaFamily(DenoisingFamily[SmolVlaConfig]):
    """SmolVLA of any size, with any pattern of crossing layers."""

    name = "smolvla"
    network_class, store_class = SmolVla, SmolVlaStore
    sizes: ClassVar[Mapping[str, Callable[..., SmolVlaConfig]]] = {"smolvla": smolvla, "smolvla_demo": smolvla_demo}

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        if is_own(content):
            return content.get("family") == self.name
        if is_lerobot_config(content):
            return content["type"] == self.name
        return all(name in shapes for name in SIGNS)

    load = staticmethod(load_folder)


SMOLVLA = SmolVlaFamily()
