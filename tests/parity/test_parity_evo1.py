"""Evo-1's policy against lerobot 0.6.1, on folders that lerobot itself saves just now (``--groot-python``)."""

from __future__ import annotations

import json

import pytest

from tests.parity.answers import Answers
from tests.parity.conftest import Make

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "bare", pytest.param("full", marks=pytest.mark.slow)])
def test_the_actions_are_lerobots(made: Make, variant: str, engine: str) -> None:
    words = ("--variants", "full") if variant == "full" else ()
    answers = Answers(made("groot", "make_evo1_reference", *words) / variant, engine)
    # lerobot left `missing` with another camera allowed to be so.
    path = answers.folder / "checkpoint" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "empty_cameras": 2}))
    policy = answers.policy(rtc={"execution_horizon": 6, "max_guidance_weight": 5.0})
    found = {"alone": answers.first(policy), "batch": answers.batch(policy), "missing": answers.first(policy, "front")}
    if variant != "bare":  # whose gripper has two values
        earlier = policy.processor.unnormalize_actions(answers.theirs["previous"], None)
        found["rtc"] = answers.first(policy, prev_chunk=earlier, inference_delay=2)
    answers.compare(found, 1e-4)
