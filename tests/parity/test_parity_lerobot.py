"""The model and the whole path around it against lerobot's own π0 and π0.5, on folders that lerobot itself saves.

Needs an interpreter with lerobot installed, given as ``--lerobot-python=PATH``; without it every test here is skipped
and says so. lerobot runs in its own process (its packages pin other versions than ours) through
``references/make_lerobot_reference.py``, which knows nothing of this package.

Covers float32 on the CPU: the model alone (batch 1 and 3, masked views, padded prompts), and whole observations from
uint8 images, state and task to a robot's actions, through lerobot's saved processors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.agreement import assert_same
from tests.support.reference_script import make_reference, python_of
from tests.support.whole_calls import pi0_actions
from vla_accel.families.loading import load
from vla_accel.families.pi0.network import Pi0
from vla_accel.transforms.processing import Processor

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[1] / "references" / "make_lerobot_reference.py"


@dataclass(frozen=True)
class Reference:
    """lerobot's folder loaded by us, and what lerobot was given and answered."""

    model: Pi0
    processor: Processor
    tensors: dict[str, Tensor]
    robot: dict[str, np.ndarray]
    tasks: list[str]


@pytest.fixture(scope="module")
def reference_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``pi0`` and ``pi05`` references, made by lerobot just now."""
    python = python_of(request, "lerobot", "LEROBOT")
    return make_reference(python, SCRIPT, tmp_path_factory.mktemp("lerobot"))


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def reference(request: pytest.FixtureRequest, reference_folder: Path) -> Reference:
    folder = reference_folder / request.param
    checkpoint = load(folder / "checkpoint")
    model, processor = checkpoint.model, checkpoint.processor
    assert isinstance(model, Pi0) and model.config.kind == request.param
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    robot = dict(np.load(folder / "robot.npz"))
    tasks = json.loads((folder / "tasks.json").read_text())
    return Reference(model, processor, load_file(folder / "model.safetensors"), robot, tasks)


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("case", ["batch1", "batch3"])
def test_model(reference: Reference, case: str, steps: int, record_property: Any) -> None:
    given = {k.split(".", 1)[1]: v for k, v in reference.tensors.items() if k.startswith(f"{case}.")}
    ours = pi0_actions(
        reference.model,
        *(given[n] for n in ("images", "image_mask", "tokens", "token_mask", "state", "noise")),
        num_steps=steps,
    )
    theirs = given[f"steps{steps}"].numpy()
    assert_same(ours.numpy(), theirs, f"{reference.model.config.kind} {case}, {steps} steps", record_property)


def test_whole_observations(reference: Reference, record_property: Any) -> None:
    """From camera images (twice the size) to the robot's numbers, one observation after the other."""
    robot, model = reference.robot, reference.model
    answers = []
    for i, task in enumerate(reference.tasks):
        inputs = reference.processor.prepare(
            {
                "observation/image": robot["images"][i, 0],
                "observation/wrist_image": robot["images"][i, 1],
                "observation/state": robot["state"][i],
                "prompt": task,
            }
        )
        views, length = len(inputs.images), len(inputs.tokens)
        actions = pi0_actions(
            model,
            images=torch.from_numpy(np.stack(inputs.images))[None].permute(0, 1, 4, 2, 3).float() / 255 * 2 - 1,
            image_mask=torch.ones(1, views, dtype=torch.bool),
            tokens=torch.from_numpy(inputs.tokens.copy())[None],
            token_mask=torch.ones(1, length, dtype=torch.bool),
            state=torch.from_numpy(inputs.state)[None],
            noise=torch.from_numpy(robot["noise"][i : i + 1]),
            num_steps=10,
        )
        answers.append(reference.processor.unnormalize_actions(actions[0].numpy(), inputs))
    ours = np.stack(answers)
    flat = f"{model.config.kind} whole observation, flat images"
    assert_same(ours[:1], robot["actions"][:1], flat, record_property)
    # Where images are resized, lerobot keeps fractions of a grey level and we whole ones: 1/510 of a pixel's range.
    difference = float(np.abs(ours[1:] - robot["actions"][1:]).max())
    print(f"{model.config.kind} whole observation, resized images: largest difference {difference:.1e}")
    assert difference <= 1e-3
