"""starVLA's QwenGR00T and QwenPI (vision → kv_cache → denoise → actions) and QwenOFT (vision → decode → actions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import Component, TensorSpec
from vla_accel.config import PolicyConfig
from vla_accel.families.family import Capabilities
from vla_accel.families.starvla.checkpoint import framework_of, load_folder, unconverted
from vla_accel.families.starvla.native import OftStore
from vla_accel.families.starvla.network import QwenOft
from vla_accel.families.vla_jepa.family import JepaShape, VlaJepaFamily
from vla_accel.nn.dit import QUANTISED
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.qwen_components import image_specs, vision_component
from vla_accel.nn.qwen_language import Layout, Places


class StarVlaFamily(VlaJepaFamily):
    """A framework of starVLA."""

    capabilities = Capabilities(quantised=QUANTISED, settings=("embodiment",))

    def __init__(self, name: str, framework: str) -> None:
        self.name, self.framework = name, framework

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return framework_of(content) == self.framework

    def hint(self, folder: Path) -> str | None:
        return unconverted(folder)

    def load(self, folder: Path, settings: PolicyConfig) -> Any:  # type: ignore[override]
        return load_folder(self.framework, folder, settings)


class Decode(Fixed[QwenOft]):
    """image_tokens, deepstack, text tokens (B, L) int64 and, if rows may be shorter, their `lengths` (B,) int32, to
    normalised actions (B, H, A) float32."""

    def __init__(self, model: QwenOft, layout: Layout) -> None:
        super().__init__(model, lambda: layout.places(model.device), model.names("embed", "language", "head"))

    def forward(self, image_tokens: Tensor, deepstack: Tensor, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.model.read(image_tokens, deepstack, tokens, Places(*self.kept()), lengths).float()


class OftFamily(StarVlaFamily):
    """QwenOFT: one forward pass, without noise and steps."""

    network_class, store_class = QwenOft, OftStore  # type: ignore[assignment]
    parts = ("vision", "decode")
    capabilities = Capabilities(settings=("embodiment",))
    flow = False

    def components(  # type: ignore[override]
        self, model: QwenOft, shape: JepaShape, *, store: Any = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        layout, batch, config = shape.layout, shape.batch, model.config
        native = None if store is None or not shape.padded else store
        module, inputs = Decode(model, layout), [*image_specs(model, batch, layout)]
        inputs.append(TensorSpec("tokens", (batch, layout.text), torch.int64))
        if shape.padded:
            inputs.append(TensorSpec("lengths", (batch,), torch.int32))
        actions = TensorSpec("actions", (batch, config.action_horizon, config.action_dim), torch.float32)
        decode = Component(
            "decode", module, tuple(inputs), (actions,), native and partial(native.decode, batch, layout),
            fetch=module.fetch, products=model.dtype,
        )  # fmt: skip
        return vision_component(model, batch, layout, native and partial(native.vision, batch, layout)), decode


STARVLA_GROOT = StarVlaFamily("starvla_groot", "QwenGR00T")
STARVLA_PI = StarVlaFamily("starvla_pi", "QwenPI")
STARVLA_OFT = OftFamily("starvla_oft", "QwenOFT")
