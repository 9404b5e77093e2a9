"""XPolicyLab's `Model`: what the policy gets, what the robot gets, and XPolicyLab's own server and debug client."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from plugins.xpolicylab_vla_accel import model
from plugins.xpolicylab_vla_accel.model import Model
from tests.plugins.folders import write_arm
from tests.plugins.programs import free_port, process, reachable, run, until
from tests.support.pages import ROOT
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.transforms.robots import ALOHA

FOLDER = ROOT / "plugins" / "xpolicylab_vla_accel"
SETTINGS = {**yaml.safe_load((FOLDER / "deploy.yml").read_text()), "ckpt_name": "some", "action_type": "joint"}
KEYS = dict(zip(model.CAMERAS, ALOHA.images, strict=True))
SIZES = {"left_arm_joint_state": 6, "left_ee_joint_state": 1, "right_arm_joint_state": 6, "right_ee_joint_state": 1}


class Policy:
    """Action i is the state plus i; batches are counted."""

    def __init__(self, width: int = 14, **metadata: Any) -> None:
        self.metadata = {"robot": ALOHA.described(), "action_horizon": 4, **metadata}
        self.width, self.seen, self.batches, self.resets = width, [], [], 0

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        self.seen.append(observation)
        return {"actions": np.resize(observation["state"], self.width) + np.arange(4)[:, None]}

    def infer_batch(self, observations: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        self.batches.append(len(observations))
        return [self.infer(one) for one in observations]

    def reset(self) -> None:
        self.resets += 1


def made(monkeypatch: pytest.MonkeyPatch, policy: Policy, **changes: Any) -> Model:
    monkeypatch.setattr(model, "open_policy", lambda settings: policy)
    return Model({**SETTINGS, **changes})


def seen(start: float = 0.0, **changes: Any) -> dict[str, Any]:
    """XPolicyLab's observation of two arms; the state counts on from `start` in the order of the arms."""
    state, at = {}, start
    for key, size in SIZES.items():
        state[key], at = np.arange(at, at + size), at + size
    cameras = {name: {"color": np.full((4, 6, 3), n, np.uint8)} for n, name in enumerate(model.CAMERAS)}
    return {"vision": cameras, "state": state, "instruction": "fold", **changes}


def test_the_policy_gets_images_state_and_prompt_under_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    adapter = made(monkeypatch, policy)
    adapter.update_obs(seen())
    chunk = adapter.get_action()
    (got,) = policy.seen
    assert {key: int(got[key][0, 0, 0]) for key in ALOHA.images} == dict(zip(ALOHA.images, range(3), strict=True))
    assert got["state"].tolist() == [*range(14)] and got["prompt"] == "fold"
    assert [{key: value.tolist() for key, value in action.items()} for action in chunk[:2]] == [
        {"left_arm_joint_state": [0 + i, 1 + i, 2 + i, 3 + i, 4 + i, 5 + i], "left_ee_joint_state": [6 + i],
         "right_arm_joint_state": [7 + i, 8 + i, 9 + i, 10 + i, 11 + i, 12 + i], "right_ee_joint_state": [13 + i]}
        for i in range(2)
    ]  # fmt: skip
    assert len(chunk) == 4 and chunk[0]["left_arm_joint_state"].dtype == np.float32


