"""Every family against lerobot's own code, on folders that lerobot itself saves, or in Isaac-GR00T's layout.

lerobot runs in its own process through the scripts of tests/references, which know nothing of this package: π0, π0.5
and SmolVLA with ``--lerobot-python=PATH``, π0-FAST and GR00T N1.7 with ``--groot-python=PATH`` (lerobot 0.6.1), trained
real-time chunking with ``--lerobot-main-python=PATH`` (its pull request 4056, which no release has so far).

Covers, on the CPU, the models alone in float32 and, where lerobot has it, in bfloat16 (batch 1 and 3, masked or missing
cameras, padded prompts, step counts, a previous chunk), and whole observations from uint8 images, state and task to a
robot's actions through lerobot's saved processors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.parity.compare_with_lerobot import agrees, compare, write_pi0_fast
from tests.parity.conftest import Make
from tests.support.agreement import ACTIONS_ATOL, assert_same
from tests.support.groot_folders import REFERENCE
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import RtcConfig, load_config

pytestmark = pytest.mark.parity

FOLDERS = {
    "pi0": ("lerobot", "make_lerobot_reference"), "pi05": ("lerobot", "make_lerobot_reference"),
    "base": ("lerobot", "make_smolvla_reference"), "libero": ("lerobot", "make_smolvla_reference"),
    "apart": ("groot", "make_pi0_fast_reference"), "tied": ("groot", "make_pi0_fast_reference"),
    "groot": ("groot", "make_groot_reference"),
}  # fmt: skip
"""Project and script that make a folder, by its name."""
SETTINGS = {"precision": "fp32", "denoise": "eager"}


def policy_of(folder: Path, name: str) -> OptimizedPolicy:
    relaxed = {"checkpoint": {"relaxed_actions": True}} if "pi0_fast" in FOLDERS[name][1] else {}
    return OptimizedPolicy.from_pretrained(folder / "checkpoint", load_config({**SETTINGS, **relaxed}), device="cpu")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_models_agree(made: Make, name: str, record_property: Any) -> None:
    """In float32, and in bfloat16 as near to it as lerobot's own."""
    folder = made(*FOLDERS[name]) / (name if name != "groot" else "")
    _, report = compare(folder)
    for row in report["cases"]:
        record_property("case", row)
        assert agrees(row), row
    low = [row for row in report["cases"] if "bfloat16_rms_to_float32" in row]
    assert bool(low) == (name in ("base", "libero", "groot"))
    assert {row["batch"] for row in report["cases"]} == {1, 3}


@pytest.mark.parametrize("name", ["apart", "tied"])
def test_pi0_fast_writes_lerobots_tokens(made: Make, name: str) -> None:
    folder = made(*FOLDERS[name]) / name
    policy, tensors = policy_of(folder, name), load_file(folder / "model.safetensors")
    assert policy.model.config.tied == (name == "tied")
    steps = policy.num_steps
    for case in ("batch1", "batch3", "missing"):
        theirs = tensors[f"{case}.written{steps}"]
        assert torch.equal(write_pi0_fast(policy.model, tensors, case, steps), theirs)
        assert len(theirs.unique()) > 5, "tokens that are all the same would show nothing"
    assert not tensors[f"batch1.written{steps}"][:, steps // 2 + 1 :].any(), "lerobot stops"
    actions = torch.cat([tensors[f"{case}.steps{steps}"] for case in ("batch1", "batch3", "missing")])
    assert (actions.abs().amax((1, 2)) > 0.1).sum() >= 2, "agreement in zeros alone would show nothing"


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "groot"])
def test_whole_observations(made: Make, name: str, record_property: Any) -> None:
    """From camera images to the robot's numbers, one observation after the other; the last camera may be missing."""
    folder = made(*FOLDERS[name]) / name
    robot, policy = np.load(folder / "robot.npz"), policy_of(folder, name)
    preset = policy.processor.preset
    for i, task in enumerate(json.loads((folder / "tasks.json").read_text())):
        keys = preset.images[:-1] if i == 0 and name == "base" else preset.images
        observation = dict(zip(keys, robot["images"][i], strict=False))
        observation |= {preset.state[0]: robot["state"][i], preset.prompt: task}
        ours = policy.infer(observation, noise=robot["noise"][i] if "noise" in robot else None)["actions"]
        # Where π0 resizes, lerobot keeps fractions of a grey level and we whole ones: 1/510 of a pixel's range.
        atol = 1e-3 if name in ("pi0", "pi05") and i > 0 else ACTIONS_ATOL
        assert_same(ours, robot["actions"][i], f"{name}, observation {i}", record_property, atol)


