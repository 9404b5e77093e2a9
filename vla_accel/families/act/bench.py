"""How ACT is measured, and against what: lerobot's own code (`lerobot` 0.4.4 to 0.6.1, with torchvision)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import ConfigError
from vla_accel.families.act.family import ACT
from vla_accel.families.act.network import ActConfig, act
from vla_accel.families.bench import BenchCard, Infer, libero
from vla_accel.families.lerobot_bench import batch_of, features, importing
from vla_accel.nn.random_weights import Drawn
from vla_accel.nn.resnet import Camera, ResNet
from vla_accel.numeric import matmul_precision
from vla_accel.transforms.frames import FrameInputs, FrameProcessor
from vla_accel.transforms.normalisation import Normaliser

LEROBOT_MODES: dict[str, bool] = {"lerobot-eager": False, "lerobot-compile": True}
"""Systems of lerobot, with whether torch.compile (max-autotune) runs its network."""
_BRANCH = 0.5
"""Weight of the norm at the end of a ResNet's branch, so that activations stay of order one."""
_QUERIES = 3.0
"""Deviation of the decoder's positions, without which all actions of a chunk would be alike."""


class DrawnAct(Drawn):
    """Weights of an ACT."""

    def _normal(self, name: str) -> tuple[float, float]:
        if ResNet.kept_wide(name):
            last = name.endswith("bn2.weight")
            return (_BRANCH if last else 1.0, 0.05) if name.endswith(("weight", "running_var")) else (0.0, 0.02)
        if name.startswith("backbone."):
            return 0.0, math.sqrt(2.0 / self.shapes[name][1:].numel())
        if "pos_embed" in name:
            return 0.0, _QUERIES if name.startswith("decoder") else 0.5
        mean, deviation = super()._normal(name)
        return mean, deviation / 5 if name == "encoder_img_feat_input_proj.weight" else deviation

    def _query_key_rows(self, name: str) -> int:
        return 2 * self.config.width if name.endswith("in_proj_weight") else 0


class ActBench(BenchCard[ActConfig, FrameInputs]):
    """ACT with two cameras."""

    family = ACT
    sizes: ClassVar = {"act": act}
    drawn = DrawnAct
    sweep = (1,)
    own_steps = False
    baselines = tuple(LEROBOT_MODES)

    def published(self, horizon: int | None = None) -> ActConfig:
        return act(cameras=(Camera(480, 640),) * 2, state_dim=8, action_dim=7, action_horizon=horizon or 100)

    def dummy(self, config: ActConfig, views: int) -> FrameProcessor:
        if views != len(config.cameras):
            raise ConfigError(f"views: expected {len(config.cameras)}, the cameras of the network, got {views}")
        pixels = [Normaliser("mean_std", np.array(c.mean), np.array(c.deviation)) for c in config.cameras]
        return FrameProcessor(
            preset=libero(views), state=Normaliser.identity(config.vector_dim),
            actions=Normaliser.identity(config.action_dim), action_dim=config.action_dim,
            frame_shapes=tuple((c.height, c.width) for c in config.cameras), cameras=tuple(pixels),
        )  # fmt: skip

    def random_observation(self, transforms: FrameProcessor, rng: np.random.Generator) -> dict[str, Any]:
        preset = transforms.preset
        shapes = zip(preset.images, transforms.frame_shapes, strict=True)
        images = {key: rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for key, shape in shapes}
        return {**images, **preset.split(transforms.state_at(rng.standard_normal(preset.state_dim)))}

    def internals(self, config: ActConfig, outputs: Mapping[str, Tensor], inputs: FrameInputs) -> dict[str, Tensor]:
        """`image_tokens` (N, W)."""
        return {"image_tokens": outputs["image_tokens"][0]}

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        with matmul_precision():
            policy = _policy(self.published(horizon), device)
            if LEROBOT_MODES[name]:
                policy.model = torch.compile(policy.model, mode="max-autotune")
        scales = [torch.tensor((c.mean, c.deviation), device=device)[..., None, None] for c in
                  self.published(horizon).cameras]  # fmt: skip

        @torch.inference_mode()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            batch = batch_of(observation, device, scales)
            return {"actions": policy.predict_action_chunk(batch).float().cpu().numpy()[0]}

        return infer


def _policy(config: ActConfig, device: str) -> Any:
    """Return lerobot's policy of the published size with random weights, in float32, as it is trained and run."""
    with importing("ACT", "lerobot==0.6.1 torchvision"):
        from lerobot.policies.act.configuration_act import ACTConfig
        from lerobot.policies.act.modeling_act import ACTPolicy
    settings = ACTConfig(
        **features([(c.height, c.width) for c in config.cameras], config.state_dim, config.action_dim),
        chunk_size=config.action_horizon, n_action_steps=config.action_horizon, pretrained_backbone_weights=None,
        device=device,
    )  # fmt: skip
    return ACTPolicy(settings).eval().to(device)


CARDS = {"act": ActBench()}
