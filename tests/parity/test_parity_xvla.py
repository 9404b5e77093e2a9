"""X-VLA's policy against lerobot 0.6.1 (``--groot-python``) and 0.5.1 (``--lerobot-051-python``), on folders that
lerobot itself saves just now."""

from __future__ import annotations

import pytest

from tests.parity.answers import Answers
from tests.parity.conftest import Make
from tests.support.xvla_folders import VARIANTS

pytestmark = pytest.mark.parity

PYTHON = {"0.6.1": "groot", "0.5.1": "lerobot-051"}
BOUND = 1e-5
"""Largest difference, as a fraction of the range."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize(("release", "variant"), VARIANTS)
def test_the_actions_are_lerobots(made: Make, release: str, variant: str, engine: str) -> None:
    variants = [name for its, name in VARIANTS if its == release]
    answers = Answers(made(PYTHON[release], "make_xvla_reference", "--variants", *variants) / variant, engine)
    policy = answers.policy()
    camera = next(iter(answers.observations[0])).removeprefix("observation.images.")
    found = {"alone": answers.first(policy), "batch": answers.batch(policy), "missing": answers.first(policy, camera)}
    answers.compare(found, BOUND, f"{release} {variant}")
