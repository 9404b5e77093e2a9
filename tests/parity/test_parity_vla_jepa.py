"""VLA-JEPA's policy against lerobot 0.6.1 (``--groot-python``) and main (``--lerobot-main-python``), on folders that
lerobot itself saves just now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.answers import Answers
from tests.parity.conftest import Make

pytestmark = pytest.mark.parity

BOUNDS = {"plain": 1e-4, "bare": 1e-4, "resized": 1e-3, "full": 1e-4, "relative": 1e-4}
"""Largest difference, as a fraction of the range; images that are resized are rounded to whole levels here."""

MAIN = ("plain", "bare", "resized", "relative")
"""Variants of lerobot's main branch."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", ["plain", "bare", "resized", pytest.param("full", marks=pytest.mark.slow)])
def test_the_actions_are_lerobots(made: Make, variant: str, engine: str) -> None:
    words = ("--variants", "full") if variant == "full" else ()
    check(made("groot", "make_vla_jepa_reference", *words) / variant, engine)


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", MAIN)
def test_the_actions_are_those_of_lerobots_main_branch(made: Make, variant: str, engine: str) -> None:
    check(made("lerobot-main", "make_vla_jepa_reference", "--variants", *MAIN) / variant, engine)


def check(folder: Path, engine: str) -> None:
    answers = Answers(folder, engine)
    policy = answers.policy()
    found = {"alone": answers.first(policy), "batch": answers.batch(policy), "missing": answers.first(policy, "wrist")}
    answers.compare(found, BOUNDS[folder.name])
