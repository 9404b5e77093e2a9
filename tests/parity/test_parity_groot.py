"""GR00T N1.7 and the whole path around it against lerobot's own code, on folders in Isaac-GR00T's layout and as lerobot
saves them.

Needs an interpreter with lerobot 0.6.1 installed, given as ``--groot-python=PATH``; without it every test here is
skipped and says so. lerobot runs in its own process through ``references/make_groot_reference.py``, which knows
nothing of this package. Covers float32 on the CPU: the model alone (batch 1 and 3, a missing camera, padded prompts, a
previous chunk), and whole observations from uint8 images to a robot's actions. And bfloat16: the model alone, as near
to float32 as lerobot's is with weights in BF16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.parity.compare_with_lerobot import BF16_RATIO, ask_groot
from tests.support.agreement import assert_as_near, assert_same
from tests.support.groot_folders import REFERENCE
from tests.support.reference_script import make_reference, python_of
from vla_accel import OptimizedPolicy
from vla_accel.families.groot.network import Groot
from vla_accel.families.loading import load

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[1] / "references" / "make_groot_reference.py"


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and answers, made by lerobot just now."""
    folder = tmp_path_factory.mktemp("groot")
    python = python_of(request, "groot", "GR00T N1.7")
    return make_reference(python, SCRIPT, folder, "--kept", str(folder / "kept.json"))


@pytest.mark.parametrize("case", ["batch1", "batch3", "missing camera", "padded", "rtc"])
def test_model(reference: Path, case: str, record_property: Any) -> None:
    model = load(reference / "isaac", dtype=torch.float32).model.whole()
    assert isinstance(model, Groot)
    tensors = load_file(reference / "model.safetensors")
    for steps in (4,) if case == "rtc" else (4, 2):
        ours = ask_groot(model, tensors, case, steps)
        assert_same(ours, tensors[f"{case}.steps{steps}"], f"{case}, {steps} steps", record_property)


@pytest.mark.parametrize("case", ["batch1", "batch3", "missing camera", "padded"])
def test_bfloat16_is_as_near_as_lerobots(reference: Path, case: str) -> None:
    """Of weights in BF16, to lerobot's float32."""
    model = load(reference / "isaac", dtype=torch.bfloat16).model.whole()
    assert isinstance(model, Groot)
    tensors = load_file(reference / "model.safetensors")
    for steps in (4, 2):
        exact, theirs = (tensors[f"{case}.{n}{steps}"] for n in ("steps", "bf16_steps"))
        assert_as_near(ask_groot(model, tensors, case, steps), theirs, exact, BF16_RATIO)


@pytest.mark.parametrize("form", ["isaac", "lerobot"])
def test_whole_observations(reference: Path, form: str, record_property: Any) -> None:
    """From camera images, the last two of them not square, to the robot's numbers."""
    pytest.importorskip("cv2", reason="the reference crops by OpenCV")
    robot = np.load(reference / "robot.npz")
    policy = OptimizedPolicy.from_pretrained(reference / form, device="cpu")
    for i, task in enumerate((*json.loads((reference / "tasks.json").read_text()), "")):
        pair = robot["images"][i] if i < len(robot["images"]) else robot["wide"]
        observation = {
            "observation/image": pair[0], "observation/wrist_image": pair[1], "observation/state": robot["state"][i],
            "prompt": task,
        }  # fmt: skip
        inputs = policy.processor.prepare(observation)
        np.testing.assert_array_equal(inputs.tokens, robot[f"text{i}"])
        np.testing.assert_allclose(inputs.state, robot[f"state{i}"][0, 0], atol=1e-6)
        found = policy.infer(observation, noise=robot["noise"][i])["actions"]
        assert_same(found, robot["actions"][i], f"{form}, observation {i}", record_property)


def test_what_is_kept_is_what_it_answers(reference: Path) -> None:
    """tests/nn/groot_reference.json, which tests without lerobot compare with."""
    kept = json.loads((reference / "kept.json").read_text())
    assert kept["shapes"] == REFERENCE["shapes"]
    for name, values in kept["answers"].items():
        np.testing.assert_allclose(values, REFERENCE["answers"][name], atol=1e-5)
