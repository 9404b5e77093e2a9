"""MolmoAct2: vision → image_tokens → kv_cache → the expert's keys, values → denoise → actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from vla_accel.checkpoints.checkpoint import is_own
from vla_accel.component import Component
from vla_accel.config import RtcConfig
from vla_accel.families.family import Capabilities
from vla_accel.families.molmoact2.checkpoint import MODEL_TYPE, SIGNS, load_folder
from vla_accel.families.molmoact2.native import MolmoAct2Store
from vla_accel.families.molmoact2.network import MolmoAct2, MolmoAct2Config
from vla_accel.families.prompted import DenoisingFamily, FlowChunking, PromptShape
from vla_accel.fp8 import Scales
from vla_accel.nn.quantised import QUANTISED

_QUANTISED = {part: {"native": QUANTISED[part]["native"]} for part in ("vision", "kv_cache", "denoise")}


class MolmoChunking(FlowChunking):
    """Guidance by the previous chunk, as lerobot's; no checkpoint was trained with pinned actions."""

    settings = tuple(name for name in (f.name for f in fields(RtcConfig)) if name not in ("trained", "max_delay"))


class MolmoAct2Family(DenoisingFamily[MolmoAct2Config]):
    """MolmoAct2 of any size."""

    name, signs = "molmoact2", SIGNS
    network_class, store_class = MolmoAct2, MolmoAct2Store
    capabilities = Capabilities(quantised=_QUANTISED, settings=("embodiment",))
    chunking = MolmoChunking()

    def components(
        self, model: Any, shape: PromptShape, *, store: Any = None, scales: Scales | None = None,
        rtc: RtcConfig | None = None,
    ) -> Sequence[Component]:  # fmt: skip
        found = super().components(model, shape, store=store, scales=scales, rtc=rtc)
        quantised = self.capabilities.quantised
        made = [replace(one, variants={}, quantised=quantised.get(one.name, {})) for one in found]
        images, tokens, *rest = made[1].inputs
        # The words around the images are in every prompt.
        least = model.config.edge + (shape.views - 1) * model.config.between + 1
        tokens = replace(tokens, ranges={1: (min(least, tokens.shape[1]), tokens.ranges[1][1])})
        made[1] = replace(made[1], inputs=(images, tokens, *rest))
        made[0] = replace(made[0], fetch=lambda: model.fetch("vision", "pooling", "embed"))
        return made

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        if is_own(content):
            return False
        return content.get("model_type") == MODEL_TYPE or super().recognises(content, shapes)

    load = staticmethod(load_folder)


MOLMOACT2 = MolmoAct2Family()
