"""The ROS 2 node as a process of its own, with a robot that is another ROS node, over DDS on this machine.

Runs in the environment of `tests.plugins.ros_environment` (`make test-ros`), with rclpy and Fast DDS of ROS 2 itself.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="NOT RUN: needs ROS 2: make test-ros")

import rclpy
from action_msgs.msg import GoalStatus
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from PIL import Image as Picture
from rcl_interfaces.srv import SetParameters
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory
from vla_accel_ros_interfaces.action import RunPolicy
from vla_accel_ros_interfaces.srv import GetActionChunk

from vla_accel.server import ServerConfig, background

pytestmark = pytest.mark.filterwarnings("default")
JOINTS = ("pan", "lift", "gripper")
RADIANS = {"gripper": 0.25, "pan": 0.5, "lift": -1.0}
TRAJECTORY = """
fps: 25
observations:
  observation.images.front:
    channel: {topic: /front, type: sensor_msgs/msg/Image}
    align: {strategy: hold, timeline: header}
  observation.images.wrist:
    channel: {topic: /wrist, type: sensor_msgs/msg/CompressedImage}
    align: {strategy: hold, timeline: header}
  observation.state:
    channel: {topic: /joint_states, type: sensor_msgs/msg/JointState}
    align: {strategy: hold, timeline: header}
    select: [position.pan, position.lift, position.gripper]
    apply: [rad2deg]
actions:
  action:
    channel: {topic: /command, type: trajectory_msgs/msg/JointTrajectory}
    align: {strategy: hold, timeline: header}
    select: [position.pan, position.lift, position.gripper]
    apply: [rad2deg]
"""
ARRAY = (
    TRAJECTORY.replace(
        "{topic: /command, type: trajectory_msgs/msg/JointTrajectory}",
        "{topic: /array, type: std_msgs/msg/Float64MultiArray, safety: zeros}",
    )
    .replace("position.gripper]\n    apply: [rad2deg]\nactions", "position.gripper]\nactions")
    .removesuffix("    apply: [rad2deg]\n")
)


class Policy:
    """Returns the state as every action, so that the robot does not move; keeps the last observation."""

    metadata: Mapping[str, Any] = {
        "policy": "stay", "action_horizon": 10, "action_dim": 3,
        "robot": {
            "images": ["observation.images.front", "observation.images.wrist"], "state": ["observation.state"],
            "action_dim": 3, "motion_dims": [], "prompt": "task",
        },
    }  # fmt: skip

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        self.seen = dict(observation)
        return {"actions": np.tile(observation["observation.state"], (10, 1))}


class Robot:
    """Cameras, joints and controllers, and the tools that people use."""

    def __init__(self, log: Path) -> None:
        self.node = rclpy.create_node("robot")
        self.log, self.wrist_type = log, CompressedImage
        self.off: set[str] = set()
        self.commands: list[tuple[float, Any]] = []
        self.diagnostics: list[DiagnosticStatus] = []
        make = self.node.create_publisher
        self.front, self.joints = make(Image, "/front", 1), make(JointState, "/joint_states", 1)
        self.wrist = make(CompressedImage, "/wrist", 1)
        for kind, topic in ((JointTrajectory, "/command"), (Float64MultiArray, "/array")):
            self.node.create_subscription(kind, topic, lambda m: self.commands.append((time.monotonic(), m)), 10)
        self.node.create_subscription(DiagnosticArray, "/diagnostics", lambda m: self.diagnostics.extend(m.status), 10)
        self.action = ActionClient(self.node, RunPolicy, "/run_policy")
        self.clients: dict[str, Any] = {}
        self.node.create_timer(0.03, self.publish)
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self.thread = threading.Thread(target=self.executor.spin, daemon=True)
        self.thread.start()

    def publish(self) -> None:
        stamp = self.node.get_clock().now().to_msg()
        if "front" not in self.off:
            rows = np.zeros((4, 20), np.uint8)  # six pixels and two bytes of padding a row
            rows[:, :18] = np.tile([10, 20, 30], 6)
            image = Image(height=4, width=6, encoding="bgr8", step=20, data=rows.tobytes())
            image.header.stamp = stamp
            self.front.publish(image)
        if "wrist" not in self.off:
            file = io.BytesIO()
            Picture.new("RGB", (8, 5), (200, 100, 50)).save(file, "PNG")
            image = CompressedImage(format="rgb8; png compressed bgr8", data=file.getvalue())
            image.header.stamp = stamp
            self.wrist.publish(image)
        joints = JointState(name=list(RADIANS), position=list(RADIANS.values()))
        joints.header.stamp = stamp
        self.joints.publish(joints)

    def call(self, kind: Any, name: str, **fields: Any) -> Any:
        if name not in self.clients:
            self.clients[name] = self.node.create_client(kind, name)
        assert self.clients[name].wait_for_service(30), name
        return wait(self.clients[name].call_async(kind.Request(**fields)))

    def transition(self, *names: str) -> bool:
        ids = {name: getattr(Transition, f"TRANSITION_{name.upper()}") for name in names}
        return all(
            self.call(ChangeState, "/vla_accel/change_state", transition=Transition(id=ids[name])).success
            for name in names
        )

    def state(self) -> int:
        return self.call(GetState, "/vla_accel/get_state").current_state.id

    def set(self, **values: Any) -> list[str]:
        """Set parameters; the reasons of those that were refused."""
        parameters = [Parameter(name, value=value).to_parameter_msg() for name, value in values.items()]
        results = self.call(SetParameters, "/vla_accel/set_parameters", parameters=parameters).results
        return [one.reason for one in results if not one.successful]

    def configured(self, contract: Path, **values: Any) -> Robot:
        """Bring the node to active with this contract, whatever its state."""
        if self.state() == State.PRIMARY_STATE_ACTIVE:
            assert self.transition("deactivate")
        if self.state() == State.PRIMARY_STATE_INACTIVE:
            assert self.transition("cleanup")
        defaults = {"prompt": "stay there", "rate": 0.0, "max_age_s": 0.4, "wait_s": 5.0, "view": ""}
        assert not self.set(contract=str(contract), **{**defaults, **values})
        assert self.transition("configure", "activate"), self.log.read_text()
        self.commands.clear()
        self.diagnostics.clear()
        return self

    def goal(self, **fields: Any) -> Any:
        assert self.action.wait_for_server(30)
        return self.ask(lambda: self.action.send_goal_async(RunPolicy.Goal(**fields)))

    def result(self, goal: Any) -> Any:
        return self.ask(goal.get_result_async)

    def ask(self, request: Callable[[], Any]) -> Any:
        """The answer to a request of the action's client, which loses answers that another thread takes meanwhile."""
        return wait(wait(self.executor.create_task(request)))