def test_a_null_leaves_a_camera_out(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    adapter = made(monkeypatch, policy, cameras={**KEYS, "cam_left_wrist": None})
    adapter.update_obs(seen())
    adapter.get_action()
    assert {*ALOHA.images} - {*policy.seen[0]} == {KEYS["cam_left_wrist"]}


def test_environments_are_answered_in_one_pass_by_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    adapter = made(monkeypatch, policy, actions_per_chunk=2)
    adapter.update_obs_batch([seen(100.0 * index, env_idx=index) for index in (3, 5, 8)])
    chunks = adapter.get_action_batch([8, 3])
    assert policy.batches == [2]
    assert [chunk[1]["left_arm_joint_state"][0] for chunk in chunks] == [801, 301]
    assert [len(chunk) for chunk in chunks] == [2, 2] and len(adapter.get_action_batch()) == 3
    with pytest.raises(ObservationError, match="env_idx"):
        adapter.get_action_batch([4])
    adapter.reset()
    assert policy.resets == 1
    with pytest.raises(ObservationError, match="env_idx"):
        adapter.get_action()


@pytest.mark.parametrize("name", ["arm_joint_state", "joint_state"])
def test_one_arm_has_keys_without_a_side(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    adapter = made(monkeypatch, Policy(width=8))
    adapter.update_obs(seen(state={name: np.arange(7.0), "ee_joint_state": [9.0]}))
    assert {key: len(value) for key, value in adapter.get_action()[0].items()} == {
        "arm_joint_state": 7,
        "ee_joint_state": 1,
    }


def test_poses_are_the_actions_of_the_type_ee(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = made(monkeypatch, Policy(width=8), action_type="ee")
    adapter.update_obs(seen(state={"ee_pose": np.arange(7.0), "ee_joint_state": [9.0], "arm_joint_state": [1.0]}))
    assert adapter.get_action()[0]["ee_pose"].tolist() == [*range(7)]


def test_compressed_images_are_read_as_rgb(monkeypatch: pytest.MonkeyPatch) -> None:
    file, red = io.BytesIO(), Image.new("RGB", (6, 4), (250, 10, 20))
    red.save(file, "PNG")
    for packed in (file.getvalue(), np.frombuffer(file.getvalue(), np.uint8)):
        assert model.picture({"color": packed}, "cam_head")[0, 0].tolist() == [250, 10, 20]
    with pytest.raises(ObservationError, match="cam_head"):
        model.picture({"color": b"rubbish"}, "cam_head")


@pytest.mark.parametrize(
    ("changes", "policy", "error"),
    [
        ({"action_type": "pose"}, Policy(), "action_type"),
        ({"actions_per_chunk": 0}, Policy(), "actions_per_chunk"),
        ({"actions_per_chunk": True}, Policy(), "actions_per_chunk"),
        ({"actions_per_chunk": 5}, Policy(), "actions_per_chunk.* 4, got 5"),
        ({"actions_per_chunk": 4}, Policy(returned_actions=3), "actions_per_chunk.* 3, got 4"),
        ({"cameras": "top"}, Policy(), "cameras"),
        ({"cameras": {**KEYS, "cam_head": "images/other"}}, Policy(), "cameras"),
        ({"cameras": {**KEYS, "cam_left_wrist": KEYS["cam_head"]}}, Policy(), "cameras"),
        ({"cameras": {**KEYS, "other": KEYS["cam_head"]}}, Policy(), "cameras"),
        ({"cameras": {"cam_head": KEYS["cam_head"], "cam_left_wrist": None}}, Policy(), "cameras"),
        ({}, Policy(robot={**ALOHA.described(), "images": ["front"]}), "such as {cam_head: front}"),
        ({"cameras": {"cam_head": "front"}}, Policy(robot={**ALOHA.described(), "images": []}), "cameras"),
        ({}, Policy(robot={**ALOHA.described(), "state": ["a", "b"]}), "state"),
        ({}, Policy(history=2), "history"),
        ({}, Policy(warm_start=0.5), "warm starts"),
        ({}, Policy(temporal_ensemble=0.01), "temporal ensembling"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], policy: Policy, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        made(monkeypatch, policy, **changes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"vision": {}}, "vision"),
        ({"vision": {name: {} for name in model.CAMERAS}}, "color"),
        ({"state": {"left_ee_joint_state": [0.0]}}, "left_arm_joint_state"),
    ],
)
def test_an_observation_without_a_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: str
) -> None:
    adapter = made(monkeypatch, Policy())
    adapter.update_obs(seen(**changes))
    with pytest.raises(ObservationError, match=error):
        adapter.get_action()


def test_actions_of_another_robot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = made(monkeypatch, Policy(width=7))
    adapter.update_obs(seen())
    with pytest.raises(ConfigError, match="ckpt_name"):
        adapter.get_action()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"ckpt_name": None}, "ckpt_name"),
        *(({"ckpt_name": "ws://127.0.0.1:1", name: 3}, f"{name}: .*server.*3") for name in model.CHECKPOINTS),
        *(({"ckpt_name": "demo", name: "some"}, f"{name}: .*checkpoint.*some") for name in model.SERVERS),
        ({"ckpt_name": "ws://127.0.0.1:1", "api_key_file": "no such file"}, "api_key_file .*readable"),
    ],
)
def test_settings_of_the_other_kind_of_policy_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        model.open_policy({**SETTINGS, **changes})


