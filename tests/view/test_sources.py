"""The control loop, the server, the evaluation and the ROS node show what they do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vla_accel_ros.control import Control, Rules

from eval.harness.policies import PolicyActor, PolicyBySteps
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import run_episode
from eval.libero.benchmark import LIBERO
from tests.plugins.test_ros_control import Clock, Robot
from tests.support import toy_command
from tests.support.eval_support import TASK, FakeEnv, FakePolicy
from tests.support.viewers import ShownView
from tests.support.waiting import PATIENCE_S
from vla_accel.cli.options import read
from vla_accel.cli.serve import Serve, main
from vla_accel.errors import ConfigError
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.server import PolicyServer, Replicas
from vla_accel.view import View
from vla_accel.view.live import LiveView


class Policy:
    """Chunk n has the actions n, n + 1, …; the first call, which warms up, is number -1."""

    metadata: Mapping[str, Any] = {"robot": {"motion_dims": []}}

    def __init__(self) -> None:
        self.number = -1

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        actions = self.number + np.arange(8.0)[:, None]
        self.number += 1
        return {"actions": actions, "policy_timing": {"vision_ms": 2.0}, "server_timing": {"queue_ms": 3.0}}


def test_a_control_loop_shows_chunks_actions_ages_delays_and_counts() -> None:
    with ShownView() as view, AsyncRunner(Policy(), hz=1, replan_ticks=3, max_wait_s=60, view=view) as runner:
        runner.start({"state": np.zeros(2)})
        executed = []
        for tick in range(5):
            executed.append((tick, float(runner.step({"state": np.full(2, tick)})[0])))
            if tick == 3:
                runner._inference.wait_until(1e9)
    curves = view.shown.curves
    assert curves["action/0/executed"] == executed == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 2.0)]
    assert curves["action/0/chunk"] == [(t, float(t)) for t in range(8)] + [(3 + i, 1.0 + i) for i in range(8)]
    assert curves["age/ms"] == [(0, 0.0), (1, 1000.0), (2, 2000.0), (3, 3000.0), (4, 1000.0)]
    assert curves["delay/ticks"] == [(0, 0.0), (3, 1.0)] and curves["count/underruns"][-1] == (4, 0.0)
    assert curves["state/state/1"] == [(0, 0.0), (3, 3.0)], "the observations of the chunks"
    assert curves["latency_ms/vision"] == [(0, 2.0), (3, 2.0)] and curves["latency_ms/server/queue"][0] == (0, 3.0)


def test_a_loop_closes_the_view_that_it_opened_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ShownView()
    monkeypatch.setattr("vla_accel.remote.async_runner.open_view", lambda view: opened)
    for view, closed in ((opened, False), ("rerun", True)):
        AsyncRunner(Policy(), hz=50, view=view).close()
        assert opened.shown.closed is closed


def test_a_loop_that_an_exception_ends_waits_a_second_for_its_view(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Kept(View):
        def close(self, timeout_s: float = 10.0) -> None:
            waits.append(timeout_s)

    monkeypatch.setattr("vla_accel.remote.async_runner.open_view", lambda view: Kept())
    with pytest.raises(KeyboardInterrupt), AsyncRunner(Policy(), hz=50, view="rerun"):
        raise KeyboardInterrupt
    AsyncRunner(Policy(), hz=50, view="rerun").close(timeout_s=60.0)
    assert len(waits) == 2 and 0 <= waits[0] <= 1 < waits[1] <= 60


def test_a_server_shows_each_request_one_chunk_after_the_other() -> None:
    pytest.importorskip("websockets", reason="needs websockets")
    from tests.support.server_support import DIM, HORIZON, EchoPolicy, local
    from vla_accel.client import PolicyClient
    from vla_accel.server import background

    with ShownView() as view:
        with background(EchoPolicy(), local(), view) as server, PolicyClient(server.address) as client:
            states = [np.arange(8.0) + 10 * n for n in range(2)]
            answers = [client.infer({"observation/state": state}) for state in states]
        sent = np.concatenate([answer["actions"] for answer in answers])
    curves = view.shown.curves
    for dim in range(DIM):
        assert curves[f"action/{dim}/chunk"] == list(enumerate(sent[:, dim].tolist()))
    assert curves["state/observation/state/7"] == [(0, 7.0), (HORIZON, 17.0)]
    assert {"latency_ms/server/queue", "latency_ms/server/decode", "latency_ms/server/infer"} <= curves.keys()


class Failing(View):
    on = True

    def inferred(self, *_: Any) -> None:
        raise RuntimeError("no viewer")


@pytest.mark.parametrize(
    ("view", "actions", "error"),
    [(Failing(), np.zeros((2, 3)), "no viewer"), (None, np.array(1.0), "TypeError")],
    ids=["view raises", "actions of no dimension"],
)
def test_what_cannot_be_shown_is_one_warning_and_the_server_answers_on(
    view: View | None, actions: np.ndarray, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("websockets", reason="needs websockets")
    from tests.support.server_support import EchoPolicy, local
    from vla_accel.client import PolicyClient
    from vla_accel.server import background

    class Answers(EchoPolicy):
        def infer(self, observation: Mapping[str, Any], **_: Any) -> dict[str, Any]:
            return {"actions": actions}

    with (
        ShownView() as shown,
        background(Answers(), local(), view or shown) as server,
        PolicyClient(server.address, timeout_s=PATIENCE_S) as client,
    ):
        for _ in range(3):
            assert np.array_equal(client.infer({"observation/state": np.zeros(8)})["actions"], actions)
    assert caplog.text.count("view: ") == 1 and error in caplog.text


def test_an_evaluation_shows_what_the_policy_saw_and_the_arm_did() -> None:
    key, protocol = EpisodeKey(3, 4, 1), Protocol("libero_spatial", tasks=(4,), trials=2, steps=(3,), max_steps=7)
    env, actor = FakeEnv(), PolicyActor(PolicyBySteps(FakePolicy()), LIBERO, protocol)
    with ShownView() as view:
        result = run_episode(env, TASK, actor, key, protocol, view=view)
    curves = view.shown.curves
    assert result.error is None and view.shown.texts == [("prompt", 0, "do it")]
    assert [value for _, value in curves["action/6/executed"]] == [float(action[6]) for action, _ in env.steps]
    assert curves["age/ticks"] == [(tick, float(tick % 5)) for tick in range(7)]
    assert {tick for _, tick, _ in view.shown.images} == {0, 5}
    assert [tick for tick, _ in curves["latency_ms/wall"]] == [0, 5]


def test_the_ros_loop_shows_the_age_of_its_messages() -> None:
    clock = Clock()
    with ShownView() as view:
        robot = Robot(clock)
        Control(Policy(), robot, clock, Rules(hz=10, view=view)).run(lambda: "timeout" if clock.time >= 0.3 else "")
    ticks = range(len(robot.acted))
    assert [tick for tick, _ in view.shown.curves["action/0/executed"]] == [*ticks]
    assert view.shown.curves["age/message_ms"] == [(tick, 25.0) for tick in ticks]


def test_several_processes_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_accel.cli.serve.serve", lambda *_: None)
    with pytest.raises(ConfigError, match="view"):
        main(read(Serve, ["demo", "--view", f"rerun:{tmp_path}/a.rrd", "--devices", "all", "--port", "0"], "serve"), [])
    with pytest.raises(ConfigError, match="view"), ShownView() as view:
        PolicyServer(Replicas(lambda _: Policy(), ("cpu",)), view=view)
    with pytest.raises(ConfigError, match="view"):
        read(Serve, ["demo", "--view", "rerun:a.mp4"], "serve")
    assert toy_command.main(["--expert", "--workers", "2", "--view", f"rerun:{tmp_path}/a.rrd"]) == 2
    assert "view: expected one simulator" in capfd.readouterr().err


def test_a_run_of_several_episodes_shows_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = ShownView()
    monkeypatch.setattr("eval.harness.evaluation.open_view", lambda text: view)
    words = ["--expert", "--tasks", "0", "--trials", "2", "--output", str(tmp_path / "a.json")]
    assert toy_command.main([*words, "--view", f"rerun:{tmp_path}/a.rrd"]) == 0
    assert view.shown.closed and isinstance(view, LiveView)
    titles = [text for path, _, text in view.shown.texts if path == "log"]
    ticks = [tick for tick, _ in view.shown.curves["action/0/executed"]]
    assert len(titles) == 2 and "task 0, trial 1" in titles[1]
    assert ticks == [*range(len(ticks))], "the second episode follows the first"
