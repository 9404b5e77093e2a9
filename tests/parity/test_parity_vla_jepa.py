"""VLA-JEPA's policy against lerobot 0.6.1, on folders that lerobot itself saves just now (``--groot-python``)."""

from __future__ import annotations

import pytest

from tests.parity.answers import Answers
from tests.parity.conftest import Make

pytestmark = pytest.mark.parity

BOUNDS = {"plain": 1e-4, "bare": 1e-4, "resized": 1e-3, "full": 1e-4}
"""Largest difference, as a fraction of the range; images that are resized are rounded to whole levels here."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "bare", "resized", pytest.param("full", marks=pytest.mark.slow)])
def test_the_actions_are_lerobots(made: Make, variant: str, engine: str) -> None:
    words = ("--variants", "full") if variant == "full" else ()
    answers = Answers(made("groot", "make_vla_jepa_reference", *words) / variant, engine)
    policy = answers.policy()
    found = {"alone": answers.first(policy), "batch": answers.batch(policy), "missing": answers.first(policy, "wrist")}
    answers.compare(found, BOUNDS[variant])
