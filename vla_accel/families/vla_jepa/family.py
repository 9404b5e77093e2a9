"""VLA-JEPA: vision → image_tokens, deepstack → kv_cache → keys and values → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec
from vla_accel.errors import ObservationError
from vla_accel.families.family import Capabilities, Rows
from vla_accel.families.prompted import TextFamily
from vla_accel.families.qwen import LayoutShape
from vla_accel.families.vla_jepa.checkpoint import SIGNS, load_folder
from vla_accel.families.vla_jepa.native import VlaJepaStore
from vla_accel.families.vla_jepa.network import VlaJepa, VlaJepaConfig
from vla_accel.nn.dit import QUANTISED
from vla_accel.nn.dit_components import cache_specs, denoise_component
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.flow import Schedule
from vla_accel.nn.qwen_components import image_specs, vision_component
from vla_accel.nn.qwen_language import Layout, Places
from vla_accel.transforms.processing import Inputs


class JepaShape(LayoutShape):
    """`lengths` are the text tokens, or where all tokens are the condition, the tokens that are no padding."""

    def row_length(self, config: VlaJepaConfig) -> int:
        return self.tokens if config.condition else self.layout.tokens


class KvCache(Fixed[VlaJepa]):
    """From image_tokens, deepstack, text tokens (B, L) int64 and, if rows may be shorter, their `lengths` (B,) int32,
    compute keys and values (n, B, condition, heads, d) of the last tokens of each prompt, or of all."""

    def __init__(self, model: VlaJepa, layout: Layout) -> None:
        crossing = [name for name in model.names("head") if ".kv_proj." in name]
        super().__init__(model, lambda: layout.places(model.device), [*model.names("embed", "language"), *crossing])

    def forward(
        self, image_tokens: Tensor, deepstack: Tensor, tokens: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.model.read(image_tokens, deepstack, tokens, Places(*self.kept()), lengths)["all"]


class VlaJepaFamily(TextFamily[VlaJepaConfig, Inputs, JepaShape]):
    """VLA-JEPA of any size."""

    name, signs = "vla_jepa", SIGNS
    network_class, store_class = VlaJepa, VlaJepaStore
    parts = ("vision", "kv_cache", "denoise")
    capabilities = Capabilities(quantised=QUANTISED)
    flow = True

    def components(
        self, model: VlaJepa, shape: JepaShape, *, store: Any = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        layout, batch, config = shape.layout, shape.batch, model.config
        cache = cache_specs(config.head, batch, {"all": config.condition or layout.tokens}, model.dtype)

        def native(make: str, *sizes: Any) -> Callable[..., Any] | None:
            return None if store is None or not shape.padded else partial(getattr(store, make), batch, *sizes)

        module, inputs = KvCache(model, layout), [*image_specs(model, batch, layout)]
        inputs.append(TensorSpec("tokens", (batch, layout.text), torch.int64))
        # Padding behind a prompt changes nothing before it: only its end, where the condition is, has to be known.
        if shape.padded and config.condition:
            inputs.append(TensorSpec("lengths", (batch,), torch.int32))
        reader = Component(
            "kv_cache", module, tuple(inputs), cache, native("kv_cache", layout), fetch=module.fetch,
            products=model.dtype,
        )  # fmt: skip
        last = denoise_component(
            model,
            shape.schedule,
            cache,
            guided=False,
            padded=shape.padded and not config.condition,
            native=native("denoise", shape.schedule),
        )
        return vision_component(model, batch, layout, native("vision", layout)), reader, last

    def shape(
        self, config: VlaJepaConfig, inputs: Sequence[Inputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> JepaShape:
        sizes = {(len(i.images), config.image_size(i.images[0].shape[:2]), i.cameras) for i in inputs}
        if len(sizes) > 1:
            found = sorted((views, size) for views, size, _ in sizes)
            raise ObservationError(f"batch: expected equally many views of one size, got {found}")
        ((views, size, cameras),) = sizes
        tokens, padded = self.prompt_bucket(inputs, specs, self.parts)
        return JepaShape(len(inputs), schedule, views, tokens, padded, config.vision.grid(*size), cameras=cameras)

    def length(self, config: VlaJepaConfig, inputs: Inputs) -> int:
        if config.condition:
            return len(inputs.tokens)
        rows, columns = config.vision.grid(*config.image_size(inputs.images[0].shape[:2]))
        return len(inputs.images) * rows * columns + len(inputs.tokens)

    def feed(self, config: VlaJepaConfig, inputs: Sequence[Inputs]) -> Mapping[str, Rows]:
        found = super().feed(config, inputs)
        return found if config.head.state else {name: rows for name, rows in found.items() if name != "state"}

    load = staticmethod(load_folder)


VLA_JEPA = VlaJepaFamily()
