"""GR00T N1.7, N1.6 and N1.5: vision → image_tokens, deepstack → kv_cache → keys and values → denoise → actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.checkpoints.lerobot import is_lerobot_config
from vla_accel.checkpoints.weights import read_json
from vla_accel.component import Component
from vla_accel.config import EngineSpec, PolicyConfig, RtcConfig
from vla_accel.errors import ObservationError
from vla_accel.families.family import Capabilities, Chunking
from vla_accel.families.groot.components import groot_components
from vla_accel.families.groot.folder import load_folder
from vla_accel.families.groot.native import GrootStore
from vla_accel.families.groot.network import Groot, GrootConfig, overlap_weights
from vla_accel.families.groot.releases import N15, N16, N17, RELEASES, Release, model_type, release_of
from vla_accel.families.groot.transforms import GrootProcessor
from vla_accel.families.prompted import TextFamily
from vla_accel.families.qwen import LayoutShape
from vla_accel.nn.dit import QUANTISED
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.processing import Inputs


class GrootShape(LayoutShape):
    """`lengths` are the tokens of the head's first source that are no padding."""

    def row_length(self, config: GrootConfig) -> int:
        return self.tokens if config.head.text_every else self.layout.tokens


class GrootChunking(Chunking[GrootConfig]):
    """GR00T N1.7's own: the first actions start at the previous chunk's and move by less of the velocity."""

    inputs = ("target", "weights")
    settings = ("execution_horizon",)

    def guide(self, config: GrootConfig, rtc: RtcConfig, previous: np.ndarray, delay: int) -> dict[str, np.ndarray]:
        target = np.zeros((config.action_horizon, config.action_dim), np.float32)
        target[: len(previous)] = previous
        weights = overlap_weights(len(previous), delay, config.action_horizon, config.ramp, rtc.execution_horizon)
        return {"target": target, "weights": weights.numpy()}


class GrootFamily(TextFamily[GrootConfig, Inputs, GrootShape]):
    """One embodiment of a checkpoint of a release."""

    network_class, store_class = Groot, GrootStore
    parts = ("vision", "kv_cache", "denoise")
    capabilities = Capabilities(lora=True, quantised=QUANTISED, settings=("embodiment",))
    flow = True

    def __init__(self, release: Release) -> None:
        self.release, self.name = release, release.family
        # Neither NVIDIA's nor lerobot's code of the older releases has it.
        self.chunking = GrootChunking() if release is N17 else Chunking()

    def components(
        self, model: Groot, shape: GrootShape, *, store: Any = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        guided = bool(self.chunking.inputs)
        return groot_components(model, shape.layout, shape.batch, shape.schedule, shape.padded, store, guided=guided)

    def shape(
        self, config: GrootConfig, inputs: Sequence[Inputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> GrootShape:
        sizes = {(len(i.images), *i.images[0].shape[:2]) for i in inputs}
        if len(sizes) > 1:
            raise ObservationError(f"batch: expected equally many views of one size, got {sorted(sizes)}")
        ((views, height, width),) = sizes
        tokens, padded = self.prompt_bucket(inputs, specs, self.parts)
        grid = config.vision.grid(height, width)
        return GrootShape(len(inputs), schedule, views, tokens, padded, grid, config.arrangement)

    def length(self, config: GrootConfig, inputs: Inputs) -> int:
        if config.head.text_every:
            return len(inputs.tokens)
        rows, columns = config.vision.grid(*inputs.images[0].shape[:2])
        return len(inputs.images) * rows * columns + len(inputs.tokens)

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        if is_lerobot_config(content):
            return content["type"] == "groot" and (release_of(shapes, content) or N17) is self.release
        kind = model_type(content)
        return kind in self.release.kinds if kind else release_of(shapes) is self.release

    def hint(self, folder: Path) -> str | None:
        path = folder / "config.json"
        kind = model_type(read_json(path)) if path.is_file() else ""
        if kind.startswith("gr00t"):
            known = ", ".join(f"{release.name} ({release.kinds[0]})" for release in RELEASES)
            return f"expected GR00T {known}, found {kind}, another network: Isaac-GR00T has a branch that runs it"
        return None

    def load(self, folder: Path, settings: PolicyConfig) -> tuple[Groot, GrootProcessor]:  # type: ignore[override]
        return load_folder(self.release, folder, settings)


GROOT, GROOT_N16, GROOT_N15 = (GrootFamily(release) for release in (N17, N16, N15))
