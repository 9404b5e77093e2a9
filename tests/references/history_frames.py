"""Shared by the scripts that save lerobot's policies with a history: statistics, observations and batches.

It imports nothing of vla_accel and nothing of lerobot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

STATE_DIM, ACTION_DIM, TICKS = 5, 4, 5


def statistics_of(inputs: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Unlike for every feature, channel and dimension; one of the state has no range."""
    generator = torch.Generator().manual_seed(3)

    def drawn(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        low, high = torch.rand(shape, generator=generator) - 1.5, torch.rand(shape, generator=generator) + 0.5
        return {"min": low, "max": high, "mean": 0.3 + 0.3 * torch.rand(shape, generator=generator),
                "std": 0.2 + 0.2 * torch.rand(shape, generator=generator)}  # fmt: skip

    table = {key: drawn((3, 1, 1) if len(f.shape) == 3 else tuple(f.shape)) for key, f in inputs.items()}
    table["action"] = drawn((ACTION_DIM,))
    table["observation.state"]["max"][1] = table["observation.state"]["min"][1]
    return table


def observations(
    policy: Any, generator: np.random.Generator, count: int, moments: int
) -> tuple[np.ndarray, np.ndarray]:
    cameras = policy.config.image_features
    size = next(iter(cameras.values())).shape[1:]
    images = generator.integers(0, 256, (count, moments, len(cameras), *size, 3), dtype=np.uint8)
    state = generator.uniform(-1.2, 1.2, (count, moments, STATE_DIM)).astype(np.float32)
    # Any other value where the training data have one would hide everything else.
    state[..., 1] = policy.statistics["observation.state"]["min"][1]
    return images, state


def batch_of(policy: Any, images: np.ndarray, state: np.ndarray) -> dict[str, torch.Tensor]:
    """lerobot's batch of images (..., cameras, H, W, 3) and states."""
    pixels = torch.from_numpy(images).movedim(-1, -3).float() / 255
    batch = {key: pixels[..., index, :, :, :] for index, key in enumerate(policy.config.image_features)}
    return {**batch, "observation.state": torch.from_numpy(state)}
