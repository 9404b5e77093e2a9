"""GR00T N1.5 against lerobot 0.5.1, on a folder that lerobot itself saves just now (``--lerobot-051-python``), and N1.6
against transformers' SigLIP2 and Qwen3 with lerobot 0.6.1's action head (``--groot-python``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.parity.compare_with_lerobot import ask_groot
from tests.parity.conftest import Make
from tests.support.agreement import assert_same
from tests.support.groot_folders import REFERENCES
from vla_accel import OptimizedPolicy
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.config import load_config
from vla_accel.families.groot.checkpoint import infer_config, load_groot
from vla_accel.families.groot.releases import N15, N16
from vla_accel.families.groot.settings import flat_config

pytestmark = pytest.mark.parity

MADE = {
    "groot_n15": ("lerobot-051", "make_groot_n15_reference"),
    "groot_n16": ("groot", "make_groot_n16_reference"),
}
EMBODIMENTS = {"groot_n15": 31, "groot_n16": 2}
CASES = {"batch1", "batch3", "missing camera", "padded"}


@pytest.mark.parametrize("name", MADE)
def test_the_models_agree(made: Make, name: str, record_property: Any) -> None:
    """In float32: batches, a camera less, prompts of several lengths, both numbers of steps."""
    folder = made(*MADE[name])
    weights, content = SafetensorsWeights(folder / "isaac"), json.loads((folder / "isaac/config.json").read_text())
    stated = flat_config(content, name, N16 if name == "groot_n16" else N15)
    config = infer_config(weights.shapes, stated, name)
    model = load_groot(weights, config, EMBODIMENTS[name], name).placed(torch.device("cpu"), torch.float32).whole()
    tensors = load_file(folder / "model.safetensors")
    answers = [key for key in tensors if ".steps" in key]
    assert {key.partition(".")[0] for key in answers} == CASES
    for key in answers:
        case, _, steps = key.partition(".steps")
        assert_same(ask_groot(model, tensors, case, int(steps)).numpy(), tensors[key].numpy(), key, record_property)


def test_whole_observations_of_n15(made: Make, record_property: Any) -> None:
    """Through lerobot's saved processors; images that are not square, cameras in another order than their names'."""
    folder: Path = made(*MADE["groot_n15"])
    policy = OptimizedPolicy.from_pretrained(folder / "lerobot", load_config({"precision": "fp32"}), device="cpu")
    robot = np.load(folder / "robot.npz")
    assert policy.family.name == "groot_n15"
    for i, task in enumerate((*json.loads((folder / "tasks.json").read_text()), "")):
        wrist_last = dict(zip(("front", "wrist"), robot["images"][i], strict=True))
        observation = {f"observation.images.{camera}": image for camera, image in reversed(wrist_last.items())}
        observation |= {"observation.state": robot["state"][i], "task": task}
        inputs = policy.processor.prepare(observation)
        np.testing.assert_array_equal(inputs.tokens, robot[f"text{i}"])
        np.testing.assert_allclose(inputs.state, robot[f"state{i}"][0, 0], atol=1e-6)
        pixels = np.stack(inputs.images).astype(np.float32).transpose(0, 3, 1, 2)[:, :, ::3, ::3] / 127.5 - 1
        np.testing.assert_allclose(pixels, robot[f"pixels{i}"], atol=1e-6)
        found = policy.infer(observation, noise=robot["noise"][i])["actions"]
        assert_same(found, robot["actions"][i], f"observation {i}", record_property)


@pytest.mark.parametrize("name", MADE)
def test_the_stored_references_are_the_originals(made: Make, name: str) -> None:
    """tests/nn/groot_n1*_reference.json, which tests without lerobot compare with."""
    kept = json.loads((made(*MADE[name]) / "kept.json").read_text())
    assert kept["shapes"] == REFERENCES[name]["shapes"]
    for case, values in kept["answers"].items():
        np.testing.assert_allclose(values, REFERENCES[name]["answers"][case], atol=1e-5)
