# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["vla_accel[checkpoints]"]
#
# [tool.uv.sources]
# vla_accel = { path = "../..", editable = true }
# ///
"""Call a policy from a PyTorch program, with tensors on both sides.

uv run docs/examples/torch_loop.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from vla_accel import OptimizedPolicy


def chunks(policy: OptimizedPolicy, frames: Iterable[tuple[Tensor, Tensor, Tensor]], prompt: str) -> Iterable[Tensor]:
    """Yield actions (horizon, action_dim) for each (image, wrist image, state): images uint8 (3, height, width)."""
    for image, wrist, state in frames:
        observation = {
            "observation/image": image.permute(1, 2, 0).cpu().numpy(),
            "observation/wrist_image": wrist.permute(1, 2, 0).cpu().numpy(),
            "observation/state": state.cpu().numpy(),
            "prompt": prompt,
        }
        yield torch.from_numpy(policy.infer(observation)["actions"])


def random_frames(count: int) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Yield images of noise instead of a camera's."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        image, wrist = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=generator)
        yield image, wrist, torch.zeros(8)


if __name__ == "__main__":
    policy = OptimizedPolicy.from_pretrained((sys.argv[1:] or ["demo"])[0], num_steps=3)
    for chunk in chunks(policy, random_frames(10), "pick up the black bowl"):
        print(tuple(chunk.shape), chunk[0].tolist())
    print({name: part["p50_ms"] for name, part in policy.latency_report()["components"].items()})
