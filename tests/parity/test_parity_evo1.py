"""Evo-1's policy against lerobot 0.6.1, on folders that lerobot itself saves just now (``--groot-python``)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.parity.conftest import Make
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "bare", pytest.param("full", marks=pytest.mark.slow)])
def test_the_actions_are_lerobots(made: Make, variant: str, engine: str) -> None:
    words = ("--variants", "full") if variant == "full" else ()
    folder: Path = made("groot", "make_evo1_reference", *words) / variant
    theirs = dict(np.load(folder / "answers.npz"))
    # lerobot left `missing` with another camera allowed to be so.
    path = folder / "checkpoint" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "empty_cameras": 2}))
    settings = {
        "precision": "fp32", "rtc": {"execution_horizon": 6, "max_guidance_weight": 5.0},
        **dict.fromkeys(("vision", "kv_cache", "denoise"), engine),
    }  # fmt: skip
    policy = OptimizedPolicy.from_pretrained(folder / "checkpoint", load_config(settings), device="cpu")
    three = [
        {
            **{f"observation.images.{c}": theirs[c][i] for c in ("front", "wrist")},
            "observation.state": theirs["state"][i], "task": str(theirs["tasks"][i]),
        }
        for i in range(3)
    ]  # fmt: skip
    less, start = {k: v for k, v in three[0].items() if k != "observation.images.front"}, theirs["noise"][0]
    found = {
        "alone": policy.infer(three[0], noise=start)["actions"],
        "batch": np.stack([one["actions"] for one in policy.infer_batch(three, noise=theirs["noise"])]),
        "missing": policy.infer(less, noise=start)["actions"],
    }
    if variant != "bare":  # whose gripper has two values
        earlier = policy.processor.unnormalize_actions(theirs["previous"], None)
        found["rtc"] = policy.infer(three[0], noise=start, prev_chunk=earlier, inference_delay=2)["actions"]
    for case, actions in found.items():
        difference = np.abs(actions - theirs[case]).max() / np.ptp(theirs["batch"])
        print(f"{variant} {engine} {case}: largest difference {difference:.1e} of the range")
        assert difference <= 1e-4, case
