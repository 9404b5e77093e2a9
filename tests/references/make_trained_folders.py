"""Let lerobot's trainer save ACT and Diffusion Policy after a few updates, and write the actions of its own code.

Run it with an interpreter that has lerobot 0.6.1, torchvision, accelerate, diffusers and rich::

    python tests/references/make_trained_folders.py --out DIR

For `act` and `diffusion` it writes ``DIR/POLICY/checkpoints/<step>/pretrained_model`` (`eval.lerobot.train`) and
``DIR/POLICY/answers.npz``: two observations of LIBERO, ``noise``, and the robot's ``actions`` (`LerobotPolicy`).

Everything is float32 on the CPU, with random demonstrations.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from eval.lerobot import train
from eval.libero.lerobot_policy import LerobotPolicy

SIZE, STEPS = 64, 40
HORIZON: dict[Literal["act", "diffusion"], int] = {"act": 20, "diffusion": 16}
"""Actions of a chunk, for which there is noise."""


def record(folder: Path) -> None:
    """Write two episodes."""
    folder.mkdir(parents=True)
    for index in range(2):
        rng = np.random.default_rng(index)
        arrays = {
            "images": rng.integers(0, 256, (STEPS, 2, SIZE, SIZE, 3), dtype=np.uint8),
            "states": rng.normal(size=(STEPS, 8)),
            "actions": rng.uniform(-1, 1, (STEPS, 7)),
        }
        np.savez(folder / f"episode_{index:05d}.npz", **arrays)  # type: ignore[arg-type]


def main() -> None:
    """Train and answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    record(out / "episodes")
    for kind in HORIZON:
        train.run(
            train.Arguments(
                out / "episodes", out / kind, policy=kind, minutes=0.05, saves=1, warmup=1, batch=2, workers=0,
                device="cpu", dim=64,
            )
        )  # fmt: skip
        (folder,) = (out / kind / "checkpoints").glob("[0-9]*/pretrained_model")
        policy = LerobotPolicy(folder, torch.device("cpu"))
        rng, count = np.random.default_rng(5), (2,) * (policy.history > 1)
        seen = {
            "observation/image": rng.integers(0, 256, (2, *count, SIZE, SIZE, 3), dtype=np.uint8),
            "observation/wrist_image": rng.integers(0, 256, (2, *count, SIZE, SIZE, 3), dtype=np.uint8),
            "observation/state": rng.normal(size=(2, *count, 8)),
        }
        noise = rng.standard_normal((2, HORIZON[kind], 7)).astype(np.float32)
        rows = [{name: values[row] for name, values in seen.items()} for row in range(2)]
        actions = np.stack([answer["actions"] for answer in policy.infer_batch(rows, noise=noise)])
        np.savez(out / kind / "answers.npz", noise=noise, actions=actions, **seen)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
