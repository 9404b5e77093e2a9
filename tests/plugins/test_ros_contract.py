"""Contracts of the ROS node: rosetta's two layouts, and what is refused. Needs no ROS."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from vla_accel_ros.commands import Commands
from vla_accel_ros.contract import COMMANDED, OBSERVED, Contract, Qos, load_contract
from vla_accel_ros.operators import Resize

from tests.support.pages import ROOT, blocks
from vla_accel.errors import ConfigError

PRESENT = """
robot_type: arm
robot_interface: ros2
fps: 30
x-anchors: {anything: [1]}
observations:
  observation.images.top:
    channel: {topic: /top/compressed, type: sensor_msgs/msg/CompressedImage,
              qos: {reliability: reliable, history: keep_last, depth: 10}}
    align: {strategy: asof, timeline: header, tolerance_ms: 50}
    apply: [resize: [2, 3]]
  observation.state:
    channel: {topic: /joints, type: sensor_msgs/msg/JointState}
    align: {strategy: hold, timeline: receive}
    select: [position.a, position.b]
    apply: [rad2deg]
actions:
  action:
    channel: {topic: /commands, type: std_msgs/msg/Float64MultiArray, safety: hold}
    align: {strategy: hold, timeline: receive}
    select: [position.a, position.b]
    apply: [rad2deg, clamp: [-90, 90]]
tasks:
  task:
    channel: {topic: /task, type: std_msgs/msg/String}
rewards: {next.reward: {channel: {topic: /r, type: std_msgs/msg/Float64}}}
"""
OLDER = """
robot_type: arm
fps: 30
observations:
  - key: observation.images.top
    topic: /top/compressed
    type: sensor_msgs/msg/CompressedImage
    image: {resize: [2, 3]}
    align: {strategy: asof, tol_ms: 50, stamp: header}
    qos: {reliability: reliable, history: keep_last, depth: 10}
  - key: observation.state
    topic: /joints
    type: sensor_msgs/msg/JointState
    selector: {names: [position.a, position.b]}
    align: {strategy: hold}
    unit_conversion: rad2deg
actions:
  - key: action
    publish: {topic: /commands, type: std_msgs/msg/Float64MultiArray}
    selector: {names: [position.a, position.b]}
    unit_conversion: rad2deg
    from_tensor: {clamp: [-90, 90]}
    safety_behavior: hold
tasks:
  - {key: task, topic: /task, type: std_msgs/msg/String}
