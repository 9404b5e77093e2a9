"""SmolVLA and the whole path around it against lerobot's own code, on folders that lerobot itself saves.

Needs an interpreter with lerobot installed, given as ``--lerobot-python=PATH``; without it every test here is skipped
and says so. lerobot runs in its own process through ``references/make_smolvla_reference.py``, which knows nothing of
this package.

Covers float32 on the CPU: the model alone (batch 1 and 3, a camera less, padded prompts, the shapes of `smolvla_base`
and of the LIBERO checkpoints, the published size), and whole observations from uint8 images, state and task to a
robot's actions, through lerobot's saved processors. And bfloat16: the model alone, as near to float32 as lerobot's is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.compare_with_lerobot import BF16_RATIO, ask_smolvla
from tests.support.agreement import assert_as_near, assert_same
from tests.support.reference_script import make_reference, python_of
from vla_accel import OptimizedPolicy
from vla_accel.families.loading import load
from vla_accel.families.smolvla.network import SmolVla

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[1] / "references" / "make_smolvla_reference.py"


@dataclass(frozen=True)
class Reference:
    """lerobot's folder, it as a policy of ours, and what lerobot was given and answered."""

    folder: Path
    policy: OptimizedPolicy
    tensors: dict[str, Tensor]
    robot: dict[str, np.ndarray]
    tasks: list[str]


@pytest.fixture(scope="module")
def small_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the small variants, made by lerobot just now."""
    python = python_of(request, "lerobot", "LEROBOT")
    return make_reference(python, SCRIPT, tmp_path_factory.mktemp("smolvla"))


@pytest.fixture(scope="module", params=["base", "libero"])
def reference(request: pytest.FixtureRequest, small_folder: Path) -> Reference:
    return read(small_folder / request.param)


def read(folder: Path) -> Reference:
    policy = OptimizedPolicy.from_pretrained(folder / "checkpoint", "eager_fp32", device="cpu")
    assert isinstance(policy.model, SmolVla)
    robot = dict(np.load(folder / "robot.npz")) if (folder / "robot.npz").is_file() else {}
    tensors, tasks = load_file(folder / "model.safetensors"), json.loads((folder / "tasks.json").read_text())
    return Reference(folder / "checkpoint", policy, tensors, robot, tasks)


def compare(reference: Reference, case: str, steps: int, record_property: Any) -> None:
    model = reference.policy.model
    assert isinstance(model, SmolVla)
    ours = ask_smolvla(model, reference.tensors, case, steps)
    assert_same(
        ours.numpy(), reference.tensors[f"{case}.steps{steps}"].numpy(), f"{case}, {steps} steps", record_property
    )


@pytest.mark.parametrize(("case", "steps"), [("batch1", 1), ("batch1", 10), ("batch3", 10), ("missing", 10)])
def test_model(reference: Reference, case: str, steps: int, record_property: Any) -> None:
    compare(reference, case, steps, record_property)


@pytest.mark.parametrize(("case", "steps"), [("batch1", 1), ("batch1", 10), ("batch3", 10), ("missing", 10)])
def test_bfloat16_is_as_near_as_lerobots(reference: Reference, case: str, steps: int) -> None:
    model = load(reference.folder, dtype=torch.bfloat16).model
    assert isinstance(model, SmolVla)
    exact, theirs = (reference.tensors[f"{case}.{n}{steps}"] for n in ("steps", "bf16_steps"))
    assert_as_near(ask_smolvla(model, reference.tensors, case, steps), theirs, exact, BF16_RATIO)


def test_whole_observations(reference: Reference, record_property: Any) -> None:
    """From camera images to the robot's numbers, one observation after the other; the last camera may be missing."""
    robot, policy = reference.robot, reference.policy
    preset = policy.processor.preset
    for i, task in enumerate(reference.tasks):
        missing = 1 if i == 0 and preset.optional_images else 0
        keys = preset.images[: len(preset.images) - missing]
        observation = {key: robot["images"][i, view] for view, key in enumerate(keys)}
        observation |= {preset.state[0]: robot["state"][i], preset.prompt: task}
        ours = policy.infer(observation, noise=robot["noise"][i])["actions"]
        assert_same(ours, robot["actions"][i], f"whole observation, {len(keys)} cameras", record_property)


@pytest.mark.slow
def test_published_size(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, record_property: Any
) -> None:
    """450 M parameters, random; a minute and 4 GB on either side, and the report of it."""
    python = python_of(request, "lerobot", "LEROBOT")
    folder = make_reference(python, SCRIPT, tmp_path_factory.mktemp("full"), "--variants", "full")
    output = folder / "report.json"
    command = [sys.executable, "-m", "tests.parity.compare_with_lerobot", str(folder / "full"), "--output", str(output)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == 0
    (model,) = json.loads(output.read_text())["models"].values()
    assert model["size"] == "published"
    assert [(row["batch"], row["views"]) for row in model["cases"]] == [(1, 2), (3, 2), (1, 1)]
