"""A small Diffusion Policy with random weights: LIBERO's two cameras, frames of 40 x 56 pixels."""

from __future__ import annotations

from typing import Any

from vla_accel.families.bench import bench_card
from vla_accel.families.diffusion_policy.family import DIFFUSION_POLICY
from vla_accel.families.diffusion_policy.network import DiffusionPolicy, DiffusionPolicyConfig
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler
from vla_accel.nn.random_weights import random_model
from vla_accel.nn.resnet import Camera


def tiny_config(**changes: Any) -> DiffusionPolicyConfig:
    """Two unlike cameras, DDPM with four steps, three levels of which no width is a power of two."""
    fields: dict[str, Any] = {
        "cameras": (Camera(40, 56, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), Camera(40, 56)), "crop": (33, 49),
        "keypoints": 8, "state_dim": 8, "action_dim": 7, "action_horizon": 8, "widths": (16, 24, 40),
        "time_dim": 16, "scheduler": NoiseScheduler(), "num_steps": 4,
    }  # fmt: skip
    return DiffusionPolicyConfig(**(fields | changes))


def tiny_model(config: DiffusionPolicyConfig | None = None, seed: int = 0) -> DiffusionPolicy:
    """Random weights in float32, all read."""
    card = bench_card(DIFFUSION_POLICY)
    return (
        random_model(DiffusionPolicy, config or tiny_config(), seed=seed)
        if card is None
        else card.random(config or tiny_config(), seed=seed, device="cpu", dtype=__import__("torch").float32).whole()
    )
