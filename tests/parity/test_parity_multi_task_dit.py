"""Whole Multi-task DiTs against lerobot's, on folders that each release itself saves.

Needs an interpreter with each release, torchvision, transformers and diffusers: ``--lerobot-051-python`` and
``--groot-python`` (0.6.1); without an option the tests of its release are skipped with a message. lerobot runs through
``references/make_multi_task_dit_folders.py``, which describes the variants.

In float32 on the CPU, on both engines, batches of three and single calls, with lerobot's own noise.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.parity.conftest import Make
from vla_accel import OptimizedPolicy

pytestmark = pytest.mark.parity

RELEASES = {"0.5": "lerobot-051", "0.6": "groot"}
"""The option that names the interpreter of each release."""
VARIANTS = ("ddpm", "ddim", "flow", "plain")
TOLERANCE = 1e-4
Actions = dict[str, np.ndarray]


def loaded(made: Make, release: str, variant: str, engine: str) -> tuple[OptimizedPolicy, Actions]:
    words = ("--published",) if variant == "published" else ()
    folder = made(RELEASES[release], "make_multi_task_dit_folders", *words)
    found = (folder / "release.txt").read_text()
    if not found.startswith(release):
        pytest.skip(f"NOT COMPARED WITH LEROBOT {release}: --{RELEASES[release]}-python has lerobot {found}")
    settings = {
        "precision": "fp32", "strict": True, "vision": engine, "kv_cache": engine, "denoise": engine,
        "checkpoint": {"tokenizer": str(folder / "openai" / "clip-vit-base-patch16")},
    }  # fmt: skip
    policy = OptimizedPolicy.from_pretrained(folder / variant / "checkpoint", settings, device="cpu")
    return policy, dict(np.load(folder / variant / "answers.npz"))


def observation(policy: OptimizedPolicy, images: np.ndarray, state: np.ndarray, task: str) -> dict[str, Any]:
    """From images (..., cameras, H, W, 3), cameras in lerobot's order."""
    if images.ndim == 5 and policy.processor.history == 1:
        images, state = images[0], state[0]
    cameras = np.moveaxis(images, -4, 0)
    found = dict(zip(policy.processor.preset.images, cameras, strict=True))
    return {**found, "observation.state": state, "task": str(task)}


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize(
    ("release", "variant"),
    [*itertools.product(RELEASES, VARIANTS), pytest.param("0.6", "published", marks=pytest.mark.slow)],
)
def test_the_actions_are_lerobots(release: str, variant: str, engine: str, made: Make, record_property: Any) -> None:
    policy, theirs = loaded(made, release, variant, engine)
    given = [observation(policy, *one) for one in zip(theirs["images"], theirs["state"], theirs["tasks"], strict=True)]
    expected = theirs["actions"]
    ours = np.stack([result["actions"] for result in policy.infer_batch(given, noise=theirs["noise"])])
    alone = policy.infer(given[1], noise=theirs["noise"][1])["actions"]
    rows = expected.shape[1]
    difference = max(np.abs(ours[:, :rows] - expected).max(), np.abs(alone[:rows] - expected[1]).max())
    record_property("difference", float(difference))
    assert difference <= TOLERANCE


@pytest.mark.parametrize("variant", ["ddpm", "flow"])
def test_everything_that_lerobot_reads_matters(variant: str, made: Make) -> None:
    policy, theirs = loaded(made, "0.6", variant, "eager")
    images, state, noise = (theirs[name] for name in ("images", "state", "noise"))
    changes = {
        "cameras": (images[0][:, ::-1], state[0], theirs["tasks"][0]),
        "images": (images[1], state[0], theirs["tasks"][0]),
        "oldest": (np.concatenate((images[1][:1], images[0][1:])), state[0], theirs["tasks"][0]),
        "state": (images[0], state[1], theirs["tasks"][0]),
        "task": (images[0], state[0], theirs["tasks"][1]),
    }  # fmt: skip
    for what, changed in changes.items():
        actions = policy.infer(observation(policy, *changed), noise=noise[0])["actions"]
        moved = np.abs(actions[: theirs["actions"].shape[1]] - theirs["actions"][0]).max()
        assert moved > 100 * TOLERANCE, what


def test_an_episode_is_lerobots(made: Make) -> None:
    """lerobot sees the observation of each tick, repeats the first one, and calls its network every second tick."""
    policy, theirs = loaded(made, "0.6", "episode", "eager")
    for _ in range(2):  # the second episode must not see the first
        policy.reset()
        left: list[np.ndarray] = []
        for images, state, noise, expected in zip(
            theirs["frames"], theirs["states"], theirs["noises"], theirs["played"], strict=True
        ):
            seen = observation(policy, images, state, theirs["tasks"][0])
            if left:
                policy.observe(seen)
            else:
                left = list(policy.infer(seen, noise=noise)["actions"][:2])
            np.testing.assert_allclose(left.pop(0), expected, atol=TOLERANCE)
