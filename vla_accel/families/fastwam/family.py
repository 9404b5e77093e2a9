"""FastWAM: vision → image_tokens → kv_cache → keys and values of video and text → denoise → actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_accel.component import Component
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ObservationError
from vla_accel.families.family import IMAGES, Capabilities, Family, Rows
from vla_accel.families.fastwam.checkpoint import SIGNS, load_folder, prompts_of
from vla_accel.families.fastwam.components import QUANTISED, FastWamShape, components
from vla_accel.families.fastwam.native import FastWamStore
from vla_accel.families.fastwam.network import FastWam, FastWamConfig
from vla_accel.families.fastwam.text import Prompts
from vla_accel.families.fastwam.transforms import FastWamInputs
from vla_accel.nn.flow import Schedule


class FastWamFamily(Family[FastWamConfig, FastWamInputs, FastWamShape]):
    """FastWAM of any size."""

    name, signs = "fastwam", SIGNS
    network_class, store_class = FastWam, FastWamStore
    parts = ("vision", "kv_cache", "denoise")
    capabilities = Capabilities(quantised=QUANTISED, settings=("wan", "text_encoder"))
    flow = True

    def components(
        self, model: FastWam, shape: FastWamShape, *, store: Any = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        return components(model, shape, store)

    def shape(
        self, config: FastWamConfig, inputs: Sequence[FastWamInputs], schedule: Schedule,
        specs: Mapping[str, EngineSpec],
    ) -> FastWamShape:  # fmt: skip
        sizes = {(len(i.images), i.images[0].shape[:2]) for i in inputs}
        if len(sizes) > 1:
            raise ObservationError(f"batch: expected equally many views of one size, got {sorted(sizes)}")
        ((views, size),) = sizes
        return FastWamShape(len(inputs), schedule, views, size, config.context_rows(max(len(i.text) for i in inputs)))

    def schedule(self, config: FastWamConfig, settings: PolicyConfig) -> Schedule:
        """Without placed times, the checkpoint's shifted steps."""
        if settings.schedule is None:
            return config.schedule(settings.num_steps or config.num_steps)
        return super().schedule(config, settings)

    def noise(self, config: FastWamConfig) -> np.ndarray | None:
        if config.noise_seed is None:
            return None
        generator = torch.Generator().manual_seed(config.noise_seed)
        return torch.randn(1, config.action_horizon, config.action_dim, generator=generator).numpy()[0]

    def image_feed(self, config: FastWamConfig, seen: Sequence[Any]) -> Mapping[str, Rows]:
        return {IMAGES: [image for one in seen for image in one.images]}

    def feed(self, config: FastWamConfig, inputs: Sequence[FastWamInputs]) -> Mapping[str, Rows]:
        counts = [len(i.text) for i in inputs]
        return {
            **self.image_feed(config, inputs), "text": [i.text for i in inputs], "state": [i.state for i in inputs],
            "text_bias": text_bias(counts, config.text_rows, config.context_rows(max(counts))),
        }  # fmt: skip

    def hint(self, folder: Path) -> str | None:
        pickles = sorted(path.name for path in folder.glob("*uncond*.pt"))
        if not pickles:
            return None
        return (
            f"{pickles[0]} is a pickle of FastWAM's own project, which is never opened: pass lerobot's folder of it, "
            "such as lerobot/fastwam_libero_uncond_2cam224"
        )

    def prompts(self, folder: Path, settings: PolicyConfig) -> Prompts:
        return prompts_of(folder, settings)

    load = staticmethod(load_folder)


def text_bias(counts: Sequence[int], most: int, rows: int) -> np.ndarray:
    """What is added to the scores of `rows` keys, (B, rows) float32: one of the state, one of all padding of a prompt
    of `most` rows, and those of `counts` tokens."""
    bias = np.full((len(counts), rows), -np.inf, np.float32)
    for row, count in zip(bias, counts, strict=True):
        row[: count + 2] = 0.0
        row[1] = np.log(most - count) if count < most else -np.inf
    return bias


FASTWAM = FastWamFamily()
