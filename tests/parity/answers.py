"""Three observations and lerobot's answers to them, as scripts of tests/references write them next to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel import OptimizedPolicy
from vla_accel.config import load_config


@dataclass(frozen=True)
class Answers:
    """What a script wrote into a folder, and the engine of the policy that is compared with it."""

    folder: Path
    engine: str

    @cached_property
    def theirs(self) -> dict[str, np.ndarray]:
        """The arrays of `answers.npz`; those of uint8 are the cameras' images."""
        return dict(np.load(self.folder / "answers.npz"))

    @cached_property
    def observations(self) -> list[dict[str, Any]]:
        cameras = [name for name, value in self.theirs.items() if value.dtype == np.uint8]
        return [
            {
                **{f"observation.images.{camera}": self.theirs[camera][i] for camera in cameras},
                "observation.state": self.theirs["state"][i], "task": str(self.theirs["tasks"][i]),
            }
            for i in range(3)
        ]  # fmt: skip

    def policy(self, folder: str = "checkpoint", **settings: Any) -> OptimizedPolicy:
        """The policy of a folder, in float32 on the CPU."""
        own = {"precision": "fp32", **dict.fromkeys(("vision", "kv_cache", "denoise"), self.engine), **settings}
        return OptimizedPolicy.from_pretrained(self.folder / folder, load_config(own), device="cpu")

    def batch(self, policy: OptimizedPolicy) -> np.ndarray:
        """The actions of one call for all three observations."""
        answers = policy.infer_batch(self.observations, noise=self.theirs.get("noise"))
        return np.stack([answer["actions"] for answer in answers])

    def first(self, policy: OptimizedPolicy, without: str = "", **options: Any) -> np.ndarray:
        """The actions for the first observation, `without` a camera."""
        left = f"observation.images.{without}"
        observation = {key: value for key, value in self.observations[0].items() if key != left}
        noise = self.theirs["noise"][0] if "noise" in self.theirs else None
        return policy.infer(observation, noise=noise, **options)["actions"]

    def compare(self, found: Mapping[str, np.ndarray], bound: float, name: str = "") -> None:
        """Compare each case with lerobot's. `bound`: the largest difference, as a fraction of the actions' range."""
        extent = np.ptp(self.theirs["batch" if "batch" in self.theirs else "alone"])
        for case, actions in found.items():
            difference = np.abs(actions - self.theirs[case]).max() / extent
            print(f"{name or self.folder.name} {self.engine} {case}: largest difference {difference:.1e} of the range")
            assert difference <= bound, case