def wait(future: Any, within_s: float = 60.0) -> Any:
    eventually(future.done, within_s)
    return future.result()


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy()


@pytest.fixture(scope="module")
def address(policy: Policy) -> Iterator[str]:
    with background(policy, ServerConfig(port=0)) as server:
        yield server.address


@pytest.fixture(scope="module")
def contracts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("contracts")
    made = {"trajectory": TRAJECTORY, "array": ARRAY, "bad": TRAJECTORY.replace("Image}", "PointCloud2}", 1)}
    made["other type"] = TRAJECTORY.replace("CompressedImage", "Image")
    for name, text in made.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in made}


@pytest.fixture(scope="module")
def node(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = tmp_path_factory.mktemp("node") / "log"
    program = Path(os.environ["AMENT_PREFIX_PATH"].split(os.pathsep)[0]) / "lib/vla_accel_ros/policy_node"
    with log.open("wb") as file:
        process = subprocess.Popen([program, "--ros-args", "-p", f"policy:={address}"], stdout=file, stderr=file)
        try:
            yield process, log
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def robot(node: tuple[subprocess.Popen[bytes], Path]) -> Iterator[Robot]:
    rclpy.init()
    robot = Robot(node[1])
    yield robot
    robot.executor.shutdown()
    rclpy.shutdown()
    robot.thread.join()


def test_a_goal_moves_the_robot_until_its_time_is_over(
    robot: Robot, policy: Policy, contracts: dict[str, Path]
) -> None:
    robot.configured(contracts["trajectory"])
    goal = robot.goal(prompt="pick up the bowl", max_duration_s=1.5)
    done = robot.result(goal)
    assert done.status == GoalStatus.STATUS_SUCCEEDED and done.result.termination_reason == "timeout"
    eventually(lambda: len(robot.commands) == done.result.published_actions)
    assert 10 < done.result.published_actions < 1.6 * 25
    for _, command in robot.commands:
        assert command.joint_names == list(JOINTS)
        np.testing.assert_allclose(command.points[0].positions, [RADIANS[name] for name in JOINTS])
        assert command.points[0].time_from_start.nanosec == 40_000_000
    assert policy.seen["task"] == "pick up the bowl"
    np.testing.assert_array_equal(
        policy.seen["observation.images.front"], np.tile(np.array([30, 20, 10], np.uint8), (4, 6, 1))
    )
    np.testing.assert_array_equal(
        policy.seen["observation.images.wrist"], np.tile(np.array([200, 100, 50], np.uint8), (5, 8, 1))
    )
    np.testing.assert_allclose(policy.seen["observation.state"], np.rad2deg([RADIANS[name] for name in JOINTS]))


def test_a_camera_that_stops_stops_the_robot_until_it_is_back(robot: Robot, contracts: dict[str, Path]) -> None:
    robot.configured(contracts["trajectory"], wait_s=30.0)
    goal = robot.goal()
    eventually(lambda: len(robot.commands) > 3)
    robot.off.add("front")
    off = time.monotonic()
    eventually(lambda: any(s.level == DiagnosticStatus.ERROR and "/front" in s.message for s in robot.diagnostics))
    (last, _), count = robot.commands[-1], len(robot.commands)
    assert last - off < 2.0
    time.sleep(0.5)
    assert len(robot.commands) == count
    robot.off.clear()
    eventually(lambda: len(robot.commands) > count + 3)
    robot.ask(goal.cancel_goal_async)
    done = robot.result(goal)
    assert done.status == GoalStatus.STATUS_CANCELED and done.result.termination_reason == "cancelled"


def test_a_topic_of_another_type_ends_the_goal_with_both_types(robot: Robot, contracts: dict[str, Path]) -> None:
    robot.configured(contracts["other type"], wait_s=2.5)
    done = robot.result(robot.goal())
    assert done.status == GoalStatus.STATUS_ABORTED and done.result.termination_reason == "error"
    parts = "/wrist: expected sensor_msgs/msg/Image, got sensor_msgs/msg/CompressedImage from robot"
    assert parts in done.result.message and not robot.commands


def test_a_chunk_comes_in_the_units_of_the_topic(robot: Robot, contracts: dict[str, Path]) -> None:
    robot.configured(contracts["trajectory"], rate=20.0)
    chunk = robot.call(GetActionChunk, "/get_action_chunk", prompt="now")
    while not chunk.success:  # the first messages of the cameras may be on their way
        assert "expected a message, got none" in chunk.message
        chunk = robot.call(GetActionChunk, "/get_action_chunk", prompt="now")
    assert chunk.names == [f"position.{name}" for name in JOINTS] and chunk.period_s == 0.05
    assert [one.size for one in chunk.actions.layout.dim] == [10, 3] and not robot.commands
    np.testing.assert_allclose(np.reshape(chunk.actions.data, (10, 3))[4], [RADIANS[name] for name in JOINTS])
    goal = robot.goal()
    assert "run_policy is running" in robot.call(GetActionChunk, "/get_action_chunk").message
    robot.ask(goal.cancel_goal_async)
    robot.result(goal)


def test_deactivation_ends_the_goal_and_an_inactive_node_accepts_none(robot: Robot, contracts: dict[str, Path]) -> None:
    robot.configured(contracts["trajectory"])
    goal = robot.goal()
    eventually(lambda: len(robot.commands) > 3)
    assert robot.set(max_age_s=9.0) == ["max_age_s: clean the node up to change it"]
    assert robot.set(rate=9.0) == ["rate: the policy is running"] and robot.set(prompt="another") == []
    assert not robot.goal().accepted, "one goal at a time"
    assert robot.transition("deactivate")
    done = robot.result(goal)
    assert done.status == GoalStatus.STATUS_ABORTED and done.result.termination_reason == "node_deactivated"
    assert not robot.goal().accepted


def test_a_live_view_records_the_runs(robot: Robot, contracts: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "run.rrd"
    robot.configured(contracts["trajectory"], view=f"rerun:{file}")
    assert robot.result(robot.goal(max_duration_s=1.0)).status == GoalStatus.STATUS_SUCCEEDED
    assert robot.transition("deactivate", "cleanup"), robot.log.read_text()
    command = [sys.executable, "-m", "rerun_cli", "rrd", "print", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for path in ("/camera/", "/state/observation_state/0", "/action/2/executed", "/age/message_ms"):
        assert path in printed, printed


def test_a_bad_contract_leaves_the_node_unconfigured(robot: Robot, contracts: dict[str, Path]) -> None:
    robot.configured(contracts["trajectory"])
    assert robot.transition("deactivate", "cleanup") and robot.set(contract=str(contracts["bad"])) == []
    assert not robot.transition("configure") and robot.state() == State.PRIMARY_STATE_UNCONFIGURED
    eventually(lambda: "got 'sensor_msgs/msg/PointCloud2'" in robot.log.read_text())


def test_the_node_survives_many_configurations(robot: Robot, contracts: dict[str, Path]) -> None:
    """The executor may wait for a topic that another thread destroys."""
    for _ in range(15):
        robot.configured(contracts["trajectory"])
    assert robot.state() == State.PRIMARY_STATE_ACTIVE


def test_an_interrupt_stops_the_robot_first(robot: Robot, node: Any, contracts: dict[str, Path]) -> None:
    """The last test: it ends the node."""
    robot.configured(contracts["array"])
    robot.goal()
    eventually(lambda: len(robot.commands) > 3)
    np.testing.assert_allclose(robot.commands[-1][1].data, [RADIANS[name] for name in JOINTS])
    node[0].send_signal(signal.SIGINT)
    assert node[0].wait(30) == 0, robot.log.read_text()
    eventually(lambda: list(robot.commands[-1][1].data) == [0.0, 0.0, 0.0])
