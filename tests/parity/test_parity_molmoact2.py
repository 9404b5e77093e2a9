"""MolmoAct2's policy against lerobot 0.6.1 and the authors' own call, on folders that these save just now
(``--groot-python``)."""

from __future__ import annotations

import pytest

from tests.parity.answers import Answers
from tests.parity.conftest import Make

pytestmark = pytest.mark.parity

BOUND = 1e-4
"""Largest difference, as a fraction of the range."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "resized", "robot", "tagged"])
def test_the_actions_are_lerobots(made: Make, variant: str, engine: str) -> None:
    answers = Answers(made("groot", "make_molmoact2_reference") / variant, engine)
    policy = answers.policy()
    found = {"alone": answers.batch(policy)}
    if "missing" in answers.theirs:
        found["missing"] = answers.first(policy, "wrist")
    if "published" in answers.theirs:
        found["published"] = answers.batch(answers.policy("published", checkpoint={"embodiment": "libero"}))
    answers.compare(found, BOUND)
