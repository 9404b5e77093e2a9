"""`AsyncRunner`: the action of each tick, what the policy gets, underruns, errors, closing.

The test decides at which tick an inference ends, so nothing depends on the machine's speed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.server_support import local
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote import async_runner, inference
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.remote.delay import DelayEstimate
from vla_accel.remote.metadata import supports_prev_chunk

HORIZON, DIM = 8, 2


class Plain:
    """Chunk n, from the observation of tick o, has the actions (n, o), (n, o + 1), … The first call, with which a
    runner warms up the policy, is not counted."""

    def __init__(self, horizon: int = HORIZON) -> None:
        self.horizon = horizon
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.calls: list[dict[str, Any]] = []
        self.resets = 0
        self.warm = False
        self.width = DIM
        self.error: BaseException | None = None

    def reset(self) -> None:
        self.resets += 1

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        return self._run(observation, {})

    def _run(self, observation: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        call = {"tick": float(observation["tick"][0]), **options}
        if self.warm:
            self.calls.append(call)
        self.warm, number = True, len(self.calls)
        self.entered.release()
        assert self.gate.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        ticks = call["tick"] + np.arange(self.horizon)
        actions = np.stack(
            [np.full(self.horizon, float(number)), ticks, *np.zeros((self.width - 2, self.horizon))], axis=1
        )
        return {"actions": actions}


class Guided(Plain):
    supports_prev_chunk = True

    def infer(
        self, observation: Mapping[str, Any], *, prev_chunk: Any = None, inference_delay: Any = None
    ) -> dict[str, Any]:
        return self._run(observation, {"prev_chunk": prev_chunk, "inference_delay": inference_delay})


class Loop:
    """A robot's loop. `step(done=True)` lets the current inference end just before the step."""

    def __init__(self, policy: Plain, **options: Any) -> None:
        self.policy, self.frame = policy, np.zeros(1)
        self.runner = AsyncRunner(policy, 50.0, **{"max_wait_s": 0.0, "margin_ticks": 0, **options})
        self.tick = 0

    def start(self) -> None:
        calls = 1 if self.runner._delay.measured else 2
        self.policy.gate.release(calls)
        self.frame[0] = self.tick
        self.runner.start({"tick": self.frame, "prompt": "x"})
        for _ in range(calls):
            assert self.policy.entered.acquire(timeout=PATIENCE_S)

    def step(self, *, done: bool = False) -> tuple[float, float]:
        """(chunk, tick) that the action belongs to."""
        if done:
            self.finish()
        self.frame[0] = self.tick  # one buffer for all frames, as robots have
        action = self.runner.step({"tick": self.frame, "prompt": "x"})
        self.tick += 1
        return float(action[0]), float(action[1])

    def finish(self) -> None:
        """Let the current inference end."""
        assert self.policy.entered.acquire(timeout=PATIENCE_S), "no inference is under way"
        self.policy.gate.release()
        assert inference.Inference.wait_until(self.runner._inference, time.monotonic() + PATIENCE_S)


@pytest.fixture(autouse=True)
def _no_thread_remains() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    eventually(lambda: not set(threading.enumerate()) - before)


