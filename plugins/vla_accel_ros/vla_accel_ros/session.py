"""What a configured node has: its topics, its policy, and the answers to the action and the service."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import (
    QoSCompatibility,
    QoSDurabilityPolicy,
    QoSHistoryPolicy,
    QoSProfile,
    QoSReliabilityPolicy,
    qos_check_compatible,
)
from rclpy.time import Time
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float32MultiArray, Float64MultiArray, MultiArrayDimension, String
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

# Type checkers find the folder of the .action and .srv files.
from vla_accel_ros_interfaces.action import RunPolicy  # pyright: ignore[reportAttributeAccessIssue]

from vla_accel.errors import VlaAccelError
from vla_accel.remote.inference import actions_of
from vla_accel.remote.underrun import Choice
from vla_accel.view import open_view
from vla_accel_ros.commands import Command, Commands
from vla_accel_ros.contract import Channel, Qos, load_contract
from vla_accel_ros.control import ERROR, OK, Control, Diagnosis, Rules
from vla_accel_ros.observations import Observation, Observations, Stream
from vla_accel_ros.policies import PolicyOptions, check_robot, open_policy, underrun

TYPES = {
    f"{kind.__module__.partition('.')[0]}/msg/{kind.__name__}": kind
    for kind in (CompressedImage, Float32MultiArray, Float64MultiArray, Image, JointState, JointTrajectory, String)
}
COMMANDS_QOS = Qos(reliability="reliable")


class Host(LifecycleNode):
    """A node with a list of calls for the thread that waits for messages, which must not lose a topic meanwhile."""

    discarded: list[Callable[[], object]]


class Session:
    """Runs the policy of a node's parameters while the node is active.

    Args:
        node: the node whose topics these are. `discarded` gets the calls that destroy them.
        parameter: reads a parameter by name.

    Raises:
        ConfigError: a parameter or the contract is wrong.
        VlaAccelError: the policy could not be opened.
    """

    def __init__(self, node: Host, parameter: Callable[[str], Any]) -> None:
        self._node, self._parameter, self._clock = node, parameter, NodeClock(node)
        self._messages = ReentrantCallbackGroup()
        self._busy = threading.Lock()
        self._active, self._ending = False, ""
        self._topic_prompt = ""
        self._running: tuple[Any, Control] | None = None
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()

    @property
    def busy(self) -> bool:
        return self._busy.locked()

    def activate(self) -> None:
        """Accept goals."""
        self._ending, self._active = "", True

    def deactivate(self, timeout_s: float = 30.0) -> bool:
        """Accept no further goal, end the running one, and wait for it; False if it has not ended in time."""
        self._ending, self._active = "node_deactivated", False
        if not self._busy.acquire(timeout=timeout_s):
            self._node.get_logger().error(f"the running goal did not end within {timeout_s:g} s")
            return False
        self._busy.release()
        return True

    def close(self) -> None:
        """Discard the topics, and close the policy."""
        self._stack.close()

    def _open(self, stack: ExitStack) -> None:
        read, node = self._parameter, self._node
        contract = self._contract = load_contract(read("contract"))
        self._view = open_view(read("view") or None)
        stack.callback(self._view.close)
        policy = self._policy = open_policy(PolicyOptions(*(read(name) for name in PolicyOptions.__annotations__)))
        stack.callback(getattr(policy, "close", lambda: None))
        self._prompt_key = check_robot(contract, policy.metadata)
        self._underrun: Choice = underrun(read("underrun"), contract, policy)
        self._observations = Observations(contract, read("max_age_s"), read("max_skew_s"))
        self._commands, self._diagnosis = Commands(contract), Diagnosis()
        for stream in self._observations.streams:
            self._subscribe(
                stack, stream.source.channel, lambda message, to=stream: to.receive(message, self._clock.now())
            )
        if contract.prompt is not None:
            self._subscribe(stack, contract.prompt, lambda message: setattr(self, "_topic_prompt", message.data))
        self._publishers = {}
        for source in contract.actions:
            channel, profile = source.channel, qos_profile(source.channel.qos or COMMANDS_QOS)
            made = node.create_lifecycle_publisher(TYPES[channel.type], channel.topic, profile)
            stack.callback(node.discarded.append, partial(node.destroy_lifecycle_publisher, made))
            self._publishers[channel.topic] = made

    def _subscribe(self, stack: ExitStack, channel: Channel, receive: Callable[[Any], None]) -> None:
        profile = qos_profile(channel.qos or Qos())
        made = self._node.create_subscription(
            TYPES[channel.type], channel.topic, receive, profile, callback_group=self._messages
        )
        stack.callback(self._node.discarded.append, partial(self._node.destroy_subscription, made))

    # -- the action and the service ---------------------------------------------------------------------------------

    def claim(self) -> str:
        """Reserve the policy for one goal or call; return why not, or "" if it is reserved."""
        if not self._active:
            return "the node is not active"
        return "" if self._busy.acquire(blocking=False) else "run_policy is running"

    def run(self, goal: Any) -> RunPolicy.Result:
        """Run the policy, which `claim` has reserved, for a goal."""
        result, control = RunPolicy.Result(termination_reason="error"), None
        try:
            limit = goal.request.max_duration_s or self._parameter("max_duration_s") or self._contract.max_duration_s
            end = self._clock.now() + limit if limit else None
            rules = Rules(self._hz, self._parameter("wait_s"), underrun=self._underrun, view=self._view)
            self._view.began(f"run_policy: {goal.request.prompt}")
            self._observations.restart()
            control = Control(self._policy, SessionRobot(self, goal.request.prompt), self._clock, rules)
            self._running = goal, control
            result.termination_reason = control.run(lambda: self._reason(goal, end))
        except Exception as error:  # a policy may raise anything, and rclpy would end the node
            result.message = self._described(error)
        finally:
            self._running = None
            self._busy.release()
        if control is not None:
            report = control.report()
            result.published_actions, result.underruns = control.published, report.underruns
            result.latency_ms = report.latency_ms
        {"timeout": goal.succeed, "cancelled": goal.canceled}.get(result.termination_reason, goal.abort)()
        return result

    def _reason(self, goal: Any, end: float | None) -> str:
        if goal.is_cancel_requested:
            return "cancelled"
        return self._ending or ("timeout" if end is not None and self._clock.now() >= end else "")

    def chunk(self, request: Any, response: Any) -> Any:
        """Fill the response of `get_action_chunk`."""
        if reason := self.claim():
            response.message = reason
            return response
        try:
            observation, began = self.observe(request.prompt).values, time.monotonic()
            getattr(self._policy, "reset", lambda: None)()
            actions = self._commands.units(actions_of(self._policy.infer(observation)))
            response.latency_ms = (time.monotonic() - began) * 1e3
            response.names, response.period_s, response.success = self._commands.names, 1 / self._hz, True
            response.actions.data = actions.ravel().tolist()
            strides = (actions.size, actions.shape[1])
            response.actions.layout.dim = [
                MultiArrayDimension(label=label, size=size, stride=stride)
                for label, size, stride in zip(("actions", "numbers"), actions.shape, strides, strict=True)
            ]
        except Exception as error:
            response.message = self._described(error)
        finally:
            self._busy.release()
        return response

    def _described(self, error: Exception) -> str:
        """Log an error, and return it as text."""
        expected = isinstance(error, VlaAccelError)
        self._node.get_logger().error(str(error) if expected else traceback.format_exc())
        return str(error) if expected else f"{type(error).__name__}: {error}"

    # -- observations and commands --------------------------------------------------------------------------------

    @property
    def _hz(self) -> float:
        return self._parameter("rate") or self._contract.fps

    def observe(self, prompt: str) -> Observation:
        """The observation of now with an instruction: `prompt`, the topic's, or the parameter."""
        observation = self._observations.read(self._clock.now())
        text = prompt or self._topic_prompt or self._parameter("prompt")
        if text:
            observation.values[self._prompt_key] = text
        return observation

    def act(self, action: np.ndarray) -> None:
        self._publish(self._commands.next(action))

    def stop(self) -> None:
        """Publish the commands that stop the robot, and wait until they arrived: the node may end right after."""
        commands = self._commands.stop()
        self._publish(commands)
        for command in commands:
            self._publishers[command.source.channel.topic].wait_for_all_acked(Duration(seconds=0.5))

    def _publish(self, commands: list[Command]) -> None:
        for command in commands:
            self._publishers[command.source.channel.topic].publish(self._message(command))

    def _message(self, command: Command) -> Any:
        kind = TYPES[command.source.channel.type]
        if kind is Float64MultiArray:
            return Float64MultiArray(data=command.values.tolist())
        joints, fields = command.by_field()
        if kind is JointState:
            message = JointState(name=joints, **fields)
            message.header.stamp = self._node.get_clock().now().to_msg()
            return message
        # The stamp stays 0: a controller then starts at once, whatever its clock says.
        point = JointTrajectoryPoint(time_from_start=Duration(seconds=1 / self._hz).to_msg(), **fields)
        return JointTrajectory(joint_names=joints, points=[point])

    # -- diagnostics ----------------------------------------------------------------------------------------------

    def report(self) -> DiagnosticArray:
        """The diagnostics; also publishes the goal's feedback."""
        for stream in self._observations.streams:
            stream.problem = self._problem(stream)
        running = self._running
        level, message, values = self._idle() if running is None else self._diagnosis.of(running[1])
        now = self._clock.now()
        ages = {f"{stream.topic} age_ms": stream.age(now) for stream in self._observations.streams}
        shown = {**values, **{key: "none" if age is None else f"{age * 1e3:.1f}" for key, age in ages.items()}}
        pairs = [KeyValue(key=key, value=value) for key, value in shown.items()]
        name = f"{self._node.get_name()}: policy"
        array = DiagnosticArray(status=[DiagnosticStatus(level=level, name=name, message=message, values=pairs)])
        array.header.stamp = self._node.get_clock().now().to_msg()
        if running is not None and running[0].is_active:
            goal, control = running
            report = control.report()
            goal.publish_feedback(RunPolicy.Feedback(
                published_actions=control.published, underruns=report.underruns, latency_ms=report.latency_ms,
                observation_age_ms=control.age_s * 1e3, problem=control.problem,
            ))  # fmt: skip
        return array

    def _idle(self) -> tuple[bytes, str, Mapping[str, str]]:
        """The diagnosis without a goal: what would stop one."""
        problems = [stream.refused or stream.problem for stream in self._observations.streams]
        found = "; ".join(filter(None, problems))
        return (ERROR, found, {}) if found else (OK, "active, no goal" if self._active else "inactive", {})

    def _problem(self, stream: Stream) -> str:
        """Why a topic brings no messages: nobody publishes it, or with another type or an incompatible QoS."""
        channel, topic = stream.source.channel, stream.topic
        infos = self._node.get_publishers_info_by_topic(topic)
        if not infos:
            return f"{topic}: expected a publisher, got none"
        for info in infos:
            who = f"{topic}: expected {{}}, got {{}} from {info.node_name}"
            if info.topic_type != channel.type:
                return who.format(channel.type, info.topic_type)
            compatible, reason = qos_check_compatible(info.qos_profile, qos_profile(channel.qos or Qos()))
            if compatible == QoSCompatibility.ERROR:
                return who.format("a compatible QoS", reason)
        return ""


class SessionRobot:
    """The robot of a goal."""

    def __init__(self, session: Session, prompt: str) -> None:
        self._session, self._prompt = session, prompt
        self.act, self.stop = session.act, session.stop

    def observe(self) -> Observation:
        return self._session.observe(self._prompt)


class NodeClock:
    """The node's clock; simulated time if the node has `use_sim_time`."""

    def __init__(self, node: LifecycleNode) -> None:
        self._clock = node.get_clock()

    def now(self) -> float:
        return self._clock.now().nanoseconds * 1e-9

    def sleep_until(self, moment: float) -> None:
        self._clock.sleep_until(Time(nanoseconds=int(moment * 1e9), clock_type=self._clock.clock_type))


def qos_profile(qos: Qos) -> QoSProfile:
    return QoSProfile(
        depth=qos.depth,
        history=QoSHistoryPolicy[qos.history.upper()],
        reliability=QoSReliabilityPolicy[qos.reliability.upper()],
        durability=QoSDurabilityPolicy[qos.durability.upper()],
    )
