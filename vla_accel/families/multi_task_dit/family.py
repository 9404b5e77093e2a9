"""Multi-task DiT: vision → features, kv_cache → text, denoise → actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.family import IMAGES, Capabilities, Family, Rows, Shape
from vla_accel.families.multi_task_dit.checkpoint import load_folder
from vla_accel.families.multi_task_dit.native import QUANTISED, MultiTaskDitStore
from vla_accel.families.multi_task_dit.network import MultiTaskDit, MultiTaskDitConfig
from vla_accel.families.multi_task_dit.transforms import TaskInputs
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.observations import Observed


@dataclass(frozen=True)
class PixelScales:
    """Mean and deviation of each frame, (V, 3, 1, 1)."""

    mean: Tensor
    deviation: Tensor


class Vision(Fixed[MultiTaskDit]):
    """`images` (B, V, H, W, 3) uint8 to `features` (B, V, n)."""

    def __init__(self, model: MultiTaskDit) -> None:
        super().__init__(model, lambda: PixelScales(*model.pixel_scales()), ["encoders"])

    def forward(self, images: Tensor) -> Tensor:
        return self.model.see(images, *self.kept())


class Text(nn.Module):
    """`tokens` (B, L) int64 to `text` (B, width)."""

    def __init__(self, model: MultiTaskDit) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.text(tokens)


@dataclass(frozen=True)
class Times:
    """As of `MultiTaskDit.times`."""

    tables: Tensor


class Denoise(Fixed[MultiTaskDit]):
    """noise, `features` (B, V, n), `text` (B, width) and `state` (B, history, state_dim) float32 to normalised actions
    (B, T, action_dim) float32."""

    def __init__(self, model: MultiTaskDit, schedule: Schedule) -> None:
        self.steps = steps = model.config.steps(schedule)
        read = [name for name in model.names("head") if ".time_" not in name and not name.endswith(".modulation.bias")]
        super().__init__(model, lambda: Times(model.times(steps)), read)

    def extra_repr(self) -> str:
        """What a graph of `forward` has as constants; keys of built engines contain it."""
        return f"steps={self.steps}, clip={self.model.config.clip}"

    def forward(self, noise: Tensor, features: Tensor, text: Tensor, state: Tensor) -> Tensor:
        condition = self.model.config.condition(features, text, state)
        return self.model.sample(noise, condition, self.kept()[0], self.steps)


class MultiTaskDitFamily(Family[MultiTaskDitConfig, TaskInputs, Shape]):
    """lerobot's Multi-task DiT. The steps integrate a flow, or are those of a noise scheduler."""

    name = "multi_task_dit"
    parts = ("vision", "kv_cache", "denoise")
    network_class, store_class = MultiTaskDit, MultiTaskDitStore
    flow = True
    capabilities = Capabilities(quantised=QUANTISED)

    def components(
        self, model: MultiTaskDit, shape: Shape, *, store: MultiTaskDitStore | None = None, scales: Any = None,
        rtc: Any = None,
    ) -> Sequence[Component]:  # fmt: skip
        c, batch, wide = model.config, shape.batch, torch.float32
        images = TensorSpec(IMAGES, (batch, c.views, *c.frame, 3), torch.uint8)
        features = TensorSpec("features", (batch, c.views, c.vision.width), model.dtype)
        tokens = TensorSpec("tokens", (batch, c.text.positions), torch.int64)
        text = TensorSpec("text", (batch, c.width), model.dtype)
        noise = TensorSpec("noise", (batch, *self.noise_shape(c, shape.steps)), wide)
        state = TensorSpec("state", (batch, c.history, c.state_dim), wide)
        actions = TensorSpec("actions", (batch, c.action_horizon, c.action_dim), wide)
        vision, denoise = Vision(model), Denoise(model, shape.schedule)
        native = {} if store is None else {
            "vision": partial(store.vision, batch), "kv_cache": partial(store.kv_cache, batch),
            "denoise": partial(store.denoise, batch, shape.schedule),
        }  # fmt: skip
        return (
            Component(
                "vision", vision, (images,), (features,), native.get("vision"), fetch=vision.fetch,
                products=model.dtype,
            ),
            Component(
                "kv_cache", Text(model), (tokens,), (text,), native.get("kv_cache"), fetch=partial(model.fetch, "text"),
                products=model.dtype, seldom=True,
            ),
            Component(
                "denoise", denoise, (noise, features, text, state), (actions,), native.get("denoise"),
                quantised=QUANTISED["denoise"], fetch=denoise.fetch, products=model.dtype,
            ),
        )  # fmt: skip

    def has_flow(self, config: MultiTaskDitConfig) -> bool:
        return config.scheduler is None

    def schedule(self, config: MultiTaskDitConfig, settings: PolicyConfig) -> Schedule:
        schedule = super().schedule(config, settings)
        if settings.warm_start is not None:
            raise ConfigError(f"warm_start: expected none for {self.name}, whose chunks begin in the past")
        config.steps(schedule)  # refuses more steps than those of the training
        return schedule

    def noise_shape(self, config: MultiTaskDitConfig, num_steps: int) -> tuple[int, ...]:
        draws = 1 if config.scheduler is None else config.scheduler.draws(num_steps)
        chunk = config.action_horizon, config.action_dim
        return chunk if draws == 1 else (draws, *chunk)

    def shape(
        self, config: MultiTaskDitConfig, inputs: Sequence[TaskInputs], schedule: Schedule,
        specs: Mapping[str, EngineSpec],
    ) -> Shape:  # fmt: skip
        return Shape(len(inputs), schedule)

    def image_feed(self, config: MultiTaskDitConfig, seen: Sequence[Observed | TaskInputs]) -> Mapping[str, Rows]:
        return {IMAGES: [image for one in seen for image in one.images]}

    def feed(self, config: MultiTaskDitConfig, inputs: Sequence[TaskInputs]) -> Mapping[str, Rows]:
        return {
            **self.image_feed(config, inputs), "tokens": [one.tokens for one in inputs],
            "state": [one.state for one in inputs],
        }  # fmt: skip

    load = staticmethod(load_folder)


MULTI_TASK_DIT = MultiTaskDitFamily()
