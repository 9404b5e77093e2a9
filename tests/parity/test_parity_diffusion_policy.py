"""Whole Diffusion Policies against lerobot's, on folders that each release itself saves.

Needs an interpreter with each release, torchvision and diffusers: ``--lerobot-033-python``, whose folders have the
statistics among the weights, ``--lerobot-python`` (0.4.4), ``--lerobot-051-python`` and ``--groot-python`` (0.6.1);
without an option the tests of its release are skipped with a message. lerobot runs through
``references/make_diffusion_policy_folders.py``, which describes the variants.

In float32 on the CPU, on both engines, batches of three and single calls, with lerobot's own noise.
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
SINCE_04 = ("separate", "episode", "compiled")
"""Variants that lerobot 0.3 does not have."""
CASES = [
    (release, variant)
    for release in RELEASES
    for variant in ("ddpm", "ddim", "sample", "ddim_sample", *SINCE_04)
    if release != "0.3" or variant not in SINCE_04
]
PUBLISHED = pytest.param("0.6", "published", marks=pytest.mark.slow)
TOLERANCE = 1e-4


def folder_of(made: Make, release: str, variant: str = "") -> Path:
    words = ("--published",) if variant == "published" else ()
    folder = made(RELEASES[release], "make_diffusion_policy_folders", *words)
    found = (folder / "release.txt").read_text()
    if not found.startswith(release):
        pytest.skip(f"NOT COMPARED WITH LEROBOT {release}: --{RELEASES[release]}-python has lerobot {found}")
    return folder


def loaded(folder: Path, engine: str) -> tuple[OptimizedPolicy, dict[str, np.ndarray]]:
    settings = {"precision": "fp32", "strict": True, "vision": engine, "denoise": engine}
    return OptimizedPolicy.from_pretrained(folder / "checkpoint", settings, device="cpu"), dict(
        np.load(folder / "answers.npz")
    )


def observation(policy: OptimizedPolicy, images: np.ndarray, state: np.ndarray) -> dict[str, np.ndarray]:
    """From images (..., cameras, H, W, 3), cameras in lerobot's order."""
    cameras = np.moveaxis(images, -4, 0)
    return {**dict(zip(policy.processor.preset.images, cameras, strict=True)), "observation.state": state}


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize(("release", "variant"), [*CASES, PUBLISHED])
def test_the_actions_are_lerobots(release: str, variant: str, engine: str, made: Make, record_property: Any) -> None:
    policy, theirs = loaded(folder_of(made, release, variant) / variant, engine)
    given = [observation(policy, *one) for one in zip(theirs["images"], theirs["state"], strict=True)]
    expected = theirs["actions"]
    ours = np.stack([result["actions"] for result in policy.infer_batch(given, noise=theirs["noise"])])
    alone = policy.infer(given[1], noise=theirs["noise"][1])["actions"]
    rows = expected.shape[1]
    difference = max(np.abs(ours[:, :rows] - expected).max(), np.abs(alone[:rows] - expected[1]).max())
    record_property("difference", float(difference))
    assert np.abs(expected[0] - expected[1]).max() > 1000 * TOLERANCE, "the observation must matter"
    assert difference <= TOLERANCE


@pytest.mark.parametrize("variant", ["ddim", "separate"])
def test_the_order_of_the_cameras_matters(variant: str, made: Make) -> None:
    policy, theirs = loaded(folder_of(made, "0.6") / variant, "eager")
    swapped = observation(policy, theirs["images"][0][:, ::-1], theirs["state"][0])
    actions = policy.infer(swapped, noise=theirs["noise"][0])["actions"][: theirs["actions"].shape[1]]
    assert np.abs(actions - theirs["actions"][0]).max() > 10 * TOLERANCE


@pytest.mark.parametrize("release", ["0.4", "0.5", "0.6"])
def test_an_episode_is_lerobots(release: str, made: Make) -> None:
    """lerobot sees the observation of each tick, repeats the first one, and calls its network every second tick."""
    policy, theirs = loaded(folder_of(made, release) / "episode", "eager")
    for _ in range(2):  # the second episode must not see the first
        policy.reset()
        left: list[np.ndarray] = []
        for images, state, noise, expected in zip(
            theirs["frames"], theirs["states"], theirs["noises"], theirs["played"], strict=True
        ):
            seen = observation(policy, images, state)
            if left:
                policy.observe(seen)
            else:
                left = list(policy.infer(seen, noise=noise)["actions"][:2])
            np.testing.assert_allclose(left.pop(0), expected, atol=TOLERANCE)
