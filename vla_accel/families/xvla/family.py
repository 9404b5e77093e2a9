"""X-VLA: vision → image_tokens → kv_cache → context → denoise → actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families.family import Capabilities, Family, Rows, Shape
from vla_accel.families.xvla.checkpoint import SIGN, load_folder
from vla_accel.families.xvla.native import QUANTISED, XvlaStore
from vla_accel.families.xvla.network import StepConstants, Xvla, XvlaConfig
from vla_accel.nn.davit import Size
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.observations import Observed
from vla_accel.transforms.processing import Inputs


@dataclass(frozen=True)
class XvlaShape(Shape):
    """`sizes`: of each view's image."""

    sizes: tuple[Size, ...]

    @property
    def title(self) -> str:
        return f"{len(self.sizes)} views of {', '.join(f'{height} x {width}' for height, width in self.sizes)}"


class Vision(nn.Module):
    """`image0`, … uint8 (B, height, width, 3), one for each view, to `image_tokens` (B, V, rows, W)."""

    def __init__(self, model: Xvla) -> None:
        super().__init__()
        self.model = model

    def forward(self, *images: Tensor) -> Tensor:
        return self.model.image_tokens(self.model.pixels(*images))


class Context(nn.Module):
    """`image_tokens` and `tokens` (B, T) int64 to `context` (B, C, W)."""

    def __init__(self, model: Xvla) -> None:
        super().__init__()
        self.model = model

    def forward(self, image_tokens: Tensor, tokens: Tensor) -> Tensor:
        return self.model.context(image_tokens, tokens)


class Denoise(Fixed[Xvla]):
    """`noise` (B, H, A) float32, `state` (B, S) float32 and `context` to normalised `actions` (B, H, A) float32."""

    def __init__(self, model: Xvla, schedule: Schedule) -> None:
        parts = ("position_embedding", "action_in", "layers", "norm", "action_out")
        super().__init__(model, lambda: model.step_constants(schedule), parts)
        self.schedule = schedule

    def extra_repr(self) -> str:
        """What a graph of `forward` has as constants; keys of built engines contain it."""
        return f"times={self.schedule.times}"

    def forward(self, noise: Tensor, state: Tensor, context: Tensor) -> Tensor:
        return self.model.denoise(noise, state, context, StepConstants(*self.kept()), schedule=self.schedule)


_VISION = ("vision", "rows", "columns", "frame", "projector", "projector_norm")
_CONTEXT = ("embed", "encoder", "text_proj", "view_proj", "position_embedding", "soft_prompts")


class XvlaFamily(Family[XvlaConfig, Inputs, XvlaShape]):
    """X-VLA of any size."""

    name, signs = "xvla", (SIGN,)
    parts = ("vision", "kv_cache", "denoise")
    network_class, store_class = Xvla, XvlaStore
    capabilities = Capabilities(quantised=QUANTISED, settings=("domain",))
    flow = True

    def components(
        self, model: Xvla, shape: XvlaShape, *, store: XvlaStore | None = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        config, batch, dtype = model.config, shape.batch, model.dtype
        size = config.fitted(shape.sizes[0])
        images = [TensorSpec(f"image{i}", (batch, *its, 3), torch.uint8) for i, its in enumerate(shape.sizes)]
        rows = (batch, len(shape.sizes), config.view_tokens(size), config.encoder.width)
        image_tokens = TensorSpec("image_tokens", rows, dtype)
        tokens = TensorSpec("tokens", (batch, config.max_token_len), torch.int64)
        context = TensorSpec("context", (batch, config.context_tokens(size), config.width), dtype)
        state = TensorSpec("state", (batch, config.state_dim), torch.float32)
        noise, actions = (
            TensorSpec(name, (batch, config.action_horizon, config.action_dim), torch.float32)
            for name in ("noise", "actions")
        )
        denoise = Denoise(model, shape.schedule)
        native = {} if store is None else {
            "vision": partial(store.vision, shape.sizes, batch),
            "kv_cache": partial(store.kv_cache, len(shape.sizes), size, batch),
            "denoise": partial(store.denoise, shape.schedule, size, batch),
        }  # fmt: skip
        return (
            Component(
                "vision", Vision(model), tuple(images), (image_tokens,), native.get("vision"),
                fetch=partial(model.fetch, *_VISION), products=dtype,
            ),
            Component(
                "kv_cache", Context(model), (image_tokens, tokens), (context,), native.get("kv_cache"),
                fetch=partial(model.fetch, *_CONTEXT), products=dtype,
            ),
            Component(
                "denoise", denoise, (noise, state, context), (actions,), native.get("denoise"),
                quantised=QUANTISED["denoise"], fetch=denoise.fetch, products=dtype,
            ),
        )  # fmt: skip

    def shape(
        self, config: XvlaConfig, inputs: Sequence[Inputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> XvlaShape:
        sizes = {tuple((image.shape[0], image.shape[1]) for image in one.images) for one in inputs}
        if len(sizes) > 1:
            raise ObservationError(f"batch: expected equally many views of the same sizes, got {sorted(sizes)}")
        return XvlaShape(len(inputs), schedule, *sizes)

    def schedule(self, config: XvlaConfig, settings: PolicyConfig) -> Schedule:
        """Any times: the network predicts actions from every time. A step mixes them with the call's noise, which a
        warm start does not have."""
        if settings.warm_start is not None:
            raise ConfigError(f"warm_start: expected none for {self.name}, whose steps start from the call's noise")
        return super().schedule(config, settings)

    def image_feed(self, config: XvlaConfig, seen: Sequence[Observed | Inputs]) -> Mapping[str, Rows]:
        return {f"image{i}": [one.images[i] for one in seen] for i in range(len(seen[0].images))}

    def feed(self, config: XvlaConfig, inputs: Sequence[Inputs]) -> Mapping[str, Rows]:
        return {
            **self.image_feed(config, inputs), "tokens": [i.tokens for i in inputs], "state": [i.state for i in inputs]
        }  # fmt: skip

    load = staticmethod(load_folder)


XVLA = XvlaFamily()
