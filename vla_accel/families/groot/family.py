"""GR00T N1.7: vision → image_tokens, deepstack → kv_cache → keys and values → denoise → actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.lerobot import is_lerobot_config
from vla_accel.checkpoints.weights import read_json
from vla_accel.component import Component
from vla_accel.config import EngineSpec, RtcConfig
from vla_accel.errors import ObservationError
from vla_accel.families.family import Capabilities, Chunking
from vla_accel.families.groot.checkpoint import OTHERS, is_groot, model_type
from vla_accel.families.groot.components import groot_components
from vla_accel.families.groot.folder import load_folder
from vla_accel.families.groot.native import GrootStore
from vla_accel.families.groot.network import Groot, GrootConfig, overlap_weights
from vla_accel.families.prompted import TextFamily
from vla_accel.families.qwen import LayoutShape
from vla_accel.nn.dit import QUANTISED
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.processing import Inputs


class GrootChunking(Chunking[GrootConfig]):
    """GR00T's own: the first actions start at the previous chunk's and move by less of the velocity."""

    inputs = ("target", "weights")
    settings = ("execution_horizon",)

    def guide(self, config: GrootConfig, rtc: RtcConfig, previous: np.ndarray, delay: int) -> dict[str, np.ndarray]:
        target = np.zeros((config.action_horizon, config.action_dim), np.float32)
        target[: len(previous)] = previous
        weights = overlap_weights(len(previous), delay, config.action_horizon, config.ramp, rtc.execution_horizon)
        return {"target": target, "weights": weights.numpy()}


class GrootFamily(TextFamily[GrootConfig, Inputs, LayoutShape]):
    """One embodiment of a checkpoint."""

    name = "groot"
    network_class, store_class = Groot, GrootStore
    parts = ("vision", "kv_cache", "denoise")
    capabilities = Capabilities(lora=True, quantised=QUANTISED, settings=("embodiment",))
    chunking = GrootChunking()
    flow = True

    def components(
        self, model: Groot, shape: LayoutShape, *, store: Any = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        return groot_components(model, shape.layout, shape.batch, shape.schedule, shape.padded, store)

    def shape(
        self, config: GrootConfig, inputs: Sequence[Inputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> LayoutShape:
        sizes = {(len(i.images), *i.images[0].shape[:2]) for i in inputs}
        if len(sizes) > 1:
            raise ObservationError(f"batch: expected as many views of each, of one size, got {sorted(sizes)}")
        ((views, height, width),) = sizes
        tokens, padded = self.prompt_bucket(inputs, specs, self.parts)
        return LayoutShape(len(inputs), schedule, views, tokens, padded, config.vision.grid(height, width))

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return content["type"] == self.name if is_lerobot_config(content) else is_groot(content, shapes)

    def hint(self, folder: Path) -> str | None:
        path = folder / "config.json"
        kind = model_type(read_json(path)) if path.is_file() else ""
        if kind.startswith("gr00t"):
            return f"expected GR00T N1.7 (model_type Gr00tN1d7), found {kind}: {OTHERS}"
        return None

    load = staticmethod(load_folder)


GROOT = GrootFamily()
