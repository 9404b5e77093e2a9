"""`VLA_ACCEL_ATTACH` in a process of lerobot's: which policies are attached, and when.

Runs where lerobot and the package are installed (see CONTRIBUTING), on the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lerobot_policy_vla_accel", reason="NOT RUN: needs the environment of the plugins (see CONTRIBUTING)"
)

from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot_policy_vla_accel import acceleration

from tests.plugins.folders import write_act
from vla_accel import attach

pytestmark = pytest.mark.filterwarnings("default")
CAMERAS = {"observation.image": (96, 96)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("act")
    write_act(made, CAMERAS, 2)
    return made


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """lerobot's base class as the plugin changes it for a process."""
    monkeypatch.setattr(PreTrainedPolicy, "__init__", PreTrainedPolicy.__init__)
    monkeypatch.setenv(acceleration.VARIABLE, "1")
    acceleration.install()
    yield monkeypatch


def load(folder: Path) -> Any:
    policy = ACTPolicy.from_pretrained(folder)
    policy.config.pretrained_path = folder  # as lerobot's programs set it
    return policy


def batch() -> dict[str, torch.Tensor]:
    return {"observation.image": torch.zeros(1, 3, 96, 96) - 5 / 3, "observation.state": torch.zeros(1, 2)}


def attachment(policy: Any) -> Any:
    return getattr(policy.predict_action_chunk, "attachment", None)


@pytest.mark.parametrize("method", ["select_action", "predict_action_chunk"])
def test_a_policy_is_attached_in_its_first_call(folder: Path, variable: Any, method: str) -> None:
    policy = load(folder)
    signature = inspect.signature(policy.predict_action_chunk)
    assert attachment(policy) is None
    getattr(policy, method)(batch())
    assert attachment(policy).active and attachment(policy).difference < 1e-4
    assert inspect.signature(policy.predict_action_chunk) == signature, "lerobot binds arguments to it"


def test_a_policy_that_is_trained_first_is_not_attached(folder: Path, variable: Any) -> None:
    policy = load(folder).train()
    actions = {"action": torch.zeros(1, 6, 2), "action_is_pad": torch.zeros(1, 6, dtype=torch.bool)}
    policy({**batch(), **actions})
    policy.select_action(batch())
    assert attachment(policy) is None and not {"forward", "select_action"} & set(vars(policy))


def test_a_method_that_is_wrapped_meanwhile_still_computes(folder: Path, variable: Any) -> None:
    """As lerobot-rollout wraps it by torch.compile."""
    policy = load(folder)
    inner = policy.predict_action_chunk
    policy.predict_action_chunk = lambda *args: inner(*args)
    first, second = (policy.predict_action_chunk(batch()) for _ in range(2))
    assert torch.allclose(first, second, atol=1e-5) and attachment(policy).active


@pytest.mark.parametrize("value", ["0", "", "false"])
def test_the_variable_may_be_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(acceleration.VARIABLE, value)
    assert acceleration.requested() is None


def test_statistics_of_images_come_from_the_folder_or_the_preprocessor(folder: Path) -> None:
    policy = ACTPolicy.from_pretrained(folder)
    policy.config.pretrained_path = None
    refused = attach(policy)
    assert not refused.active and "preprocessor" in str(refused.reason)
    policy.config.pretrained_path = folder
    assert attach(policy).active
