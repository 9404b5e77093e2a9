"""Diffusion Policy: vision → features → denoise → actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.checkpoints.lerobot import is_lerobot_config
from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.families.diffusion_policy.checkpoint import load_folder
from vla_accel.families.diffusion_policy.native import QUANTISED, DiffusionPolicyStore
from vla_accel.families.diffusion_policy.network import DiffusionPolicy, DiffusionPolicyConfig
from vla_accel.families.family import IMAGES, Capabilities, Family, Rows, Shape
from vla_accel.nn.flow import Schedule
from vla_accel.transforms.frames import FrameInputs
from vla_accel.transforms.observations import Observed


class _Part(nn.Module):
    """A part of the network, and constants that are computed once, when its weights are fetched."""

    def __init__(self, model: DiffusionPolicy, part: str) -> None:
        super().__init__()
        self.model, self.part, self._names = model, part, list[str]()
        if model.origin is None:
            self.fetch()

    def constants(self) -> Sequence[Tensor]:
        raise NotImplementedError

    def fetch(self) -> list[Tensor]:
        """Read the weights, and compute the constants."""
        weights = self.model.fetch(self.part)
        if not self._names:
            with torch.inference_mode():
                for index, value in enumerate(self.constants()):
                    self._names.append(f"constant{index}")
                    self.register_buffer(self._names[-1], value, persistent=False)
        return weights

    def kept(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]


class Vision(_Part):
    """images (B, V, H, W, 3) uint8 to features (B, V, n) float32."""

    def __init__(self, model: DiffusionPolicy) -> None:
        super().__init__(model, "encoders")

    def constants(self) -> Sequence[Tensor]:
        return self.model.pixel_constants()

    def forward(self, images: Tensor) -> Tensor:
        return self.model.see(images, *self.kept())


class Denoise(_Part):
    """noise, features (B, V, n) and state (B, history, state_dim) float32 to normalised actions (B, T, action_dim)
    float32."""

    def __init__(self, model: DiffusionPolicy, num_steps: int) -> None:
        self.steps = model.config.scheduler.steps(num_steps)
        super().__init__(model, "unet")

    def extra_repr(self) -> str:
        """What a graph of `forward` has as constants; keys of built engines contain it."""
        return f"steps={len(self.steps)}, scheduler={self.model.config.scheduler}"

    def constants(self) -> Sequence[Tensor]:
        return self.model.time_tables([step.time for step in self.steps])

    def forward(self, noise: Tensor, features: Tensor, state: Tensor) -> Tensor:
        return self.model.sample(noise, self.model.condition(features, state), self.kept(), self.steps)


class DiffusionPolicyFamily(Family[DiffusionPolicyConfig, FrameInputs, Shape]):
    """lerobot's Diffusion Policy."""

    name = "diffusion_policy"
    parts = ("vision", "denoise")
    network_class, store_class = DiffusionPolicy, DiffusionPolicyStore
    capabilities = Capabilities(quantised=QUANTISED, prompt=False)

    def components(
        self, model: DiffusionPolicy, shape: Shape, *, store: DiffusionPolicyStore | None = None, scales: Any = None,
        rtc: Any = None,
    ) -> Sequence[Component]:  # fmt: skip
        c, batch, wide = model.config, shape.batch, torch.float32
        views = c.history * len(c.cameras)
        images = TensorSpec(IMAGES, (batch, views, *c.frame, 3), torch.uint8)
        features = TensorSpec("features", (batch, views, 2 * c.keypoints), wide)
        noise = TensorSpec("noise", (batch, *self.noise_shape(c, shape.steps)), wide)
        state = TensorSpec("state", (batch, c.history, c.state_dim), wide)
        actions = TensorSpec("actions", (batch, c.action_horizon, c.action_dim), wide)
        vision, denoise = Vision(model), Denoise(model, shape.steps)
        return (
            Component(
                "vision", vision, (images,), (features,),
                None if store is None else partial(store.vision, batch),
                fetch=vision.fetch, products=model.dtype,
            ),
            Component(
                "denoise", denoise, (noise, features, state), (actions,),
                None if store is None else partial(store.denoise, batch, shape.steps),
                quantised=QUANTISED["denoise"], fetch=denoise.fetch, products=model.dtype,
            ),
        )  # fmt: skip

    def schedule(self, config: DiffusionPolicyConfig, settings: PolicyConfig) -> Schedule:
        schedule = super().schedule(config, settings)
        config.scheduler.steps(schedule.steps)  # refuses more steps than those of the training
        return schedule

    def noise_shape(self, config: DiffusionPolicyConfig, num_steps: int) -> tuple[int, ...]:
        draws, chunk = config.scheduler.draws(num_steps), (config.action_horizon, config.action_dim)
        return chunk if draws == 1 else (draws, *chunk)

    def shape(
        self, config: DiffusionPolicyConfig, inputs: Sequence[FrameInputs], schedule: Schedule,
        specs: Mapping[str, EngineSpec],
    ) -> Shape:  # fmt: skip
        return Shape(len(inputs), schedule)

    def image_feed(self, config: DiffusionPolicyConfig, seen: Sequence[Observed | FrameInputs]) -> Mapping[str, Rows]:
        return {IMAGES: [image for one in seen for image in one.images]}

    def feed(self, config: DiffusionPolicyConfig, inputs: Sequence[FrameInputs]) -> Mapping[str, Rows]:
        return {**self.image_feed(config, inputs), "state": [one.state for one in inputs]}

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return is_lerobot_config(content) and content["type"] == "diffusion"

    load = staticmethod(load_folder)


DIFFUSION_POLICY = DiffusionPolicyFamily()
