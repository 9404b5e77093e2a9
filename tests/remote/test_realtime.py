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
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.support.server_support import served
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote import async_runner, inference
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.remote.delay import DelayEstimate

NUMPY_TWO: Any = np.int64(2)


class Plain:
    """Chunk n, from the observation of tick o, has the actions (n, o), (n, o + 1), … The first call, with which a
    runner warms up the policy, is not counted."""

    def __init__(self, horizon: int = 8) -> None:
        self.horizon, self.width, self.resets = horizon, 2, 0
        self.gate, self.entered = threading.Semaphore(0), threading.Semaphore(0)
        self.calls: list[dict[str, Any]] = []
        self.warm = False
        self.error: BaseException | None = None

    def reset(self) -> None:
        self.resets += 1

    def infer(self, observation: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        call = {"tick": float(observation["tick"][0]), "prev_chunk": None, "inference_delay": None, **options}
        if self.warm:
            self.calls.append(call)
        self.warm, number = True, len(self.calls)
        self.entered.release()
        assert self.gate.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        actions = np.zeros((self.horizon, self.width))
        actions[:, 0], actions[:, 1] = number, call["tick"] + np.arange(self.horizon)
        return {"actions": actions}


class Guided(Plain):
    supports_prev_chunk = True


class Ensembled(Plain):
    metadata: ClassVar = {"temporal_ensemble": 0.0}


class Loop:
    """A robot's loop. `step(done=True)` lets the current inference end just before the step."""

    def __init__(self, policy: Plain, **options: Any) -> None:
        self.policy, self.frame, self.tick = policy, np.zeros(1), 0
        self.runner = AsyncRunner(policy, 50.0, **{"max_wait_s": 0.0, "margin_ticks": 0, **options})

    def start(self, tick: int = 0) -> None:
        calls = 1 if self.runner._delay.measured else 2
        self.policy.gate.release(calls)
        self.frame[0] = self.tick = tick
        self.runner.start({"tick": self.frame})
        for _ in range(calls):
            assert self.policy.entered.acquire(timeout=PATIENCE_S)

    def step(self, *, done: bool = False) -> tuple[float, float]:
        """(chunk, tick) that the action belongs to."""
        if done:
            self.finish()
        self.frame[0] = self.tick  # one buffer for all frames, as robots have
        self.tick += 1
        action = self.runner.step({"tick": self.frame})
        return float(action[0]), float(action[1])

    def steps(self, count: int) -> list[tuple[float, float]]:
        return [self.step() for _ in range(count)]

    def finish(self) -> None:
        """Let the current inference end."""
        assert self.policy.entered.acquire(timeout=PATIENCE_S), "no inference is under way"
        self.policy.gate.release()
        assert inference.Inference.wait_until(self.runner._inference, time.monotonic() + PATIENCE_S)

    def expect(self, ticks: int) -> None:
        """Set the delay of all inferences so far."""
        self.runner._delay = DelayEstimate(50.0)
        self.runner._delay.add(0.0, ticks)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Loop]]:
    """Makes loops, and closes them. The clock says that every inference takes 10 ms, half a tick."""
    clock = types.SimpleNamespace(monotonic=time.monotonic, perf_counter=itertools.count(0, 0.01).__next__)
    monkeypatch.setattr(inference, "time", clock)
    before, made = set(threading.enumerate()), []

    class Kept(Loop):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    yield Kept
    for loop in made:
        loop.policy.gate.release(10)
        loop.runner.close(PATIENCE_S)
    eventually(lambda: not set(threading.enumerate()) - before)


