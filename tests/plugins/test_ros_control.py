"""The control loop of the ROS node without ROS: when it moves, when it stops, and what it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vla_accel_ros.contract import Contract
from vla_accel_ros.control import ERROR, OK, WARN, Control, Diagnosis, Rules
from vla_accel_ros.observations import Observation, StaleError
from vla_accel_ros.policies import PolicyOptions, check_robot, open_policy, underrun

from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote.underrun import Hold


class Clock:
    """Time that only passes in `sleep_until` and where a test says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.time = round(max(self.time, moment), 9)


class Robot:
    """Counts what it does; `stale` says for which moments its camera is missing."""

    def __init__(self, clock: Clock, stale: Callable[[float], bool] = lambda _: False, slow_s: float = 0.0) -> None:
        self.clock, self.stale, self.slow_s = clock, stale, slow_s
        self.acted: list[float] = []
        self.stopped: list[float] = []

    def observe(self) -> Observation:
        if self.stale(self.clock.time):
            raise StaleError("/cam: expected a message, got none")
        return Observation({"state": np.zeros(2)}, 0.025)

    def act(self, action: np.ndarray) -> None:
        self.acted.append(self.clock.time)
        self.clock.time += self.slow_s

    def stop(self) -> None:
        self.stopped.append(self.clock.time)


class Policy:
    metadata: Mapping[str, Any] = {"robot": {"motion_dims": []}}

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        return {"actions": np.zeros((50, 2))}


def after(clock: Clock, seconds: float) -> Callable[[], str]:
    return lambda: "timeout" if clock.time >= seconds - 1e-9 else ""


def test_there_is_one_action_per_control_period() -> None:
    clock = Clock()
    robot = Robot(clock)
    control = Control(Policy(), robot, clock, Rules(hz=10))
    assert control.run(after(clock, 2.0)) == "timeout"
    np.testing.assert_allclose(robot.acted, np.arange(20) / 10)
    assert control.published == 20 and control.overruns == 0 and robot.stopped == [pytest.approx(2.0)]


def test_a_slow_period_is_counted_and_not_made_up_for() -> None:
    clock = Clock()
    robot = Robot(clock, slow_s=0.35)
    control = Control(Policy(), robot, clock, Rules(hz=10))

    def ending() -> str:
        robot.slow_s = 0.0 if robot.acted else robot.slow_s
        return after(clock, 1.0)()

    control.run(ending)
    np.testing.assert_allclose(np.diff(robot.acted), [0.35] + [0.1] * 6)
    assert control.overruns == 1 and control.published == 8


def test_a_missing_camera_stops_the_robot_until_it_is_back() -> None:
    clock = Clock()
    robot = Robot(clock, stale=lambda t: t < 0.3 or 1 <= t < 2)
    control, diagnosis, seen = Control(Policy(), robot, clock, Rules(hz=10)), Diagnosis(), []

    def ending() -> str:
        seen.append((clock.time, *diagnosis.of(control)[:2]))
        return after(clock, 3.0)()

    control.run(ending)
    moving = [t for t in np.arange(30) / 10 if not robot.stale(t)]
    np.testing.assert_allclose(robot.acted, moving, atol=0.11)
    assert control.halts == 1 and robot.stopped == [pytest.approx(1.0, abs=0.05), pytest.approx(3.0, abs=0.05)]
    for time, level, message in seen:
        if 1.05 < time < 1.95:
            assert level == ERROR and "/cam: expected a message, got none" in message
        if 0.5 < time < 0.95 or time > 2.2:
            assert (level, message) == (OK, "running")


def test_a_camera_that_stays_away_ends_the_run_with_its_name() -> None:
    clock = Clock()
    robot = Robot(clock, stale=lambda t: t >= 1)
    with pytest.raises(StaleError, match="no complete observation within 2 s: /cam: expected a message"):
        Control(Policy(), robot, clock, Rules(hz=10, wait_s=2)).run(lambda: "")
    assert clock.time == pytest.approx(3.0, abs=0.15) and len(robot.stopped) == 1 and len(robot.acted) == 10


def test_a_policy_that_fails_ends_the_run_and_stops_the_robot() -> None:
    class Failing(Policy):
        calls = 0

        def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
            self.calls += 1
            if self.calls > 2:
                raise EngineError("out of order")
            return {"actions": np.zeros((5, 2))}

    clock = Clock()
    robot = Robot(clock)
    with pytest.raises(EngineError, match="out of order"):
        Control(Failing(), robot, clock, Rules(hz=1000)).run(lambda: "")
    assert len(robot.acted) == 5 and len(robot.stopped) == 1


def test_diagnostics_warn_of_underruns_since_the_last_ones_alone() -> None:
    gate = threading.Event()
    gate.set()

    class Slow(Policy):
        def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
            gate.wait(60)
            return {"actions": np.zeros((4, 2))}

    clock = Clock()
    control, diagnosis = Control(Slow(), Robot(clock), clock, Rules(hz=1000)), Diagnosis()
    levels: list[bytes] = []

    def ending() -> str:
        if control.published == 1:
            gate.clear()
        if control.published == 10 and not gate.is_set():
            levels.extend(diagnosis.of(control)[0] for _ in range(2))
            gate.set()
        return "timeout" if control.published >= 10 else ""

    control.run(ending)
    assert levels == [WARN, OK]
    _, _, values = diagnosis.of(control)
    assert int(values["underruns"]) >= 5 and values["observation_age_ms"] == "25.0" and values["actions"] == "10"


CONTRACT = Contract(fps=30, observations={"observation.state": ()}, actions=())


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (PolicyOptions(""), ("policy", "ws://host:port or a checkpoint")),
        (PolicyOptions("ws://127.0.0.1:1", config="native_fp8"), ("config", "server's address", "native_fp8")),
        (PolicyOptions("demo", tls_ca="ca.pem"), ("tls_ca", "checkpoint", "ca.pem")),
        (PolicyOptions("ws://127.0.0.1:1", api_key_file="no such file"), ("api_key_file", "readable")),
    ],
)
def test_options_of_another_kind_of_policy_are_refused(options: PolicyOptions, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        open_policy(options)
    assert all(part in str(raised.value) for part in parts), raised.value


def test_the_policy_says_the_prompts_key_and_how_many_numbers_an_action_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_robot(CONTRACT, {}) == "prompt"
    assert check_robot(CONTRACT, {"robot": {"prompt": "task", "state": ["observation.state"]}}) == "task"
    monkeypatch.setattr(Contract, "action_dim", 6)
    with pytest.raises(ConfigError, match=r"expected 7 numbers, as the policy's, got 6"):
        check_robot(CONTRACT, {"robot": {"action_dim": 7}})


def test_an_underrun_holds_what_the_policy_or_the_contract_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contract, "motion_dims", (1,))
    declared, unknown = Policy(), SimpleNamespace(metadata={})
    assert underrun("hold", CONTRACT, declared) == "hold" and underrun("hold", CONTRACT, unknown) == Hold((1,))
    assert underrun("raise", CONTRACT, unknown) == "raise"
    with pytest.raises(ConfigError, match="expected hold or raise, got 'sit'"):
        underrun("sit", CONTRACT, unknown)
