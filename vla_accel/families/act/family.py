"""ACT: vision → image_tokens → transformer → actions. It has neither a prompt nor noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.act.checkpoint import load_folder
from vla_accel.families.act.native import ActStore
from vla_accel.families.act.network import Act, ActConfig
from vla_accel.families.family import Capabilities, Family, Rows, Shape
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.frames import FrameInputs
from vla_accel.transforms.observations import Observed


class Vision(nn.Module):
    """uint8 images (B, height, width, 3) of every camera to `image_tokens` (B, N, W)."""

    def __init__(self, model: Act) -> None:
        super().__init__()
        self.model = model

    def forward(self, *images: Tensor) -> Tensor:
        return self.model.embed_images(*images)


class Transformer(nn.Module):
    """`vectors` (B, vector_dim) float32 of state and environment, and `image_tokens` (B, N, W), to normalized actions
    (B, H, A) float32."""

    def __init__(self, model: Act) -> None:
        super().__init__()
        self.model = model

    def forward(self, vectors: Tensor, image_tokens: Tensor) -> Tensor:
        return self.model.predict(vectors, image_tokens)


class ActFamily(Family[ActConfig, FrameInputs, Shape]):
    """Action chunking with transformers."""

    name = "act"
    parts = ("vision", "transformer")
    network_class, store_class = Act, ActStore
    capabilities = Capabilities(prompt=False)

    def components(
        self, model: Act, shape: Shape, *, store: ActStore | None = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        config, batch = model.config, shape.batch
        images = [
            TensorSpec(f"image{index}", (batch, camera.height, camera.width, 3), torch.uint8)
            for index, camera in enumerate(config.cameras)
        ]
        vectors = TensorSpec("vectors", (batch, config.vector_dim), torch.float32)
        tokens = TensorSpec("image_tokens", (batch, config.image_tokens, config.width), model.dtype)
        actions = TensorSpec("actions", (batch, config.action_horizon, config.action_dim), torch.float32)
        seeing, projection = "backbone", "encoder_img_feat_input_proj"
        others = [name for name, _ in model.named_children() if name not in (seeing, projection)]
        return (
            Component(
                "vision", Vision(model), tuple(images), (tokens,),
                None if store is None else partial(store.vision, batch), fetch=partial(model.fetch, seeing, projection),
            ),
            Component(
                "transformer", Transformer(model), (vectors, tokens), (actions,),
                None if store is None else partial(store.transformer, batch), fetch=partial(model.fetch, *others),
                products=model.dtype,
            ),
        )  # fmt: skip

    def shape(
        self, config: ActConfig, inputs: Sequence[FrameInputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> Shape:
        return Shape(len(inputs), schedule)

    def schedule(self, config: ActConfig, settings: PolicyConfig) -> Schedule:
        if settings.num_steps not in (None, 1):
            raise ConfigError(
                f"num_steps: expected none for act, which runs once for a chunk, got {settings.num_steps}"
            )
        return super().schedule(config, settings)

    def image_feed(self, config: ActConfig, seen: Sequence[Observed | FrameInputs]) -> Mapping[str, Rows]:
        return {f"image{index}": [one.images[index] for one in seen] for index in range(len(config.cameras))}

    def feed(self, config: ActConfig, inputs: Sequence[FrameInputs]) -> Mapping[str, Rows]:
        return {**self.image_feed(config, inputs), "vectors": np.concatenate([i.state for i in inputs])}

    load = staticmethod(load_folder)


ACT = ActFamily()
