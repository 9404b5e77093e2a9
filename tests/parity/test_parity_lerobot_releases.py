"""Whole policies against lerobot 0.4.4, 0.5.1 and 0.6.1, on folders that each release itself saves.

Needs an interpreter with each release: ``--lerobot-python`` (0.4.4), ``--lerobot-051-python`` and ``--groot-python``
(0.6.1); without an option the tests of its release are skipped with a message. lerobot runs in its own process through
``references/make_lerobot_release_folders.py``, which imports nothing of this package and describes the variants.

Covers π0, π0.5, π0-FAST and SmolVLA in float32 on the CPU, from the images of two cameras of different sizes, neither
of them square, to the robot's actions. Does not cover batches, missing cameras or bfloat16, which the tests of each
family do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.conftest import Make
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config

pytestmark = pytest.mark.parity

RELEASES = {"0.4.4": "lerobot", "0.5.1": "lerobot-051", "0.6.1": "groot"}
"""The option that names the interpreter of each release."""
RELATIVE = {"0.5.1": "delta", "0.6.1": "relative"}
"""The variant whose actions are relative to the state; 0.4.4 has none."""
TASKS = ("words", "underscores")
TOLERANCE = 1e-3
"""Largest difference, as a fraction of the range of lerobot's actions. lerobot resizes images to fractions of a grey
level and this package to whole ones, which moves actions by up to 4e-4."""
VISIBLE = 5 * TOLERANCE
"""Least change of lerobot's actions, as a fraction of their range, by a setting whose agreement is tested."""


def variants(release: str, family: str) -> list[str]:
    found = ["plain", "visual", "no_state_feature"]
    if family != "pi0_fast":
        found.append("steps4")
    if family != "smolvla" and release in RELATIVE:
        found.append(RELATIVE[release])
    return found


CASES = [
    pytest.param(release, family, variant, id=f"{release}-{family}-{variant}")
    for release in RELEASES
    for family in ("pi0", "pi05", "pi0_fast", "smolvla")
    for variant in variants(release, family)
]


@pytest.fixture
def folder_of(made: Make) -> Callable[[str], Path]:
    """The folder of a release."""

    def of(release: str) -> Path:
        folder = made(RELEASES[release], "make_lerobot_release_folders")
        found = (folder / "release.txt").read_text()
        if found != release:
            pytest.skip(f"NOT COMPARED WITH LEROBOT {release}: --{RELEASES[release]}-python has lerobot {found}")
        return folder

    return of


def answers(folder: Path) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "answers.npz"))


def span(actions: np.ndarray) -> float:
    return float(actions.max() - actions.min())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("release", "family", "variant"), CASES)
def test_the_actions_are_lerobots(
    folder_of: Callable[[str], Path], release: str, family: str, variant: str, task: str, record_property: Any
) -> None:
    folder = folder_of(release) / family / variant
    theirs = answers(folder)
    settings: dict[str, Any] = {"precision": "fp32", "denoise": "eager"}
    if family == "pi0_fast":
        # Random weights write chunks of any length.
        settings["checkpoint"] = {"relaxed_actions": True}
    policy = OptimizedPolicy.from_pretrained(folder / "checkpoint", load_config(settings), device="cpu")
    index = TASKS.index(task)
    observation = {f"observation.images.{camera}": theirs[camera] for camera in ("front", "wrist")}
    observation |= {"observation.state": theirs["state"], "task": str(theirs["tasks"][index])}
    ours, expected = policy.infer(observation, noise=theirs.get("noise"))["actions"], theirs["actions"][index]
    assert ours.shape == expected.shape and np.isfinite(ours).all()
    difference, least = float(np.abs(ours - expected).max()), TOLERANCE * span(expected)
    record_property("difference_of_range", difference / span(expected))
    print(
        f"lerobot {release} {family} {variant}, {task}: largest difference {difference:.1e}, "
        f"{difference / span(expected):.1e} of the range; {least:.1e} and more would fail"
    )
    assert difference <= least


@pytest.mark.parametrize(("release", "family", "variant"), CASES)
def test_lerobots_actions_show_the_variant(
    folder_of: Callable[[str], Path], release: str, family: str, variant: str
) -> None:
    """Actions that a setting hardly changes would agree without it."""
    folder = folder_of(release) / family
    plain, changed = (answers(folder / name)["actions"] for name in ("plain", variant))
    assert plain.std(1).min() > 0, "a chunk that does not move shows nothing"
    if variant != "plain":
        assert np.abs(changed - plain).max() > VISIBLE * span(changed)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("family", "cleaned"), [("pi0", False), ("pi05", True), ("pi0_fast", True), ("smolvla", False)]
)
def test_lerobots_actions_show_underscores(
    folder_of: Callable[[str], Path], release: str, family: str, cleaned: bool
) -> None:
    """lerobot replaces the underscores of a task where the state is part of the prompt, and nowhere else."""
    words, underscores = answers(folder_of(release) / family / "plain")["actions"]
    if cleaned:
        assert np.array_equal(words, underscores)
    else:
        assert np.abs(words - underscores).max() > VISIBLE * span(words)
