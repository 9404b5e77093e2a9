"""Whole ACT policies against lerobot's, on folders that each release itself saves.

Needs an interpreter with each release and torchvision: ``--lerobot-033-python``, whose folders have the statistics
among the weights, ``--lerobot-python`` (0.4.4), ``--lerobot-051-python`` and ``--groot-python`` (0.6.1); without an
option the tests of its release are skipped with a message. lerobot runs through ``references/make_act_reference.py``.

In float32 on the CPU, on both engines, batches of three and single calls, from the images of two cameras of different
sizes, neither of them square, to the robot's actions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.conftest import Make
from vla_accel import OptimizedPolicy

pytestmark = pytest.mark.parity

RELEASES = {"0.3": "lerobot-033", "0.4": "lerobot", "0.5": "lerobot-051", "0.6": "groot"}
"""The option that names the interpreter of each release."""
VARIANTS = ("plain", "swapped", "min_max", "environment", "deep", "published")
TOLERANCE = 1e-4


def answers(folder: Path) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "answers.npz"))


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("release", RELEASES)
def test_the_actions_are_lerobots(release: str, variant: str, engine: str, made: Make, record_property: Any) -> None:
    folder = made(RELEASES[release], "make_act_reference")
    found = (folder / "release.txt").read_text()
    if not found.startswith(release):
        pytest.skip(f"NOT COMPARED WITH LEROBOT {release}: --{RELEASES[release]}-python has lerobot {found}")
    theirs = answers(folder / variant)
    expected = theirs.pop("actions")
    settings = {"precision": "fp32", "vision": engine, "denoise": engine}
    policy = OptimizedPolicy.from_pretrained(folder / variant / "checkpoint", settings, device="cpu")
    observations = [{key: values[row] for key, values in theirs.items()} for row in range(len(expected))]
    ours = np.stack([result["actions"] for result in policy.infer_batch(observations)])
    alone = policy.infer(observations[1])["actions"]
    difference = max(np.abs(ours - expected).max(), np.abs(alone - expected[1]).max())
    record_property("difference", float(difference))
    assert np.ptp(expected, axis=1).min() > 10 * TOLERANCE, "a chunk that does not move shows nothing"
    assert difference <= TOLERANCE


@pytest.mark.parametrize("release", RELEASES)
def test_lerobots_actions_show_the_order_of_the_cameras(release: str, made: Make) -> None:
    """ACT itself cannot tell its cameras apart: only their statistics can."""
    folder = made(RELEASES[release], "make_act_reference")
    plain, swapped, scaled = (answers(folder / name)["actions"] for name in ("plain", "swapped", "min_max"))
    assert np.abs(swapped - plain).max() > 100 * TOLERANCE
    assert np.abs(scaled - plain).max() > 100 * TOLERANCE
