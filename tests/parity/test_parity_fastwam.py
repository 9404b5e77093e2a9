"""FastWAM's policy against lerobot 0.6.1, on folders that lerobot itself saves just now (``--groot-python``, with
diffusers)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parity.conftest import Make
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config

pytestmark = pytest.mark.parity

BOUND = 1e-5
"""Largest difference, as a fraction of the range."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "bare", "three"])
def test_the_actions_are_lerobots(made: Make, variant: str, engine: str) -> None:
    folder: Path = made("groot", "make_fastwam_reference") / variant
    theirs = dict(np.load(folder / "answers.npz"))
    settings = {
        "precision": "fp32", "checkpoint": {"wan": str(folder / "wan"), "text_encoder": True},
        **dict.fromkeys(("vision", "kv_cache", "denoise"), engine),
    }  # fmt: skip
    policy = OptimizedPolicy.from_pretrained(folder / "checkpoint", load_config(settings), device="cpu")
    three = [
        {
            **{f"observation.images.{c}": theirs[c][i] for c in theirs.keys() & {"front", "wrist", "left"}},
            "observation.state": theirs["state"][i], "task": str(theirs["tasks"][i]),
        }
        for i in range(3)
    ]  # fmt: skip
    found = {
        "alone": policy.infer(three[0])["actions"],
        "batch": np.stack([one["actions"] for one in policy.infer_batch(three)]),
    }
    for case, actions in found.items():
        difference = np.abs(actions - theirs[case]).max() / np.ptp(theirs["batch"])
        print(f"{variant} {engine} {case}: largest difference {difference:.1e} of the range")
        assert difference <= BOUND
