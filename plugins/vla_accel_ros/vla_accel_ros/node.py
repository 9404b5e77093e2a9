"""The lifecycle node and its parameters."""

from __future__ import annotations

import logging
import math
import signal
import sys
import traceback
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup
from rclpy.exceptions import InvalidHandle
from rclpy.executors import MultiThreadedExecutor
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions

# Type checkers find the folder of the .action and .srv files.
from vla_accel_ros_interfaces.action import RunPolicy  # pyright: ignore[reportAttributeAccessIssue]
from vla_accel_ros_interfaces.srv import GetActionChunk  # pyright: ignore[reportAttributeAccessIssue]

from vla_accel.errors import VlaAccelError
from vla_accel_ros.session import Host, Session

PARAMETERS: dict[str, tuple[Any, str]] = {
    "contract": ("", "YAML file that names the topics"),
    "policy": ("", "ws://host:port of a policy server, or a checkpoint to run in this process"),
    "policy_name": ("", "policy of a server that has several"),
    "api_key_file": ("", "file with the server's key"),
    "tls_ca": ("", "file with the certificates to trust for wss://"),
    "timeout_s": (10.0, "longest wait for the server's answer"),
    "config": ("", "configuration of a checkpoint in this process"),
    "device": ("", "device of a checkpoint in this process"),
    "prompt": ("", "instruction for the policy"),
    "rate": (0.0, "control rate in Hz; 0: the contract's"),
    "max_duration_s": (0.0, "longest run; 0: the contract's, or no limit"),
    "max_age_s": (0.5, "age from which a message is stale"),
    "max_skew_s": (0.2, "longest time between the messages of an observation"),
    "wait_s": (5.0, "how long to wait for a complete observation"),
    "underrun": ("hold", "what to do when no action is left: hold or raise"),
    "view": ("", "where to show the runs: rerun, rerun://HOST:PORT or rerun:FILE.rrd"),
    "autostart": (False, "configure and activate the node at its start"),
}
CHANGEABLE = ("prompt", "rate", "max_duration_s")
"""Parameters that may change after the node is configured."""


class PolicyNode(Host):
    """Runs a policy while it is active; `session` exists from configure to cleanup."""

    def __init__(self, **options: Any) -> None:
        super().__init__("vla_accel", **options)
        self.session: Session | None = None
        self.discarded = []
        for name, (default, description) in PARAMETERS.items():
            self.declare_parameter(name, default, ParameterDescriptor(description=description))
        self.add_on_set_parameters_callback(self.check_parameters)
        group = ReentrantCallbackGroup()
        self.create_service(GetActionChunk, "get_action_chunk", self.answer_chunk, callback_group=group)
        self.run_policy = ActionServer(
            self, RunPolicy, "run_policy", lambda goal: self.configured().run(goal),
            goal_callback=self.answer_goal, cancel_callback=lambda _: CancelResponse.ACCEPT, callback_group=group,
        )  # fmt: skip
        self.diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self.create_timer(1.0, self.publish_diagnostics, callback_group=MutuallyExclusiveCallbackGroup())
        log = logging.getLogger("vla_accel")
        log.addHandler(RosLog(self))
        log.propagate = False

    def read(self, name: str) -> Any:
        """A parameter's value."""
        return self.get_parameter(name).value

    def configured(self) -> Session:
        assert self.session is not None
        return self.session

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        try:
            self.session = Session(self, self.read)
        except Exception as error:  # rclpy would drop it without a word
            expected = isinstance(error, (VlaAccelError, OSError))
            self.get_logger().error(str(error) if expected else traceback.format_exc())
            return TransitionCallbackReturn.FAILURE
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.configured().activate()
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        if not self.configured().deactivate():
            return TransitionCallbackReturn.FAILURE
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.end()
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.end()
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.end()
        return TransitionCallbackReturn.SUCCESS

    def end(self) -> None:
        """End the running goal, which stops the robot, and the session."""
        if self.session is not None:
            self.session.deactivate()
            self.session.close()
            self.session = None

    def answer_goal(self, _: Any) -> GoalResponse:
        """Accept a goal in an active node, one at a time; `Session.run` follows."""
        session = self.session
        if reason := "the node is not configured" if session is None else session.claim():
            self.get_logger().error(f"run_policy: {reason}")
        return GoalResponse.REJECT if reason else GoalResponse.ACCEPT

    def answer_chunk(self, request: Any, response: Any) -> Any:
        """Answer `get_action_chunk`."""
        if (session := self.session) is not None:
            return session.chunk(request, response)
        response.message = "the node is not configured"
        return response

    def publish_diagnostics(self) -> None:
        if (session := self.session) is not None:
            self.diagnostics.publish(session.report())

    def destroy_discarded(self) -> None:
        """Destroy topics of a closed session. Only the thread that waits for messages may do so: rclpy's executor does
        not stand the loss of what it waits for."""
        while self.discarded:
            self.discarded.pop()()

    def check_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        """Refuse values that the node would not use."""
        for one in parameters:
            reason = ""
            if one.name in PARAMETERS and one.name not in CHANGEABLE and self.session is not None:
                reason = "clean the node up to change it"
            elif one.name == "rate" and self.session is not None and self.session.busy:
                reason = "the policy is running"
            elif one.name in PARAMETERS and isinstance(one.value, float) and not 0 <= one.value < math.inf:
                reason = f"expected 0 or more, got {one.value}"
            if reason:
                return SetParametersResult(successful=False, reason=f"{one.name}: {reason}")
        return SetParametersResult(successful=True)


class RosLog(logging.Handler):
    """Sends the package's log records to the node's log."""

    def __init__(self, node: PolicyNode) -> None:
        super().__init__()
        self._log = node.get_logger()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self._log.error(record.getMessage())
        elif record.levelno >= logging.WARNING:
            self._log.warning(record.getMessage())
        else:
            self._log.info(record.getMessage())


def main(args: list[str] | None = None) -> None:
    """Run the node until SIGINT or SIGTERM, which end the running goal first."""
    # rclpy's own handlers would close the topics before the robot is stopped.
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    node = PolicyNode()
    executor = MultiThreadedExecutor(num_threads=8)
    executor.add_node(node)
    try:
        if node.read("autostart"):
            for change in (node.trigger_configure, node.trigger_activate):
                if change() != TransitionCallbackReturn.SUCCESS:
                    sys.exit(1)
        while True:
            try:
                executor.spin_once(timeout_sec=0.5)
            except InvalidHandle:  # a message of a topic that was destroyed since
                pass
            node.destroy_discarded()
    except KeyboardInterrupt:
        pass
    finally:
        node.end()
        executor.shutdown()
        node.destroy_discarded()
        node.run_policy.destroy()
        node.destroy_node()
        rclpy.shutdown()


if __name__ == "__main__":
    main()
