"""X-VLA's policy against lerobot 0.6.1 (``--groot-python``) and 0.5.1 (``--lerobot-051-python``), on folders that
lerobot itself saves just now."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parity.conftest import Make
from tests.support.xvla_folders import VARIANTS
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config

pytestmark = pytest.mark.parity

PYTHON = {"0.6.1": "groot", "0.5.1": "lerobot-051"}
BOUND = 1e-5
"""Largest difference, as a fraction of the range."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize(("release", "variant"), VARIANTS)
def test_the_actions_are_lerobots(made: Make, release: str, variant: str, engine: str) -> None:
    variants = [name for its, name in VARIANTS if its == release]
    folder: Path = made(PYTHON[release], "make_xvla_reference", "--variants", *variants) / variant
    theirs = dict(np.load(folder / "answers.npz"))
    cameras = [name for name, value in theirs.items() if value.dtype == np.uint8]
    settings = {"precision": "fp32", **dict.fromkeys(("vision", "kv_cache", "denoise"), engine)}
    policy = OptimizedPolicy.from_pretrained(folder / "checkpoint", load_config(settings), device="cpu")
    three = [
        {
            **{f"observation.images.{c}": theirs[c][i] for c in cameras}, "observation.state": theirs["state"][i],
            "task": str(theirs["tasks"][i]),
        }
        for i in range(3)
    ]  # fmt: skip
    less = {k: v for k, v in three[0].items() if k != f"observation.images.{cameras[0]}"}
    found = {
        "alone": policy.infer(three[0], noise=theirs["noise"][0])["actions"],
        "batch": np.stack([one["actions"] for one in policy.infer_batch(three, noise=theirs["noise"])]),
        "missing": policy.infer(less, noise=theirs["noise"][0])["actions"],
    }
    for case, actions in found.items():
        difference = np.abs(actions - theirs[case]).max() / np.ptp(theirs["batch"])
        print(f"{release} {variant} {engine} {case}: largest difference {difference:.1e} of the range")
        assert difference <= BOUND
