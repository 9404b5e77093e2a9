"""MolmoAct2's policy against lerobot 0.6.1 and the authors' own call, on folders that these save just now
(``--groot-python``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.conftest import Make
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config

pytestmark = pytest.mark.parity

BOUND = 1e-4
"""Largest difference, as a fraction of the range."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "robot", "tagged"])
def test_the_actions_are_lerobots(made: Make, variant: str, engine: str) -> None:
    folder: Path = made("groot", "make_molmoact2_reference") / variant
    theirs = dict(np.load(folder / "answers.npz"))
    settings: dict[str, Any] = {"precision": "fp32", **dict.fromkeys(("vision", "kv_cache", "denoise"), engine)}
    policy = OptimizedPolicy.from_pretrained(folder / "checkpoint", load_config(settings), device="cpu")
    three = [
        {
            **{f"observation.images.{c}": theirs[c][i] for c in ("front", "wrist")},
            "observation.state": theirs["state"][i], "task": str(theirs["tasks"][i]),
        }
        for i in range(3)
    ]  # fmt: skip
    found = {"alone": np.stack([one["actions"] for one in policy.infer_batch(three, noise=theirs["noise"])])}
    if "missing" in theirs:
        less = {k: v for k, v in three[0].items() if k != "observation.images.wrist"}
        found["missing"] = policy.infer(less, noise=theirs["noise"][0])["actions"]
    if "published" in theirs:
        settings["checkpoint"] = {"embodiment": "libero"}
        policy = OptimizedPolicy.from_pretrained(folder / "published", load_config(settings), device="cpu")
        found["published"] = np.stack([one["actions"] for one in policy.infer_batch(three, noise=theirs["noise"])])
    for case, actions in found.items():
        difference = np.abs(actions - theirs[case]).max() / np.ptp(theirs["alone"])
        print(f"{variant} {engine} {case}: largest difference {difference:.1e} of the range")
        assert difference <= BOUND