def test_a_servers_policy_answers_one_environment_and_several(tmp_path: Path) -> None:
    pytest.importorskip("tests.support.server_support")
    from tests.support.server_support import local
    from vla_accel.server import PolicyRegistry, background

    file = tmp_path / "key"
    file.write_text("secret\n")
    policies = PolicyRegistry({"other": lambda: (Policy(width=7), 0), "arms": lambda: (Policy(), 0)})
    with background(policies, local(api_key_file=file)) as server:
        adapter = Model({**SETTINGS, "ckpt_name": server.address, "policy": "arms", "api_key_file": str(file)})
        adapter.update_obs_batch([seen(env_idx=0), seen(50.0, env_idx=1)])
        firsts = [chunk[0]["left_arm_joint_state"][0] for chunk in adapter.get_action_batch()]
        assert firsts == [0, 50] and len(adapter.get_action_batch([1])) == 1
        adapter.reset()
        adapter.policy.close()


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("batch", [False, True])
def test_xpolicylabs_server_and_debug_client_run_the_model(
    request: pytest.FixtureRequest, tmp_path: Path, batch: bool
) -> None:
    """XPolicyLab's programs over its websocket, with a robot of five joints and a gripper. The debug client checks the
    keys and sizes of each action."""
    clone = request.config.getoption("--xpolicylab")
    if clone is None:
        pytest.skip("NOT RUN: needs --xpolicylab (see CONTRIBUTING)")
    for package in ("msgpack_numpy", "pydantic", "cv2"):
        pytest.importorskip(package, reason=f"NOT RUN: needs {package}")
    lab, robots = tmp_path / "XPolicyLab", tmp_path / "env_cfg"
    for part in ("client_server", "utils", "policy/demo_policy"):
        shutil.copytree(Path(clone) / part, lab / part)
    for file in Path(clone).glob("*.py"):
        shutil.copy(file, lab)
    shutil.copytree(FOLDER, lab / "policy" / "VlaAccel")
    shutil.copy(lab / "policy/demo_policy/deploy.py", lab / "policy" / "VlaAccel")
    (robots / "robot").mkdir(parents=True)
    (robots / "arm.yml").write_text("config: {robot: arm}")
    (robots / "robot" / "_robot_info.json").write_text(json.dumps({"arm": {"arm_dim": [5], "ee_dim": [1]}}))
    settings = SETTINGS | {
        "ckpt_name": str(write_arm(tmp_path / "checkpoint")), "device": "cpu", "num_steps": 1, "seed": 0,
        "cameras": {"cam_head": "observation.images.front", "cam_left_wrist": "observation.images.wrist"},
    }  # fmt: skip
    (tmp_path / "deploy.yml").write_text(yaml.safe_dump(settings))
    port = free_port()
    serve = ["python", "setup_policy_server.py", "--config_path", str(tmp_path / "deploy.yml"),
             "--overrides", f"port={port}", "policy_name=VlaAccel", "env_cfg_type=arm"]  # fmt: skip
    words = ["--bench_name", "b", "--task_name", "t", "--env_cfg_type", "arm", "--policy_name", "VlaAccel", "--port",
             str(port), "--eval_episode_num", "1", "--eval_batch", str(batch)]  # fmt: skip
    with process(serve, lab) as server:
        until(lambda: reachable(port), server)
        said = run(["python", "debug_env_client.py", *words], lab)
    assert "Episode finished" in said and "Action Step: 4" in said