recording: {storage: mcap}
"""


def read(tmp_path: Path, text: str) -> Contract:
    path = tmp_path / "contract.yaml"
    path.write_text(text)
    return load_contract(path)


def test_both_layouts_of_rosetta_mean_the_same(tmp_path: Path) -> None:
    for one in (read(tmp_path, PRESENT), read(tmp_path, OLDER)):
        assert one.fps == 30
        (top,), (state,) = one.observations.values()
        (action,) = one.actions
        assert list(one.observations) == ["observation.images.top", "observation.state"]
        assert top.channel.qos == Qos("reliable", depth=10) and top.align.tolerance_ms == 50 and top.is_image
        assert top.operators == (Resize(2, 3),) and top.align.timeline == "header"
        assert state.names == (("position", "a"), ("position", "b")) and state.align.timeline == "receive"
        assert action.channel.safety == "hold" and one.action_dim == 2
        assert one.prompt is not None and one.prompt.topic == "/task"
        (command,) = Commands(one).split(np.array([180.0, -45.0]))
        np.testing.assert_allclose(command.values, np.deg2rad([90.0, -45.0]))


def test_the_shipped_contract_and_the_pages_are_valid(tmp_path: Path) -> None:
    (shown,) = blocks(ROOT / "docs/ros.md", "yaml")
    shipped = load_contract(ROOT / "plugins/vla_accel_ros/config/so101.yaml")
    for contract, numbers in ((shipped, 6), (read(tmp_path, shown), 3)):
        assert contract.action_dim == numbers and contract.motion_dims == ()


def test_the_page_has_every_parameter_and_message_type() -> None:
    page = (ROOT / "docs/ros.md").read_text()
    node = (ROOT / "plugins/vla_accel_ros/vla_accel_ros/node.py").read_text()
    parameters = re.findall(r'^    "(\w+)": \(', node, re.MULTILINE)
    assert len(parameters) > 10 and all(f"`{name}`" in page for name in parameters)
    names = [kind.rpartition("/")[2] for kind in (*OBSERVED, *COMMANDED)]
    assert all(f"{name}`" in page for name in names)


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ("fps: 30", "fps: 0", ("fps", "control rate")),
        ("fps: 30", "fsp: 30", ("fsp", "did you mean fps")),
        ("ros2", "ros1", ("robot_interface", "ros2", "ros1")),
        ("CompressedImage", "PointCloud2", ("observation.images.top.channel.type", "CompressedImage", "PointCloud2")),
        ("Float64MultiArray, safety", "Joy, safety", ("actions.action.channel.type", "JointTrajectory", "Joy")),
        ("safety: hold", "safety: sit", ("channel.safety", "zeros", "sit")),
        ("safety: hold", "decoder: 'x:y'", ("unknown key", "decoder", "safety")),
        ("depth: 10", "depth: 0", ("qos.depth", "at least 1", "0")),
        (", tolerance_ms: 50", "", ("align", "tolerance_ms", "asof")),
        ("resize: [2, 3]", "rad2deg", ("apply[0]", "resize", "rad2deg")),
        ("resize: [2, 3]", "resize: [2]", ("apply[0]", "[height, width]", "[2]")),
        ("clamp: [-90, 90]", "clamp: {min: 9, max: 1}", ("apply[1]", "LOW <= HIGH", "9")),
        ("clamp: [-90, 90]", "resize: [2, 2]", ("apply[1]", "rad2deg or clamp", "resize")),
        ("select: [position.a, position.b]\n    apply: [rad2deg]\nactions", "apply: [rad2deg]\nactions",
         ("observation.state.select", "position.JOINT", "none")),
        ("[position.a, position.b]", "[position.a, position.a]", ("select", "once")),
        ("timeline: receive}", "timeline: sent}", ("align.timeline", "header", "sent")),
        ("type: std_msgs/msg/String", "type: std_msgs/msg/Bool", ("tasks", "String", "Bool")),
        ("observations:", "observation:", ("observation", "did you mean observations")),
    ],
)  # fmt: skip
def test_a_wrong_contract_is_one_error(tmp_path: Path, before: str, after: str, parts: tuple[str, ...]) -> None:
    assert before in PRESENT
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, PRESENT.replace(before, after, 1))
    assert all(part in str(raised.value) for part in ("contract.yaml", *parts)), raised.value


@pytest.mark.parametrize(
    ("kind", "select", "expected"),
    [
        ("trajectory_msgs/msg/JointTrajectory", "[position.a, b]", ()),
        ("trajectory_msgs/msg/JointTrajectory", "[velocity.a, velocity.b]", (0, 1)),
        ("sensor_msgs/msg/JointState", "[position.a, velocity.a]", (1,)),
        ("sensor_msgs/msg/JointState", "[effort.a, effort.b]", None),
        ("std_msgs/msg/Float64MultiArray", "[a, b]", None),
    ],
)
def test_velocities_are_motion(tmp_path: Path, kind: str, select: str, expected: tuple[int, ...] | None) -> None:
    head, actions = PRESENT.split("actions:")
    text = head + "actions:" + actions.replace("std_msgs/msg/Float64MultiArray", kind)
    text = text.replace(
        "select: [position.a, position.b]\n    apply: [rad2deg, clamp", f"select: {select}\n    apply: [clamp"
    )
    assert read(tmp_path, text).motion_dims == expected


def test_a_command_has_every_field_for_every_joint(tmp_path: Path) -> None:
    head, actions = PRESENT.split("actions:")
    text = actions.replace("std_msgs/msg/Float64MultiArray", "trajectory_msgs/msg/JointTrajectory")
    text = text.replace("[position.a, position.b]", "[position.a, velocity.b]")
    with pytest.raises(ConfigError, match=r"actions.action.select: expected positions of every joint, got none of b"):
        read(tmp_path, f"{head}actions:{text}")


def test_an_action_is_split_among_topics_and_each_stops_in_its_own_way(tmp_path: Path) -> None:
    head, _ = PRESENT.split("actions:")
    source = "{{channel: {{topic: /{0}, type: {1}, safety: {2}}}, align: {3}, select: {4}, apply: {5}}}"
    align, joints = "{strategy: hold, timeline: receive}", "[position.b, position.a, velocity.a, velocity.b]"
    sources = (
        ("arm", "trajectory_msgs/msg/JointTrajectory", "hold", align, joints, "[rad2deg]"),
        ("base", "std_msgs/msg/Float64MultiArray", "zeros", align, "[x]", "[clamp: {min: 0.5, max: 2}]"),
        ("grip", "std_msgs/msg/Float64MultiArray", "none", align, "[g]", "[]"),
    )
    lines = "\n".join(f"    - {source.format(*one)}" for one in sources)
    commands = Commands(read(tmp_path, f"{head}actions:\n  action:\n{lines}\n"))
    assert commands.stop() == []
    arm, base, grip = commands.next(np.array([180.0, 90.0, 45.0, 0.0, 3.0, 1.0]))
    names, fields = arm.by_field()
    assert names == ["b", "a"] and set(fields) == {"positions", "velocities"}
    np.testing.assert_allclose(fields["positions"], np.deg2rad([180, 90]))
    np.testing.assert_allclose(fields["velocities"], np.deg2rad([0, 45]))
    assert base.values.tolist() == [2.0] and grip.values.tolist() == [1.0]
    stopped = {command.source.channel.topic: command.values.tolist() for command in commands.stop()}
    assert stopped == {"/arm": arm.values.tolist(), "/base": [0.5]}
    with pytest.raises(ConfigError, match="expected 6 numbers, as in the contract, got 7"):
        commands.split(np.zeros(7))
