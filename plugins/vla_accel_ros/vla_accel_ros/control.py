"""The control loop: observations in, one action per control period out, until something ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vla_accel.errors import VlaAccelError
from vla_accel.remote.async_runner import AsyncRunner, RunnerReport
from vla_accel.remote.underrun import Choice
from vla_accel.view import OFF, View
from vla_accel_ros.observations import Observation, StaleError

logger = logging.getLogger("vla_accel.ros")

OK, WARN, ERROR = b"\x00", b"\x01", b"\x02"
"""Levels of `diagnostic_msgs/DiagnosticStatus`."""


class Clock(Protocol):
    """The node's clock, in seconds."""

    def now(self) -> float: ...

    def sleep_until(self, moment: float) -> None: ...


class Robot(Protocol):
    """What the loop reads and writes."""

    def observe(self) -> Observation:
        """The observation of now. Raises StaleError while a topic is missing or too old."""
        ...

    def act(self, action: np.ndarray) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Rules:
    """How to run a policy.

    Args:
        hz: control rate.
        wait_s: how long to wait for a complete observation, at the start and after a topic became stale.
        timeout_s: how long to wait for the first chunk, and at the end for the inference under way.
        underrun: see `AsyncRunner`.
        view: shows the run, with the age of the messages.
    """

    hz: float
    wait_s: float = 5.0
    timeout_s: float = 120.0
    underrun: Choice = "hold"
    view: View = OFF


class Control:
    """Runs a policy on a robot once.

    Attributes:
        published: actions that were published.
        overruns: control periods that took longer than a period.
        halts: how often a missing or stale topic stopped the robot.
        age_s: age of the last observation, in seconds.
        problem: why the robot stands still; empty while it moves.
    """

    def __init__(self, policy: Any, robot: Robot, clock: Clock, rules: Rules) -> None:
        self._robot, self._clock, self._rules = robot, clock, rules
        self._runner = AsyncRunner(policy, rules.hz, underrun=rules.underrun, view=rules.view)
        self.published = self.overruns = self.halts = 0
        self.age_s = 0.0
        self.problem = "waiting for observations"

    def run(self, ending: Callable[[], str]) -> str:
        """Run until `ending` returns a reason, and return it. The robot is stopped in any case.

        Raises:
            StaleError: no complete observation within `wait_s`.
            VlaAccelError: the policy failed, and no action was left.
        """
        try:
            while not (reason := ending()):
                observation = self._wait(ending)
                if observation is not None:
                    self._runner.start(observation.values, self._rules.timeout_s)
                    self._move(ending)
            return reason
        finally:
            self._halt()
            try:
                self._runner.close(self._rules.timeout_s)
            except VlaAccelError as error:  # must not replace the error that ended the loop
                logger.warning("%s", error)

    def report(self) -> RunnerReport:
        return self._runner.report()

    def _wait(self, ending: Callable[[], str]) -> Observation | None:
        """The first complete observation; None if something ended the loop before."""
        end = self._clock.now() + self._rules.wait_s
        while not ending():
            try:
                return self._observation()
            except StaleError as error:
                self.problem = str(error)
                now = self._clock.now()
                if now >= end:
                    raise StaleError(f"no complete observation within {self._rules.wait_s:g} s: {error}") from error
                self._clock.sleep_until(now + 1 / self._rules.hz)
        return None

    def _move(self, ending: Callable[[], str]) -> None:
        """Publish an action per control period, until something ends the loop or a topic is stale."""
        due = self._clock.now()
        while not ending():
            try:
                observation = self._observation()
            except StaleError as error:
                self.problem, self.halts = str(error), self.halts + 1
                logger.error("stopped: %s", error)
                self._robot.stop()
                return
            self._robot.act(self._runner.step(observation.values))
            self._rules.view.measured(self.published, {"age/message_ms": observation.age_s * 1e3})
            self.problem, self.published = "", self.published + 1
            due += 1 / self._rules.hz
            if (now := self._clock.now()) > due:
                self.overruns, due = self.overruns + 1, now
            else:
                self._clock.sleep_until(due)

    def _observation(self) -> Observation:
        observation = self._robot.observe()
        self.age_s = observation.age_s
        return observation

    def _halt(self) -> None:
        if not self.problem:
            self._robot.stop()


class Diagnosis:
    """The state of a control loop as level, message and values for `diagnostic_msgs/DiagnosticStatus`."""

    def __init__(self) -> None:
        self._before: tuple[Control, int] | None = None

    def of(self, control: Control) -> tuple[bytes, str, dict[str, str]]:
        """ERROR while the robot stands still; WARN if actions were late or missing since the last call; OK."""
        report = control.report()
        missed = report.underruns + report.late + report.stale + report.failures + control.overruns
        before = self._before[1] if self._before and self._before[0] is control else 0
        self._before = control, missed
        values: Mapping[str, Any] = {
            "actions": control.published,
            "latency_ms": f"{report.latency_ms:.1f}",
            "delay_ticks": report.delay_ticks,
            "observation_age_ms": f"{control.age_s * 1e3:.1f}",
            "underruns": report.underruns,
            "late_chunks": report.late,
            "stale_chunks": report.stale,
            "failed_inferences": report.failures,
            "overruns": control.overruns,
            "halts": control.halts,
        }
        shown = {key: str(value) for key, value in values.items()}
        if control.problem:
            return ERROR, f"stopped: {control.problem}", shown
        if missed > before:
            return WARN, "running; actions were late or missing", shown
        return OK, "running", shown
