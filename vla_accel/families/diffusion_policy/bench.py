"""How Diffusion Policy is measured, and against what: lerobot's own code (`lerobot` 0.4.4 to 0.6.1, with torchvision
and diffusers)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import ConfigError
from vla_accel.families.bench import BenchCard, Infer, libero
from vla_accel.families.diffusion_policy.family import DIFFUSION_POLICY
from vla_accel.families.diffusion_policy.network import DiffusionPolicyConfig
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler
from vla_accel.families.lerobot_bench import features, importing, moments_of
from vla_accel.nn.random_weights import Drawn
from vla_accel.nn.resnet import ResNet
from vla_accel.numeric import matmul_precision
from vla_accel.transforms.frames import FrameInputs, FrameProcessor
from vla_accel.transforms.normalisation import Normaliser

LEROBOT_MODES: dict[str, bool] = {"lerobot-eager": False, "lerobot-compile": True}
"""Systems of lerobot, with whether it compiles its U-Net (torch.compile, max-autotune)."""


def ddpm(**changes: Any) -> DiffusionPolicyConfig:
    """The published size: lerobot/diffusion_pusht, 263 M parameters, with 100 DDPM steps."""
    return DiffusionPolicyConfig(**changes)


def ddim(**changes: Any) -> DiffusionPolicyConfig:
    """The same with 10 DDIM steps."""
    return ddpm(scheduler=NoiseScheduler("DDIM"), num_steps=10, **changes)


class DrawnDiffusionPolicy(Drawn):
    """Weights of a Diffusion Policy."""

    def _normal(self, name: str) -> tuple[float, float]:
        if name.endswith("bias") or "running_mean" in name:
            return 0.0, 0.02
        if "norm" in name or ResNet.kept_wide(name):
            # The last norm of a ResNet's branch is smaller, so that activations stay of order one.
            return (0.5 if name.endswith("bn2.weight") else 1.0), 0.05
        gain = 2.0 if ".backbone." in name else 1.0
        return 0.0, math.sqrt(gain / self.shapes[name][1:].numel())

    def _query_key_rows(self, name: str) -> int:
        return 0


def random_moments(transforms: FrameProcessor, rng: np.random.Generator) -> dict[str, Any]:
    """Return random images and states of all moments that a policy sees."""
    preset, moments = transforms.preset, transforms.history
    shapes = zip(preset.images, transforms.frame_shapes, strict=True)
    images = {key: rng.integers(0, 256, (moments, *shape, 3), dtype=np.uint8) for key, shape in shapes}
    states = [preset.split(transforms.state_at(rng.uniform(-1, 1, preset.state_dim))) for _ in range(moments)]
    return {**images, **{key: np.stack([state[key] for state in states]) for key in states[0]}}


class DiffusionPolicyBench(BenchCard[DiffusionPolicyConfig, FrameInputs]):
    """Diffusion Policy with one camera, as it was published."""

    family = DIFFUSION_POLICY
    sizes: ClassVar = {"diffusion_policy": ddpm, "diffusion_policy_ddim": ddim}
    drawn = DrawnDiffusionPolicy
    sweep = (100, 10)
    views = 1
    baselines = tuple(LEROBOT_MODES)
    bound_by_reading = ("denoise",)

    def sweep_of(self, config: DiffusionPolicyConfig) -> tuple[int, ...]:
        return (config.num_steps,)

    def published(self, horizon: int | None = None) -> DiffusionPolicyConfig:
        return ddpm() if horizon is None else ddpm(action_horizon=horizon)

    def dummy(self, config: DiffusionPolicyConfig, views: int) -> FrameProcessor:
        if views != len(config.cameras):
            raise ConfigError(f"views: expected {len(config.cameras)}, the cameras of the network, got {views}")
        preset = dataclasses.replace(
            libero(views), state_dim=config.state_dim, action_dim=config.action_dim, motion_dims=None
        )  # fmt: skip
        pixels = [Normaliser("mean_std", np.array(c.mean), np.array(c.deviation)) for c in config.cameras]
        return FrameProcessor(
            preset=preset, state=Normaliser.identity(config.state_dim), actions=Normaliser.identity(config.action_dim),
            action_dim=config.action_dim, frame_shapes=(config.frame,) * views, cameras=tuple(pixels),
            history=config.history, first=config.history - 1,
        )  # fmt: skip

    def random_observation(self, transforms: FrameProcessor, rng: np.random.Generator) -> dict[str, Any]:
        """An observation with its whole history."""
        return random_moments(transforms, rng)

    def internals(
        self, config: DiffusionPolicyConfig, outputs: Mapping[str, Tensor], inputs: FrameInputs
    ) -> dict[str, Tensor]:
        """`features` (V, n)."""
        return {"features": outputs["features"][0]}

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        config = self.published(horizon)
        with matmul_precision():
            policy = _policy(config, steps, device, compiled=LEROBOT_MODES[name])
        scales = torch.tensor([(c.mean, c.deviation) for c in config.cameras], device=device)[..., None, None]

        @torch.inference_mode()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            batch = moments_of(observation, scales)
            return {"actions": policy.diffusion.generate_actions(batch).float().cpu().numpy()[0]}

        return infer


def _policy(config: DiffusionPolicyConfig, steps: int, device: str, *, compiled: bool) -> Any:
    """Return lerobot's policy of the published size with random weights, in float32, as it is trained and run."""
    with importing("Diffusion Policy", "lerobot==0.6.1 torchvision diffusers"):
        from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
        from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    settings = DiffusionConfig(
        **features([config.frame] * len(config.cameras), config.state_dim, config.action_dim),
        n_obs_steps=config.history, horizon=config.action_horizon, n_action_steps=8, crop_shape=config.crop,
        use_group_norm=True, use_separate_rgb_encoder_per_camera=False, pretrained_backbone_weights=None,
        num_inference_steps=steps, noise_scheduler_type=config.scheduler.kind, compile_model=compiled,
        compile_mode="max-autotune", device=device,
    )  # fmt: skip
    return DiffusionPolicy(settings).eval().to(device)


CARDS = {"diffusion_policy": DiffusionPolicyBench()}
