"""π0-FAST and the whole path around it against lerobot's own code, on folders that lerobot itself saves.

Needs an interpreter with lerobot 0.6.1 installed, given as ``--groot-python=PATH``; without it every test here is
skipped and says so. lerobot runs in its own process through ``references/make_pi0_fast_reference.py``, which knows
nothing of this package.

Covers float32 on the CPU: the model's tokens (batch 1 and 3, a camera less, padded prompts, a stop token that some rows
write and some do not), what lerobot makes of tokens that are no whole chunk, and whole observations from uint8 images,
state and task to a robot's actions, through lerobot's saved processors.
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

from tests.parity.compare_with_lerobot import ask_pi0_fast, write_pi0_fast
from tests.support.agreement import assert_same
from tests.support.reference_script import make_reference, python_of
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config
from vla_accel.families.pi0_fast.network import Pi0Fast

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[1] / "references" / "make_pi0_fast_reference.py"
STEPS = 24
SETTINGS = {"precision": "fp32", "denoise": "eager", "checkpoint": {"relaxed_actions": True}}


@dataclass(frozen=True)
class Reference:
    """lerobot's folder as a policy of ours, and what lerobot was given and answered."""

    policy: OptimizedPolicy
    tensors: dict[str, Tensor]
    robot: dict[str, np.ndarray]
    tasks: list[str]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = python_of(request, "groot", "LEROBOT'S π0-FAST")
    return make_reference(python, SCRIPT, tmp_path_factory.mktemp("pi0_fast"))


@pytest.fixture(scope="module", params=["apart", "tied"])
def reference(request: pytest.FixtureRequest, folder: Path) -> Reference:
    place = folder / request.param
    policy = OptimizedPolicy.from_pretrained(place / "checkpoint", load_config(SETTINGS), device="cpu")
    assert policy.model.config.tied == (request.param == "tied") and policy.num_steps == STEPS
    tasks = json.loads((place / "tasks.json").read_text())
    return Reference(policy, load_file(place / "model.safetensors"), dict(np.load(place / "robot.npz")), tasks)


@pytest.mark.parametrize("case", ["batch1", "batch3", "missing"])
def test_model(reference: Reference, case: str, record_property: Any) -> None:
    model, tensors = reference.policy.model, reference.tensors
    assert isinstance(model, Pi0Fast)
    theirs = tensors[f"{case}.written{STEPS}"]
    assert torch.equal(write_pi0_fast(model, tensors, case, STEPS), theirs)
    assert len(theirs.unique()) > 5, "tokens that are all the same would show nothing"
    if case == "batch1":
        assert not theirs[:, STEPS // 2 + 1 :].any(), "lerobot stops"
    ours = ask_pi0_fast(reference.policy.processor, model, tensors, case, STEPS)
    assert_same(ours, tensors[f"{case}.steps{STEPS}"], case, record_property)


def test_some_tokens_make_actions(reference: Reference) -> None:
    """Otherwise all of them are lerobot's zeros, and agreement says nothing."""
    actions = torch.cat([reference.tensors[f"{case}.steps{STEPS}"] for case in ("batch1", "batch3", "missing")])
    assert (actions.abs().amax((1, 2)) > 0.1).sum() >= 2


def test_whole_observations(reference: Reference, record_property: Any) -> None:
    """From camera images to the robot's numbers, one observation after the other."""
    robot, policy = reference.robot, reference.policy
    preset = policy.processor.preset
    for i, task in enumerate(reference.tasks):
        observation = {key: robot["images"][i, view] for view, key in enumerate(preset.images)}
        observation |= {preset.state[0]: robot["state"][i], preset.prompt: task}
        assert_same(policy.infer(observation)["actions"], robot["actions"][i], task, record_property)