def test_every_tick_gets_its_own_action_across_chunks(loops: type[Loop]) -> None:
    loop = loops(Plain(), replan_ticks=3)
    loop.start()
    got = loop.steps(5)  # the second inference begins at tick 3, after three executed actions
    got += [loop.step(done=True)]  # it ends before tick 5: two ticks
    got += [loop.step()]  # 3 actions of its chunk are behind: the next inference begins
    assert got == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    assert loop.policy.entered.acquire(timeout=PATIENCE_S)
    assert [c["tick"] for c in loop.policy.calls] == [0, 3, 6]
    report = loop.runner.report()
    assert (report.ticks, report.chunks, report.underruns, report.stale, report.delay_ticks) == (7, 2, 0, 0, 2)


def test_a_guided_policy_gets_the_rest_of_the_chunk_and_the_delay(
    loops: type[Loop], caplog: pytest.LogCaptureFixture
) -> None:
    loop = loops(Guided(), replan_ticks=3)
    loop.start()
    assert loop.policy.calls[0]["prev_chunk"] is None and loop.policy.calls[0]["inference_delay"] is None
    loop.expect(2)
    loop.steps(5)
    assert loop.step(done=True) == (2, 5)
    # Begun at tick 3: row 0 is the action of tick 3, which is executed while the policy computes.
    call = loop.policy.calls[1]
    np.testing.assert_array_equal(call["prev_chunk"], [[1, t] for t in range(3, 8)])
    assert call["inference_delay"] == 2 and loop.runner.report().late == 0
    loop.expect(1)
    loop.steps(3)  # begins at tick 6
    assert loop.step(done=True) == (3, 9)
    assert loop.runner.report().late == 1 and "took 3 ticks, 1 were announced" in caplog.text


@pytest.mark.parametrize(
    ("options", "delay", "begins"),
    [({"replan_ticks": 7, "margin_ticks": 1}, 3, 4), ({}, 1, 4), ({"replan_ticks": 2}, 1, 2)],
    ids=["4 actions left: 3 ticks and one to spare", "half a chunk by default", "after 2 actions"],
)
def test_when_the_next_inference_begins(loops: type[Loop], options: Any, delay: int, begins: int) -> None:
    loop = loops(Plain(), **options)
    loop.start()
    loop.expect(delay)
    busy = []
    for _ in range(6):
        loop.step()
        busy.append(loop.runner._inference.busy)
    assert busy == [tick >= begins for tick in range(6)]


def test_ensembling_averages_the_predictions_of_a_tick(loops: type[Loop]) -> None:
    """Both chunks say the tick itself; their numbers 1 and 2 count alike at coefficient 0."""
    loop = loops(Plain(), replan_ticks=2, temporal_ensemble=0.0)
    loop.start()
    assert [*loop.steps(3), loop.step(done=True)] == [(1, 0), (1, 1), (1, 2), (1.5, 3)]
    loop.start(100)  # an episode forgets the one before
    assert loop.step() == (3, 100)


def test_a_checkpoints_ensembling_is_the_default_and_predicts_every_tick(loops: type[Loop]) -> None:
    """Chunk 1 begins at tick 0 and chunk 2 at tick 1."""
    loop = loops(Ensembled())
    loop.start()
    assert [*loop.steps(2), loop.step(done=True)] == [(1, 0), (1, 1), (1.5, 2)]
    plain = loops(Ensembled(), replan_ticks=1, temporal_ensemble=False)
    plain.start()
    assert [*plain.steps(2), plain.step(done=True)] == [(1, 0), (1, 1), (2, 2)]
    own = loops(Ensembled(), temporal_ensemble=-99.0)
    own.start()
    assert [*own.steps(2), own.step(done=True)] == [(1, 0), (1, 1), (2, 2)], "the newest one counts"


def test_an_underrun_holds_the_last_action_and_warns_once(loops: type[Loop], caplog: pytest.LogCaptureFixture) -> None:
    loop = loops(Plain(), replan_ticks=4)
    loop.start()
    loop.steps(8)
    with caplog.at_level(logging.WARNING):
        assert loop.steps(2) == [(1, 7), (1, 7)]
    assert loop.runner.report().underruns == 2 and caplog.text.count("UNDERRUN at tick 8") == 1
    assert loop.step(done=True) == (2, 10), "begun at tick 4, so its action 6"
    assert "again at tick 10" in caplog.text
    loop.policy.gate.release(10)
    loop.runner.close(PATIENCE_S)
    assert "2 underruns in 11 ticks" in caplog.text


