"""FastWAM's policy against lerobot 0.6.1, on folders that lerobot itself saves just now (``--groot-python``, with
diffusers)."""

from __future__ import annotations

import pytest

from tests.parity.answers import Answers
from tests.parity.conftest import Make

pytestmark = pytest.mark.parity

BOUND = 1e-5
"""Largest difference, as a fraction of the range."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "bare", "three"])
def test_the_actions_are_lerobots(made: Make, variant: str, engine: str) -> None:
    answers = Answers(made("groot", "make_fastwam_reference") / variant, engine)
    policy = answers.policy(checkpoint={"wan": str(answers.folder / "wan"), "text_encoder": True})
    answers.compare({"alone": answers.first(policy), "batch": answers.batch(policy)}, BOUND)