@pytest.fixture(autouse=True)
def _every_inference_takes_10_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock that measures it: half a tick, on any machine."""
    clock = types.SimpleNamespace(monotonic=time.monotonic, perf_counter=itertools.count(0, 0.01).__next__)
    monkeypatch.setattr(inference, "time", clock)


def expecting(runner: AsyncRunner, ticks: int) -> None:
    """Set the delay of all inferences so far."""
    runner._delay = DelayEstimate(50.0)
    runner._delay.add(0.0, ticks)


def stopped(loop: Loop) -> None:
    loop.policy.gate.release(10)
    loop.runner.close(PATIENCE_S)


def test_every_tick_gets_its_own_action_across_chunks() -> None:
    loop = Loop(Plain(), replan_ticks=3)
    loop.start()
    got = [loop.step() for _ in range(3)]  # ticks 0, 1, 2: three actions executed
    got += [loop.step()]  # tick 3: the next inference begins
    got += [loop.step(), loop.step(done=True)]  # it ends before tick 5: two ticks
    got += [loop.step()]  # 3 actions of its chunk are behind: the next inference begins
    assert got == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    assert loop.policy.entered.acquire(timeout=PATIENCE_S)
    assert [c["tick"] for c in loop.policy.calls] == [0, 3, 6]
    report = loop.runner.report()
    assert (report.ticks, report.chunks, report.underruns, report.stale) == (7, 2, 0, 0)
    assert report.delay_ticks == 2
    stopped(loop)


def test_a_guided_policy_gets_the_rest_of_the_chunk_and_the_delay() -> None:
    loop = Loop(Guided(), replan_ticks=3)
    assert loop.runner.real_time_chunking
    loop.start()
    assert loop.policy.calls[0]["prev_chunk"] is None and loop.policy.calls[0]["inference_delay"] is None
    expecting(loop.runner, 2)
    for _ in range(4):
        loop.step()
    assert loop.policy.entered.acquire(timeout=PATIENCE_S)
    loop.policy.entered.release()
    call = loop.policy.calls[1]
    # Begun at tick 3: row 0 is the action of tick 3, which is executed while the policy computes.
    np.testing.assert_array_equal(call["prev_chunk"], [[1, t] for t in range(3, 8)])
    assert call["inference_delay"] == 2
    assert [loop.step(), loop.step(done=True)] == [(1, 4), (2, 5)]
    assert loop.runner.report().late == 0
    stopped(loop)


def test_a_chunk_later_than_announced_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(Guided(), replan_ticks=2)
    loop.start()
    expecting(loop.runner, 1)
    for _ in range(5):
        loop.step()  # begins at tick 2
    assert loop.step(done=True) == (2, 5)
    assert loop.runner.report().late == 1
    assert "took 3 ticks, 1 were announced" in caplog.text
    stopped(loop)


def test_the_next_inference_begins_early_enough_for_the_measured_delay() -> None:
    loop = Loop(Plain(), replan_ticks=7, margin_ticks=1)
    loop.start()
    expecting(loop.runner, 3)
    starts = []
    for _ in range(6):
        loop.step()
        starts.append(loop.runner._inference.busy)
    # 8 actions, 3 ticks and one to spare: with 4 left, at tick 4.
    assert starts == [False] * 4 + [True] * 2
    stopped(loop)


def test_half_a_chunk_is_the_default() -> None:
    loop = Loop(Plain())
    loop.start()
    began = []
    for _ in range(5):
        loop.step()
        began.append(loop.runner._inference.busy)
    assert began == [False] * 4 + [True]
    assert loop.step(done=True) == (2, 5)
    assert loop.runner.report().delay_ticks == 1
    stopped(loop)


def test_an_underrun_holds_the_last_action_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(Plain(), replan_ticks=4)
    loop.start()
    for _ in range(8):
        loop.step()
    with caplog.at_level(logging.WARNING):
        assert [loop.step() for _ in range(2)] == [(1, 7), (1, 7)]
    assert loop.runner.report().underruns == 2
    assert caplog.text.count("UNDERRUN at tick 8") == 1
    # Begun at tick 4, used at tick 10: its action 6.
    assert loop.step(done=True) == (2, 10)
    assert "actions again at tick 10" in caplog.text
    stopped(loop)
    assert "2 underruns in 11 ticks" in caplog.text


@pytest.mark.parametrize("choice", [np.array([-1.0, -2.0]), "raise"], ids=["action", "raise"])
def test_an_underrun_may_use_a_given_action_or_raise(choice: Any) -> None:
    loop = Loop(Plain(), underrun=choice)
    loop.start()
    for _ in range(8):
        loop.step()
    if isinstance(choice, str):
        with pytest.raises(EngineError, match="no action for tick 8"):
            loop.step()
    else:
        assert loop.step() == (-1, -2)
    assert loop.runner.report().underruns == 1
    stopped(loop)


def test_a_chunk_that_took_longer_than_it_lasts_is_dropped() -> None:
    loop = Loop(Plain(), replan_ticks=1)
    loop.start()
    for _ in range(9):
        loop.step()  # begins at tick 1; its actions end with tick 8
    assert loop.step(done=True) == (1, 7), "held: the new chunk has nothing for tick 9"
    report = loop.runner.report()
    assert (report.stale, report.chunks, report.underruns) == (1, 1, 2)
    assert loop.runner._inference.busy, "and the next inference begins at once"
    assert loop.step(done=True) == (3, 10)
    stopped(loop)


def test_step_waits_for_the_deadline_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(Plain(), max_wait_s=0.3)
    loop.start()
    for _ in range(8):
        loop.step()
    now, until = 100.0, []
    loop.runner._longest_step_s = 0.0  # until here it measured this machine
    clock = types.SimpleNamespace(monotonic=lambda: now)
    wait_until = loop.runner._inference.wait_until

    def time_out(end: float) -> bool:
        nonlocal now
        until.append(end)
        now = end
        return wait_until(0.0)

    with monkeypatch.context() as patch:
        patch.setattr(async_runner, "time", clock)
        patch.setattr(loop.runner._inference, "wait_until", time_out)
        loop.step()
        assert until == [pytest.approx(100.3)] and loop.runner.report().underruns == 1
        assert loop.runner.report().longest_step_ms == pytest.approx(300)

        def wait(end: float) -> bool:
            loop.finish()
            return wait_until(end)

        patch.setattr(loop.runner._inference, "wait_until", wait)
        assert loop.step() == (2, 9)
    stopped(loop)


@pytest.mark.parametrize("error", [ValueError("bad camera"), SystemExit(2)])
def test_an_error_is_raised_only_when_no_action_is_left(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(Plain(), replan_ticks=4)
    loop.start()
    for _ in range(4):
        loop.step()
    loop.policy.error = error
    loop.step()  # tick 4: begins
    assert loop.step(done=True) == (1, 5), "two more actions are there"
    assert "an inference failed at tick 5, 3 actions are left" in caplog.text, "the error is logged at once"
    assert [loop.step(), loop.step()] == [(1, 6), (1, 7)]
    for _ in range(3):  # the second attempt is under way; holding would hide that the policy fails
        with pytest.raises(type(error)) as caught:
            loop.step()
        assert caught.value is error
        loop.tick = loop.runner.report().ticks
    assert loop.runner.report().failures == 1
    assert loop.step(done=True) == (3, 11), "an inference that succeeds ends it"
    stopped(loop)


def test_attempts_after_errors_come_with_longer_and_longer_pauses() -> None:
    class Dead(Plain):
        def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
            if self.warm and self.calls:
                self.calls.append({"tick": float(observation["tick"][0])})
                raise ConnectionError("gone")
            return super().infer(observation)

    loop = Loop(Dead(), replan_ticks=1)
    loop.start()
    raised = 0
    for tick in range(200):
        loop.frame[0] = tick
        try:
            loop.runner.step({"tick": loop.frame})
        except ConnectionError:
            raised += 1
        if loop.runner._inference.busy:
            assert loop.runner._inference.wait_until(time.monotonic() + PATIENCE_S)
    attempts = [call["tick"] for call in loop.policy.calls[1:]]
    # Each fails one tick after it began; the pauses after that are 1, 2, 4, …, 50 ticks (a second).
    assert list(np.diff(attempts)) == [1 + pause for pause in (1, 2, 4, 8, 16, 32, 50, 50)][: len(attempts) - 1]
    assert raised == 192, "all but the eight actions that were there"
    assert loop.runner.report().failures == len(attempts)
    stopped(loop)


def test_a_chunk_of_another_width_is_refused() -> None:
    loop = Loop(Plain(), replan_ticks=1, underrun="hold")
    loop.start()
    loop.policy.width = 7
    loop.step()
    loop.step()
    loop.step(done=True)
    with pytest.raises(EngineError, match="expected chunks of 2 numbers per action, as at first, got 7"):
        for _ in range(20):
            loop.policy.gate.release()
            assert len(loop.runner.step({"tick": loop.frame})) == 2
            if loop.runner._inference.busy:
                assert loop.runner._inference.wait_until(time.monotonic() + PATIENCE_S)
    with pytest.raises(EngineError, match="expected chunks of 2 numbers"):
        loop.policy.gate.release()
        loop.runner.start({"tick": loop.frame})
    stopped(loop)


def test_an_error_of_the_first_chunk_is_raised_by_start() -> None:
    loop = Loop(Plain())
    loop.policy.error = ValueError("bad camera")
    with pytest.raises(ValueError, match="bad camera"):
        loop.start()
    with pytest.raises(ConfigError, match="call start"):
        loop.step()
    loop.policy.entered.acquire()
    while loop.policy.gate.acquire(blocking=False):
        pass
    loop.policy.warm, loop.policy.calls = False, []
    loop.start()
    assert loop.step() == (1, 0)
    stopped(loop)


def test_start_begins_anew() -> None:
    loop = Loop(Plain(), replan_ticks=1)
    loop.start()
    for _ in range(3):
        loop.step()
    assert loop.runner._inference.busy
    assert loop.policy.entered.acquire(timeout=PATIENCE_S)
    # The inference of the old episode ends while the new one begins; its chunk must not be used.
    threading.Timer(0.2, loop.policy.gate.release).start()
    threading.Timer(0.4, loop.policy.gate.release).start()
    loop.tick, loop.frame[0] = 100, 100
    loop.runner.start({"tick": loop.frame})
    assert loop.step() == (3, 100)
    assert loop.policy.resets == 3
    stopped(loop)


def test_a_start_that_fails_ends_the_episode_before_it() -> None:
    """The inference of the old episode does not end in time: neither its plan nor its answer may move the robot."""
    loop = Loop(Plain())
    loop.start()
    for _ in range(5):
        loop.step()  # four actions are executed, an inference is under way
    with pytest.raises(EngineError, match="the last inference did not end"):
        loop.runner.start({"tick": np.array([100.0])}, timeout_s=0.05)
    with pytest.raises(ConfigError, match="call start"):
        loop.step()
    loop.finish()
    with pytest.raises(ConfigError, match="call start"):
        loop.step()
    loop.tick = 200
    loop.start()
    assert loop.step()[1] == 200
    stopped(loop)


def test_start_gives_up_on_a_policy_that_hangs() -> None:
    loop = Loop(Plain())
    with pytest.raises(EngineError, match=r"no first chunk within 0\.1 s"):
        loop.runner.start({"tick": loop.frame}, timeout_s=0.1)
    assert loop.policy.entered.acquire(timeout=PATIENCE_S)  # one that had not begun would end at once
    with pytest.raises(EngineError, match=r"the current inference did not end within 0\.1 s"):
        loop.runner.close(timeout_s=0.1)
    stopped(loop)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        ({"actions": np.zeros(3)}, r"got shape \(3,\)"),
        ({"actions": np.zeros((0, 2))}, r"got shape \(0, 2\)"),
        ({"actions": np.full((2, 2), np.nan)}, "got NaN"),
        ({"actions": {"arm": np.zeros((2, 6)), "gripper": np.zeros((2, 1))}}, "got a mapping of arm, gripper"),
        ({"actions": "left"}, "numbers .*got dtype <U4"),
        ({"actions": [["1", "2"]]}, "numbers .*got dtype <U1"),
        ({"actions": np.ones((2, 2), bool)}, "numbers .*got dtype bool"),
        ({"actions": np.ones((2, 2), complex)}, "numbers .*got dtype complex128"),
        ({"actions": np.full((2, 2), None)}, "numbers .*got dtype object"),
        ({"actions": [[1.0, 2.0], [3.0]]}, "got a list"),
        ({"action": np.zeros((2, 2))}, r"got the keys \['action'\]"),
        ([np.zeros((2, 2))], "got a list"),
        (None, "got a NoneType"),
    ],
)
def test_a_result_without_a_valid_chunk_is_refused(answer: Any, got: str) -> None:
    class Odd:
        def infer(self, observation: Any) -> Any:
            return answer

    with AsyncRunner(Odd(), 10.0) as runner, pytest.raises(EngineError, match=f"(actions|policy): expected .*{got}"):
        runner.start({})


def test_closing_from_another_thread_ends_a_start() -> None:
    """An emergency stop closes the runner while its robot waits for the first chunk."""
    policy = Plain()
    runner = AsyncRunner(policy, 50.0)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(runner.start, {"tick": np.zeros(1)}, 10 * PATIENCE_S)
        assert policy.entered.acquire(timeout=PATIENCE_S)
        with pytest.raises(EngineError, match="did not end within"):
            runner.close(0.0)
        policy.gate.release(2)  # the call that warms up ends; the second one must not be waited for
        with pytest.raises(ConfigError, match="it is closed"):
            started.result(PATIENCE_S)


def test_a_closed_runner_says_so() -> None:
    loop = Loop(Plain())
    loop.start()
    stopped(loop)
    loop.runner.close()
    with pytest.raises(ConfigError, match="it is closed"):
        loop.step()
    with pytest.raises(ConfigError, match="it is closed"):
        loop.runner.start({"tick": loop.frame})


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"hz": 0}, "a control rate above 0, got 0"),
        ({"hz": float("nan")}, "got nan"),
        ({"hz": "20"}, "got '20'"),
        ({"hz": True}, "got True"),
        ({"hz": None}, "got None"),
        ({"max_wait_s": -1.0}, "0 or more seconds, got -1.0"),
        ({"max_wait_s": float("nan")}, "got nan"),
        ({"max_wait_s": "1"}, "got '1'"),
        ({"replan_ticks": 0}, "at least 1, got 0"),
        ({"replan_ticks": "3"}, "got '3'"),
        ({"replan_ticks": 2.5}, "got 2.5"),
        ({"margin_ticks": -1}, "at least 0, got -1"),
        ({"margin_ticks": None}, "got None"),
        ({"underrun": "guess"}, "got 'guess'"),
        ({"underrun": {"hold": 3}}, "got {'hold': 3}"),
        ({"real_time_chunking": True}, "supports_prev_chunk = True, got a Plain"),
        ({"policy": 3}, r"`infer\(observation\)`, got a int"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], got: str) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: expected .*{got}"):
        AsyncRunner(**{"policy": Plain(), "hz": 50.0, **options})


@pytest.mark.parametrize("number", [np.float32, np.uint8, int])
def test_numpy_numbers_are_accepted(number: Any) -> None:
    ticks: Any = np.int64(2)
    with AsyncRunner(Plain(), number(50), max_wait_s=number(1), replan_ticks=ticks, margin_ticks=ticks) as runner:
        assert (runner._hz, runner._max_wait_s) == (50.0, 1.0)
        with pytest.raises(ConfigError, match="timeout_s: expected seconds above 0, got None"):
            runner.start({}, timeout_s=None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="timeout_s: expected 0 or more seconds, got '1'"):
            runner.close("1")  # type: ignore[arg-type]


def test_an_underrun_action_of_another_robot_is_refused() -> None:
    loop = Loop(Plain(), underrun=np.zeros(99))
    with pytest.raises(ConfigError, match=r"underrun: expected an action of shape \(2,\), got \(99,\)"):
        loop.start()
    stopped(loop)


def test_a_policy_has_real_time_chunking_only_if_it_declares_it() -> None:
    class Takes(Plain):
        def infer(self, observation: Any, *, prev_chunk: Any = None, inference_delay: Any = None) -> dict[str, Any]:
            return {}

    class Odd(Takes):
        supports_prev_chunk = "yes"

    assert supports_prev_chunk(Guided()) and not supports_prev_chunk(Plain()) and not supports_prev_chunk(Takes())
    with pytest.raises(ConfigError, match="supports_prev_chunk: expected True or False, got 'yes' from a Odd"):
        AsyncRunner(Odd(), 50.0)
    loop = Loop(Guided(), real_time_chunking=False, replan_ticks=1)
    loop.start()
    loop.step()
    loop.step(done=False)
    assert loop.policy.entered.acquire(timeout=PATIENCE_S)
    assert loop.policy.calls[1]["prev_chunk"] is None
    stopped(loop)


def test_over_the_server_the_chunk_and_the_delay_arrive_and_no_tick_is_missed() -> None:
    pytest.importorskip("websockets", reason="needs websockets")
    pytest.importorskip("msgpack", reason="the wire format needs msgpack")
    from vla_accel.client import PolicyClient
    from vla_accel.server import background

    policy = Guided(horizon=40)
    policy.gate.release(1000)
    with background(policy, local()) as server, PolicyClient(server.address) as client:
        with AsyncRunner(client, 100.0) as runner:
            assert runner.real_time_chunking
            runner.start({"tick": np.array([0.0])})
            for tick in range(150):
                action = runner.step({"tick": np.array([float(tick)])})
                assert action[1] == tick
                # Each inference takes one tick, however long that is.
                assert not runner._inference.busy or runner._inference.wait_until(time.monotonic() + PATIENCE_S)
        report = runner.report()
    assert report.underruns == 0 and report.chunks >= 5
    guided = [c for c in policy.calls if c["prev_chunk"] is not None]
    assert len(guided) == len(policy.calls) - 1, "all but the chunk of the start"
    for call in guided:
        assert call["prev_chunk"][0, 1] == call["tick"]
        assert call["inference_delay"] >= 0