@pytest.mark.parametrize("choice", [np.array([-1.0, -2.0]), "raise"], ids=["action", "raise"])
def test_an_underrun_may_use_a_chosen_action_or_raise(loops: type[Loop], choice: Any) -> None:
    loop = loops(Plain(), underrun=choice)
    loop.start()
    loop.steps(8)
    if isinstance(choice, str):
        with pytest.raises(EngineError, match="no action for tick 8"):
            loop.step()
    else:
        assert loop.step() == (-1, -2)
    assert loop.runner.report().underruns == 1


def test_a_chunk_that_took_longer_than_it_lasts_is_dropped(loops: type[Loop]) -> None:
    loop = loops(Plain(), replan_ticks=1)
    loop.start()
    loop.steps(9)  # begins at tick 1; its actions end with tick 8
    assert loop.step(done=True) == (1, 7), "held: the new chunk has nothing for tick 9"
    report = loop.runner.report()
    assert (report.stale, report.chunks, report.underruns) == (1, 1, 2)
    assert loop.step(done=True) == (3, 10), "the next inference began at once"


def test_step_waits_for_the_deadline_and_no_longer(loops: type[Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loops(Plain(), max_wait_s=0.3)
    loop.start()
    loop.steps(8)
    loop.runner._longest_step_s = 0.0  # until here it measured this machine
    clock = types.SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    wait_until = loop.runner._inference.wait_until

    def time_out(end: float) -> bool:
        clock.now = end
        return wait_until(0.0)

    with monkeypatch.context() as patch:
        patch.setattr(async_runner, "time", clock)
        patch.setattr(loop.runner._inference, "wait_until", time_out)
        loop.step()
        assert clock.now == pytest.approx(100.3) and loop.runner.report().underruns == 1
        assert loop.runner.report().longest_step_ms == pytest.approx(300)
        patch.setattr(loop.runner._inference, "wait_until", lambda end: (loop.finish(), wait_until(end))[1])
        assert loop.step() == (2, 9)


@pytest.mark.parametrize("error", [ValueError("bad camera"), SystemExit(2)])
def test_an_error_is_raised_only_when_no_action_is_left(
    loops: type[Loop], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loops(Plain(), replan_ticks=4)
    loop.start()
    loop.steps(4)
    loop.policy.error = error
    loop.step()  # tick 4: begins
    assert loop.step(done=True) == (1, 5), "two more actions are there"
    assert "an inference failed at tick 5, 3 actions are left" in caplog.text, "the error is logged at once"
    assert loop.steps(2) == [(1, 6), (1, 7)]
    for _ in range(3):  # the second attempt is under way; holding would hide that the policy fails
        with pytest.raises(type(error)) as caught:
            loop.step()
        assert caught.value is error
    assert loop.runner.report().failures == 1
    assert loop.step(done=True) == (3, 11), "an inference that succeeds ends it"


def test_attempts_after_errors_come_with_longer_and_longer_pauses(loops: type[Loop]) -> None:
    loop, raised = loops(Plain(), replan_ticks=1), 0
    loop.start()
    for _ in range(200):
        loop.policy.error = ConnectionError("gone")
        try:
            loop.step(done=loop.runner._inference.busy)
        except ConnectionError:
            raised += 1
    attempts = [call["tick"] for call in loop.policy.calls[1:]]
    # Each fails one tick after it began; the pauses after that are 1, 2, 4, …, 50 ticks (a second).
    assert list(np.diff(attempts)) == [1 + pause for pause in (1, 2, 4, 8, 16, 32, 50, 50)][: len(attempts) - 1]
    assert raised == 192, "all but the eight actions that were there"
    assert loop.runner.report().failures == len(attempts)


def test_a_chunk_of_another_width_is_refused(loops: type[Loop]) -> None:
    loop = loops(Plain(), replan_ticks=1)
    loop.start()
    loop.policy.width = 7
    loop.steps(2)
    loop.step(done=True)
    with pytest.raises(EngineError, match="expected chunks of 2 numbers per action, as at first, got 7"):
        for _ in range(20):
            loop.step(done=loop.runner._inference.busy)
    with pytest.raises(EngineError, match="expected chunks of 2 numbers"):
        loop.policy.gate.release(2)
        loop.runner.start({"tick": loop.frame})


def test_an_error_of_the_first_chunk_is_raised_by_start(loops: type[Loop]) -> None:
    loop = loops(Plain())
    loop.policy.error = ValueError("bad camera")
    loop.policy.gate.release()
    with pytest.raises(ValueError, match="bad camera"):
        loop.runner.start({"tick": loop.frame})
    with pytest.raises(ConfigError, match="call start"):
        loop.step()
    loop.start()
    assert loop.step()[1] == 0


def test_a_new_start_ends_the_episode_before_it(loops: type[Loop]) -> None:
    """The inference of the old episode still runs: neither its plan nor its answer may move the robot."""
    loop = loops(Plain())
    loop.start()
    loop.steps(5)  # four actions are executed, an inference is under way
    with pytest.raises(EngineError, match="the last inference did not end"):
        loop.runner.start({"tick": loop.frame}, timeout_s=0.05)
    with pytest.raises(ConfigError, match="call start"):
        loop.step()
    # It ends while the new episode begins.
    threading.Timer(0.1, loop.policy.gate.release).start()
    loop.start(100)
    assert loop.step() == (3, 100) and loop.policy.resets == 3


def test_start_and_close_give_up_on_a_policy_that_hangs(loops: type[Loop]) -> None:
    loop = loops(Plain())
    with pytest.raises(EngineError, match=r"no first chunk within 0\.1 s"):
        loop.runner.start({"tick": loop.frame}, timeout_s=0.1)
    assert loop.policy.entered.acquire(timeout=PATIENCE_S)  # one that had not begun would end at once
    with pytest.raises(EngineError, match=r"the current inference did not end within 0\.1 s"):
        loop.runner.close(timeout_s=0.1)
    for call in (loop.step, lambda: loop.runner.start({"tick": loop.frame})):
        with pytest.raises(ConfigError, match="it is closed"):
            call()


def test_closing_from_another_thread_ends_a_start(loops: type[Loop]) -> None:
    """An emergency stop closes the runner while its robot waits for the first chunk."""
    loop = loops(Plain())
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(loop.runner.start, {"tick": np.zeros(1)}, 10 * PATIENCE_S)
        assert loop.policy.entered.acquire(timeout=PATIENCE_S)
        with pytest.raises(EngineError, match="did not end within"):
            loop.runner.close(0.0)
        loop.policy.gate.release(2)  # the call that warms up ends; the second one must not be waited for
        with pytest.raises(ConfigError, match="it is closed"):
            started.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        ({"actions": np.zeros(3)}, r"got shape \(3,\)"),
        ({"actions": np.zeros((0, 2))}, r"got shape \(0, 2\)"),
        ({"actions": np.full((2, 2), np.nan)}, "got NaN"),
        ({"actions": {"arm": np.zeros((2, 6)), "gripper": np.zeros((2, 1))}}, "got a mapping of arm, gripper"),
        ({"actions": [["1", "2"]]}, "numbers .*got dtype <U1"),
        ({"actions": np.ones((2, 2), bool)}, "numbers .*got dtype bool"),
        ({"actions": np.ones((2, 2), complex)}, "numbers .*got dtype complex128"),
        ({"actions": np.full((2, 2), None)}, "numbers .*got dtype object"),
        ({"actions": [[1.0, 2.0], [3.0]]}, "got a list"),
        ({"action": np.zeros((2, 2))}, r"got the keys \['action'\]"),
        (None, "got a NoneType"),
    ],
)
def test_a_result_without_a_valid_chunk_is_refused(answer: Any, got: str) -> None:
    policy = types.SimpleNamespace(infer=lambda observation: answer)
    with AsyncRunner(policy, 10.0) as runner, pytest.raises(EngineError, match=f"(actions|policy): expected .*{got}"):
        runner.start({})


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"hz": 0}, "a control rate above 0, got 0"),
        ({"hz": float("nan")}, "got nan"),
        ({"hz": "20"}, "got '20'"),
        ({"hz": True}, "got True"),
        ({"max_wait_s": -1.0}, "0 or more seconds, got -1.0"),
        ({"max_wait_s": "1"}, "got '1'"),
        ({"replan_ticks": 0}, "at least 1, got 0"),
        ({"replan_ticks": 2.5}, "got 2.5"),
        ({"margin_ticks": None}, "got None"),
        ({"underrun": "guess"}, "got 'guess'"),
        ({"underrun": {"hold": 3}}, "got {'hold': 3}"),
        ({"real_time_chunking": True}, "supports_prev_chunk = True, got a Plain"),
        ({"temporal_ensemble": "0.01"}, "a finite number, got '0.01'"),
        ({"temporal_ensemble": 0.01, "policy": Guided()}, "real_time_chunking=False with it, got both"),
        ({"policy": 3}, r"`infer\(observation\)`, got a int"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], got: str) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: expected .*{got}"):
        AsyncRunner(**{"policy": Plain(), "hz": 50.0, **options})


