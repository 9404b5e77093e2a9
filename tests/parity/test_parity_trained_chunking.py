"""Trained real-time chunking through the whole policy against lerobot's own, on a folder that lerobot itself saves.

No release of lerobot has it so far (0.6.1 has not): its pull request 4056 put it into the main branch, for π0.5 alone.
Needs an interpreter with lerobot at that commit, given as ``--lerobot-main-python=PATH``; without it every test here is
skipped and says so. lerobot runs in its own process through ``references/make_lerobot_trained_reference.py``, which
knows nothing of this package.

Covers float32 on the CPU, eager and native, from camera images and a previous chunk in the robot's units to the robot's
actions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.agreement import ACTIONS_ATOL, assert_same
from tests.support.reference_script import make_reference, python_of
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import RtcConfig

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[1] / "references" / "make_lerobot_trained_reference.py"
EAGER = PolicyConfig(
    precision="fp32", device="cpu", denoise=EngineSpec("eager"), rtc=RtcConfig(trained=True, max_delay=4)
)
CONFIGS = {"eager": EAGER, "native": replace(EAGER, denoise=EngineSpec("native"))}


@dataclass(frozen=True)
class Reference:
    """lerobot's folder, the observation it was asked about twice, and what it answered."""

    folder: Path
    robot: dict[str, np.ndarray]
    cases: list[dict[str, Any]]

    def load(self, config: PolicyConfig, steps: int) -> OptimizedPolicy:
        policy = OptimizedPolicy.from_pretrained(self.folder, replace(config, num_steps=steps))
        assert policy.ledger.entries["denoise"].used == config.denoise.engine
        return policy

    def ask(self, policy: OptimizedPolicy, call: int, **given: Any) -> np.ndarray:
        preset = policy.processor.preset
        observation: dict[str, Any] = dict(zip(preset.images, self.robot["images"], strict=True))
        observation |= {preset.state[0]: self.robot["state"], preset.prompt: "pick up the black bowl"}
        return policy.infer(observation, noise=self.robot["noise"][call], **given)["actions"]


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    python = python_of(request, "lerobot-main", "LEROBOT'S TRAINED REAL-TIME CHUNKING")
    place = make_reference(python, SCRIPT, tmp_path_factory.mktemp("trained")) / "pi05"
    cases = json.loads((place / "cases.json").read_text())
    return Reference(place / "checkpoint", dict(np.load(place / "robot.npz")), cases)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_second_chunk_is_lerobots(reference: Reference, config: PolicyConfig, record_property: Any) -> None:
    first = reference.robot["first"]
    policies = {steps: reference.load(config, steps) for steps in (1, 3, 10)}
    np.testing.assert_allclose(reference.ask(policies[10], 0), first, rtol=0, atol=ACTIONS_ATOL)
    for case in reference.cases:
        policy, delay, theirs = policies[case["steps"]], case["delay"], np.array(case["actions"])
        left = first[case["played"] :]
        ours = reference.ask(policy, 1, prev_chunk=left, inference_delay=delay)
        assert_same(ours, theirs, f"{case['steps']} steps, delay {delay}", record_property)
        np.testing.assert_allclose(theirs[:delay], left[:delay], rtol=0, atol=1e-5)
        moved = float(np.abs(theirs - reference.ask(policy, 1))[delay:].max())
        assert (moved > 100 * ACTIONS_ATOL) == (delay > 0), "the others see what is pinned"