@pytest.mark.parametrize("form", ["isaac", "lerobot"])
def test_whole_observations_of_groot(made: Make, form: str, record_property: Any) -> None:
    """The last two images are not square."""
    pytest.importorskip("cv2", reason="the reference crops by OpenCV")
    folder = made(*FOLDERS["groot"])
    robot = np.load(folder / "robot.npz")
    policy = OptimizedPolicy.from_pretrained(folder / form, device="cpu")
    for i, task in enumerate((*json.loads((folder / "tasks.json").read_text()), "")):
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


def test_the_stored_reference_of_groot_is_lerobots(made: Make) -> None:
    """tests/nn/groot_reference.json, which tests without lerobot compare with."""
    kept = json.loads((made(*FOLDERS["groot"]) / "kept.json").read_text())
    assert kept["shapes"] == REFERENCE["shapes"]
    for name, values in kept["answers"].items():
        np.testing.assert_allclose(values, REFERENCE["answers"][name], atol=1e-5)


@pytest.mark.slow
def test_published_size_of_smolvla(made: Make) -> None:
    """450 M parameters, random; a minute and 4 GB on either side, and the report of it."""
    folder = made("lerobot", "make_smolvla_reference", "--variants", "full")
    output = folder / "report.json"
    command = [sys.executable, "-m", "tests.parity.compare_with_lerobot", str(folder / "full"), "--output", str(output)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == 0
    (model,) = json.loads(output.read_text())["models"].values()
    assert model["size"] == "published"
    assert [(row["batch"], row["views"]) for row in model["cases"]] == [(1, 2), (3, 2), (1, 1)]


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_trained_chunking(made: Make, engine: Any, record_property: Any) -> None:
    """The second chunk continues what the robot executes of the first one meanwhile."""
    folder = made("lerobot-main", "make_lerobot_reference", "--variants", "trained") / "trained"
    robot, first = np.load(folder / "robot.npz"), np.load(folder / "robot.npz")["first"]
    config = PolicyConfig(
        precision="fp32", device="cpu", denoise=EngineSpec(engine), rtc=RtcConfig(trained=True, max_delay=4)
    )  # fmt: skip
    policies = {
        n: OptimizedPolicy.from_pretrained(folder / "checkpoint", replace(config, num_steps=n)) for n in (1, 3, 10)
    }

    def infer(steps: int, call: int, **chunk: Any) -> np.ndarray:
        policy = policies[steps]
        assert policy.ledger.entries["denoise"].used == engine
        preset = policy.processor.preset
        observation: dict[str, Any] = dict(zip(preset.images, robot["images"], strict=True))
        observation |= {preset.state[0]: robot["state"], preset.prompt: "pick up the black bowl"}
        return policy.infer(observation, noise=robot["noise"][call], **chunk)["actions"]

    np.testing.assert_allclose(infer(10, 0), first, rtol=0, atol=ACTIONS_ATOL)
    for case in json.loads((folder / "cases.json").read_text()):
        steps, delay, theirs, left = case["steps"], case["delay"], np.array(case["actions"]), first[case["played"] :]
        ours = infer(steps, 1, prev_chunk=left, inference_delay=delay)
        assert_same(ours, theirs, f"{steps} steps, delay {delay}", record_property)
        np.testing.assert_allclose(theirs[:delay], left[:delay], rtol=0, atol=1e-5)
        moved = float(np.abs(theirs - infer(steps, 1))[delay:].max())
        assert (moved > 100 * ACTIONS_ATOL) == (delay > 0), "the other actions depend on the pinned ones"