def test_numpy_numbers_are_accepted_and_an_action_of_another_robot_is_not(loops: type[Loop]) -> None:
    loop = loops(
        Plain(), underrun=np.zeros(99), max_wait_s=np.float32(1), replan_ticks=NUMPY_TWO, margin_ticks=NUMPY_TWO
    )
    assert loop.runner._max_wait_s == 1.0
    with pytest.raises(ConfigError, match="timeout_s: expected seconds above 0, got None"):
        loop.runner.start({}, timeout_s=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s: expected 0 or more seconds, got '1'"):
        loop.runner.close("1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"underrun: expected an action of shape \(2,\), got \(99,\)"):
        loop.start()


def test_a_policy_has_real_time_chunking_only_if_it_declares_it(loops: type[Loop]) -> None:
    class Odd(Plain):
        supports_prev_chunk = "yes"

    with pytest.raises(ConfigError, match="supports_prev_chunk: expected True or False, got 'yes' from a Odd"):
        AsyncRunner(Odd(), 50.0)
    for policy, options in ((Plain(), {}), (Guided(), {"real_time_chunking": False})):
        loop = loops(policy, replan_ticks=1, **options)
        loop.start()
        loop.steps(2)
        loop.step(done=True)
        assert policy.calls[1]["prev_chunk"] is None and not loop.runner.real_time_chunking


def test_over_the_server_the_chunk_and_the_delay_arrive_and_no_tick_is_missed() -> None:
    policy = Guided(horizon=40)
    policy.gate.release(1000)
    with served(policy) as (_, client):
        with AsyncRunner(client, 100.0) as runner:
            assert runner.real_time_chunking
            runner.start({"tick": np.array([0.0])})
            for tick in range(150):
                assert runner.step({"tick": np.array([float(tick)])})[1] == tick
                # Each inference takes one tick, however long that is.
                assert not runner._inference.busy or runner._inference.wait_until(time.monotonic() + PATIENCE_S)
        report = runner.report()
    assert report.underruns == 0 and report.chunks >= 5
    guided = [c for c in policy.calls if c["prev_chunk"] is not None]
    assert len(guided) == len(policy.calls) - 1, "all but the chunk of the start"
    assert all(call["prev_chunk"][0, 1] == call["tick"] and call["inference_delay"] >= 0 for call in guided)
