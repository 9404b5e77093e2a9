"""OpenVLA-OFT: vision → image_tokens → decode → actions, in one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec
from vla_accel.errors import ObservationError
from vla_accel.families.family import Capabilities, Rows
from vla_accel.families.openvla_oft.checkpoint import is_openvla, load_folder, unmerged
from vla_accel.families.openvla_oft.native import QUANTISED, OftStore
from vla_accel.families.openvla_oft.network import OpenVlaOft, OpenVlaOftConfig
from vla_accel.families.prompted import TextFamily, TextShape
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.processing import Inputs


@dataclass(frozen=True)
class OftShape(TextShape):
    """`lengths` are the rows of the language model that are no padding."""

    @property
    def title(self) -> str:
        return f"{self.views} views and {self.tokens} prompt tokens"

    def row_length(self, config: OpenVlaOftConfig) -> int:
        return config.layout(self.views, self.tokens).rows


class Vision(nn.Module):
    """images uint8 (B, V, S, S, 3) to image tokens (B, V * tokens, width)."""

    def __init__(self, model: OpenVlaOft) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.embed_images(images)


class Decode(nn.Module):
    """image_tokens, tokens (B, L) int64, `state` (B, state_dim) float32 of models with one, and, if rows may be
    shorter, their `lengths` (B,) int32, to normalized actions (B, H, A) float32."""

    def __init__(self, model: OpenVlaOft) -> None:
        super().__init__()
        self.model = model

    def forward(self, image_tokens: Tensor, tokens: Tensor, *rest: Tensor) -> Tensor:
        state, *lengths = rest if self.model.config.state_dim else (None, *rest)
        return self.model.read(image_tokens, tokens, state, lengths[0] if lengths else None).float()


class OpenVlaOftFamily(TextFamily[OpenVlaOftConfig, Inputs, OftShape]):
    """OpenVLA-OFT of any size."""

    name = "openvla_oft"
    network_class, store_class = OpenVlaOft, OftStore
    parts = ("vision", "decode")
    capabilities = Capabilities(lora=True, quantised=QUANTISED, settings=("embodiment",))

    def components(
        self, model: OpenVlaOft, shape: OftShape, *, store: Any = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        batch, config = shape.batch, model.config
        layout, size = config.layout(shape.views, shape.tokens), config.dino.image_size
        native = None if store is None or not shape.padded else store
        image_tokens = TensorSpec("image_tokens", (batch, layout.images, config.language.width), model.dtype)
        vision = Component(
            "vision", Vision(model), (TensorSpec("images", (batch, shape.views, size, size, 3), torch.uint8),),
            (image_tokens,), native and partial(native.vision, batch, shape.views),
            fetch=partial(model.fetch, "dino", "siglip", "projector"),
        )  # fmt: skip
        inputs = [image_tokens, TensorSpec("tokens", (batch, shape.tokens), torch.int64)]
        parts = ["embed", "language", "head"]
        if config.state_dim:
            inputs.append(TensorSpec("state", (batch, config.state_dim), torch.float32))
            parts.append("state")
        if shape.padded:
            inputs.append(TensorSpec("lengths", (batch,), torch.int32))
        actions = TensorSpec("actions", (batch, config.action_horizon, config.action_dim), torch.float32)
        decode = Component(
            "decode", Decode(model), tuple(inputs), (actions,), native and partial(native.decode, batch, layout),
            quantised=QUANTISED["decode"], fetch=partial(model.fetch, *parts), products=model.dtype,
        )  # fmt: skip
        return vision, decode

    def shape(
        self, config: OpenVlaOftConfig, inputs: Sequence[Inputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> OftShape:
        views = len(inputs[0].images)
        if any(len(i.images) != views for i in inputs):
            raise ObservationError(f"batch: expected equally many views, got {[len(i.images) for i in inputs]}")
        tokens, padded = self.prompt_bucket(inputs, specs, self.parts)
        return OftShape(len(inputs), schedule, views, tokens, padded, cameras=inputs[0].cameras)

    def length(self, config: OpenVlaOftConfig, inputs: Inputs) -> int:
        return config.layout(len(inputs.images), len(inputs.tokens)).rows

    def feed(self, config: OpenVlaOftConfig, inputs: Sequence[Inputs]) -> Mapping[str, Rows]:
        found = super().feed(config, inputs)
        return found if config.state_dim else {name: rows for name, rows in found.items() if name != "state"}

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return is_openvla(content)

    def hint(self, folder: Path) -> str | None:
        return unmerged(folder)

    load = staticmethod(load_folder)


OPENVLA_OFT = OpenVlaOftFamily()
