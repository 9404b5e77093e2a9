"""MolmoAct2's policy against lerobot 0.6.1 (``--groot-python``), its main branch (``--lerobot-main-python``) and the
authors' own call, on folders that these save just now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.answers import Answers
from tests.parity.conftest import Make

pytestmark = pytest.mark.parity

BOUND = 1e-4
"""Largest difference, as a fraction of the range."""
VARIANTS = ("plain", "resized", "robot", "tagged")


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("project", ["groot", "lerobot-main"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_actions_are_lerobots(made: Make, variant: str, project: str, engine: str) -> None:
    check(made(project, "make_molmoact2_reference") / variant, engine)


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_an_adapter_within_the_policy_is_merged(made: Make, engine: str) -> None:
    check(made("lerobot-main", "make_molmoact2_reference", "--variants", "adapted") / "adapted", engine)


def check(folder: Path, engine: str) -> None:
    answers = Answers(folder, engine)
    policy = answers.policy()
    found = {"alone": answers.batch(policy)}
    if "missing" in answers.theirs:
        found["missing"] = answers.first(policy, "wrist")
    if "published" in answers.theirs:
        found["published"] = answers.batch(answers.policy("published", checkpoint={"embodiment": "libero"}))
    answers.compare(found, BOUND)
