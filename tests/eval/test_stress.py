"""Stress: each disturbance is exact, repeatable and the policy's alone; late answers arrive at their tick."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eval.harness import late, pairs
from eval.harness.policies import Chunking, PolicyActor, PolicyBySteps, PolicySource, check_chunks
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import Chunks, run_episode
from eval.harness.runner import Setup
from eval.harness.sharing import answer, batch_options
from eval.harness.stress import GREY, disturb, parse_stress
from eval.harness.workers import play
from eval.libero.benchmark import LIBERO
from eval.libero.benchmark import idle as stand_still
from tests.support.eval_support import OBSERVATION, TASK, FakeEnv, FakePolicy
from tests.support.toy_benchmark import SEEING
from tests.support.toy_command import main
from vla_accel.errors import ConfigError

CAMERAS = LIBERO.cameras
EPISODE = (7, 4, 1)
SCENE = {
    **OBSERVATION,
    **{name: np.random.default_rng(i).integers(0, 256, (224, 224, 3), np.uint8) for i, name in enumerate(CAMERAS)},
}


def seen(stress: dict[str, float], episode: tuple[int, ...] = EPISODE, call: int = 0) -> list[np.ndarray]:
    """Both images under stress, as float; checks that nothing else changed, and nothing that came in."""
    before = copy.deepcopy(SCENE)
    out = disturb(SCENE, CAMERAS, stress, episode=episode, call=call)
    assert all(np.array_equal(SCENE[name], before[name]) for name in before)
    assert out["observation/state"] is SCENE["observation/state"]
    assert all(out[name].dtype == np.uint8 and out[name].shape == (224, 224, 3) for name in CAMERAS)
    return [out[name].astype(np.float64) for name in CAMERAS]


PLAIN = [SCENE[name].astype(np.float64) for name in CAMERAS]


def test_values_are_read_in_one_order_and_what_changes_nothing_is_left_out() -> None:
    kinds = LIBERO.disturbances
    assert parse_stress(" latency=2, noise=0.1,brightness=1,occlusion=0", kinds) == {"noise": 0.1, "latency": 2}
    assert list(parse_stress("noise=0.1,camera=0.05", kinds)) == list(parse_stress("camera=0.05,noise=0.1", kinds))
    assert {"noise", "brightness", "contrast", "occlusion", "camera", "latency"} == set(kinds)


@pytest.mark.parametrize(
    "text",
    ["nose=0.1", "noise", "noise=x", "noise=nan", "noise=-0.1", "noise=2", "latency=1.5", "noise=0.1,noise=0.2", ""],
)
def test_what_cannot_be_asked_for_is_one_error_that_lists_what_can(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_stress(text, LIBERO.disturbances)
    said = str(error.value)
    assert said.startswith("stress: expected NAME=VALUE") and said.endswith(f"got {text.split(',')[-1]!r}")
    assert all(f"{name} ({kind.low:g} to {kind.high:g}" in said for name, kind in LIBERO.disturbances.items())


def test_brightness_and_contrast_scale_pixels() -> None:
    dim, flat = seen({"brightness": 0.5}), seen({"contrast": 0.25})
    for plain, dimmed, flattened in zip(PLAIN, dim, flat, strict=True):
        np.testing.assert_allclose(dimmed, plain * 0.5, atol=0.5)
        np.testing.assert_allclose(flattened, plain.mean() + 0.25 * (plain - plain.mean()), atol=0.51)


def test_noise_has_its_deviation_and_is_new_in_each_call_and_on_each_camera() -> None:
    grey = {name: np.full((224, 224, 3), GREY, np.uint8) for name in CAMERAS}
    first, second = (disturb(grey, CAMERAS, {"noise": 0.1}, episode=EPISODE, call=c) for c in (0, 1))
    errors = [out[name].astype(np.float64) - GREY for out in (first, second) for name in CAMERAS]
    for error in errors:
        assert error.std() == pytest.approx(25.5, rel=0.02) and abs(error.mean()) < 0.5
    for i in range(4):
        assert all(abs(np.corrcoef(errors[i].ravel(), errors[j].ravel())[0, 1]) < 0.02 for j in range(i))


def test_occlusion_covers_its_share_at_one_place_in_an_episode() -> None:
    covered = [[(image == GREY).all(-1) for image in seen({"occlusion": 0.2}, call=call)] for call in (0, 5)]
    for mask in covered[0]:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert len(rows) * len(columns) == mask.sum() == pytest.approx(0.2 * 224 * 224, rel=0.02), "one full rectangle"
    assert np.array_equal(covered[0], covered[1])
    elsewhere = [(image == GREY).all(-1) for image in seen({"occlusion": 0.2}, episode=(7, 4, 2))]
    assert not np.array_equal(covered[0], elsewhere) and not np.array_equal(*covered[0])


@pytest.mark.parametrize("stress", [{"noise": 0.1}, {"occlusion": 0.3}])
def test_the_same_episode_is_disturbed_in_the_same_way(stress: dict[str, float]) -> None:
    assert np.array_equal(seen(stress), seen(stress))
    for other in ((8, 4, 1), (7, 3, 1), (7, 4, 0)):
        assert not np.array_equal(seen(stress), seen(stress, episode=other))


# -- late answers -------------------------------------------------------------------------------------------------


def rows(call: int, first: int, last: int) -> list[tuple[int, int] | None]:
    return [(call, row) for row in range(first, last)]


@pytest.mark.parametrize(
    ("latency", "horizon", "calls", "done"),
    [
        (0, 10, [0, 5, 10], [*rows(0, 0, 5), *rows(1, 0, 5), *rows(2, 0, 2)]),
        (0, 1, [0, 1, 2], [(0, 0), (1, 0), (2, 0)]),  # as the expert answers
        # The robot waits for its first actions and loses none; a late chunk begins with the row of its arrival.
        (2, 10, [0, 7, 12], [None, None, *rows(0, 0, 7), *rows(1, 2, 7)]),
        # Slower than half a chunk: called early enough if possible, and as soon as no request is pending.
        (
            *(8, 10, [0, 10, 18, 26]),
            [*[None] * 8, *rows(0, 0, 10), *rows(1, 8, 10), *[None] * 6, *rows(2, 8, 10), *[None] * 6],
        ),
    ],
)
def test_each_tick_has_the_action_of_its_row(
    latency: int, horizon: int, calls: list[int], done: list[tuple[int, int] | None]
) -> None:
    chunks, called, found = Chunks(latency, 5), [], []
    for tick in range(len(done)):
        if chunks.due(tick):
            chunks.put([np.array([len(called), row]) for row in range(horizon)], tick)
            called.append(tick)
        left = chunks.left(tick)
        found.append(None if left is None else (int(left[0][0]), int(left[0][1])))
    assert (called, found) == (calls, done)


class Watching(FakePolicy):
    """Keeps what it was shown and told; answers with rows that count on from call to call."""

    supports_prev_chunk = True

    def __init__(self, steps: int = 10) -> None:
        super().__init__(steps)
        self.images: list[Any] = []
        self.told: list[tuple[Any, Any]] = []

    def with_steps(self, steps: int) -> Watching:
        return self

    def infer(self, obs: dict[str, Any], *, noise: Any = None, prev_chunk: Any = None, inference_delay: Any = None
              ) -> dict[str, Any]:  # fmt: skip
        self.images.append(obs.get(CAMERAS[0]))
        self.told.append((prev_chunk, inference_delay))
        rows = np.repeat(100.0 * self.calls + np.arange(10)[:, None], 7, axis=1)
        return {**super().infer(obs, noise=noise), "actions": rows}


def episode(
    stress: dict[str, float], *, chunking: Chunking = "plain", succeed_after: int | None = None, **metadata: Any
) -> tuple[Any, Any, Any]:  # fmt: skip
    protocol = Protocol("libero_spatial", tasks=(4,), trials=2, steps=(3,), max_steps=16, stress=stress)
    policy, env, films = Watching(), FakeEnv(succeed_after), []
    policy.metadata |= metadata
    actor = PolicyActor(PolicyBySteps(policy), LIBERO, protocol, chunking=chunking)
    recorder: Any = SimpleNamespace(every=2, add=films.append)
    result = run_episode(env, TASK, actor, EpisodeKey(3, 4, 1), protocol, recorder=recorder, idle=stand_still)
    assert result.error is None and all(film is OBSERVATION for film in films)
    return result, policy, env


@pytest.mark.parametrize("latency", [0, 2])
def test_a_checkpoints_temporal_ensembling_averages_the_predictions_of_a_tick(latency: int) -> None:
    """Chunk k is of the ticks from 5 k on (the first one from its arrival), and holds 100 k + 0, 1, ..., 9."""
    _, _, env = episode({"latency": latency} if latency else {}, temporal_ensemble=0.0)
    executed = [action[0] for action, _ in env.steps]
    first, second = (np.asarray(chunk) for chunk in (range(10), range(100, 110)))
    assert executed[latency : latency + 5] == [0, 1, 2, 3, 4]
    # The second chunk is of the observation at `latency + 5`, and arrives `latency` ticks later.
    assert executed[5 + 2 * latency : 10 + latency] == [*((first[5:] + second[:5]) / 2)[latency:]]
    _, _, plain = episode({"latency": latency} if latency else {})
    assert [action[0] for action, _ in plain.steps][5 + 2 * latency : 10 + latency] == [*second[latency:5]]


def test_late_actions_reach_the_simulator_at_their_tick_and_the_gripper_holds_meanwhile() -> None:
    result, policy, env = episode({"latency": 2})
    assert (result.env_steps, result.infer_count) == (16, 3)
    assert [action[0] for action, _ in env.steps] == [0, 0, *range(7), *(100 + np.arange(2, 7)), 202, 203]
    assert env.steps[0][0][-1] == -1 and stand_still(env, np.full(7, 0.5)).tolist() == [0] * 6 + [0.5]
    assert policy.told == [(None, None)] * 3


def test_a_guided_policy_gets_what_is_left_and_its_delay_up_to_that_of_its_training() -> None:
    _, policy, _ = episode({"latency": 2}, chunking="rtc")
    assert policy.told[0] == (None, None)
    for call, (left, delay) in enumerate(policy.told[1:]):
        assert delay == 2
        np.testing.assert_array_equal(left[:, 0], 100.0 * call + np.arange(5, 10))
    _, at_once, _ = episode({}, chunking="rtc")
    assert [delay for _, delay in at_once.told] == [None, 0, 0, 0] and len(at_once.told[1][0]) == 5
    _, trained, _ = episode({"latency": 2}, chunking="rtc", max_delay=1)
    assert [delay for _, delay in trained.told] == [None, 1, 1]


@pytest.mark.parametrize("latency", [0, 2])
def test_a_warm_start_gets_what_is_left_without_a_delay(latency: int) -> None:
    _, policy, _ = episode({"latency": latency} if latency else {}, chunking="warm")
    assert policy.told[0] == (None, None) and len(policy.told) > 2
    for call, (left, delay) in enumerate(policy.told[1:]):
        assert delay is None
        np.testing.assert_array_equal(left[:, 0], 100.0 * call + np.arange(5, 10))


def test_only_the_policy_sees_the_stress_and_the_goal_is_checked_as_ever() -> None:
    result, policy, _ = episode({"brightness": 0.5, "noise": 0.2}, succeed_after=7)
    assert result.success and result.env_steps == 7
    assert not OBSERVATION[CAMERAS[0]].any()
    assert all(image.any() for image in policy.images) and not np.array_equal(*policy.images)


class Fingerprints(FakePolicy):
    """Counts every image that it is shown."""

    def __init__(self, steps: int = 10) -> None:
        super().__init__(steps)
        self.shown: Counter[str] = Counter()

    def with_steps(self, steps: int) -> Fingerprints:
        return self

    def infer(self, obs: dict[str, Any], *, noise: Any = None) -> dict[str, Any]:
        if noise is not None:  # no warm-up
            self.shown[hashlib.sha256(obs["eye"].tobytes()).hexdigest()] += 1
        return {**super().infer(obs, noise=noise), "actions": np.full((10, 1), 0.1)}


@pytest.mark.slow
def test_any_number_of_workers_meets_the_same_stress() -> None:
    stress = {"noise": 0.2, "occlusion": 0.1, "latency": 1}
    protocol = Protocol("line", (0, 1), 2, (3,), 8, settings=SEEING.settings, stress=stress)
    setup = Setup(SEEING, protocol, PolicySource("local", "unused"))
    shown = []
    for workers in (1, 2):
        policy = Fingerprints()
        results = list(play(setup, protocol.plan(), PolicyBySteps(policy), workers=workers))
        assert [(r.error, r.infer_count) for r in results] == [(None, 2)] * 4
        shown.append(policy.shown)
    assert shown[0] == shown[1] and len(shown[0]) == 8, "each call of each episode has its own noise"


def test_requests_that_are_answered_together_keep_their_own_chunks() -> None:
    noise = np.zeros((10, 8))
    assert set(batch_options([{"noise": noise}, {"noise": noise}])) == {"noise"}
    both = batch_options([{"noise": noise}, {"noise": noise, "prev_chunk": "left", "inference_delay": 2}])
    assert both["noise"].shape == (2, 10, 8)
    assert both["prev_chunks"] == [None, "left"] and both["inference_delays"] == [None, 2]
    assert batch_options([{}, {}])["noise"] is None


class Batching(FakePolicy):
    """Keeps the previous chunks of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def infer_batch(self, observations: list[Any], **options: Any) -> list[dict[str, Any]]:
        self.batches.append(options.get("prev_chunks"))
        return [{} for _ in observations]


def test_requests_with_and_without_a_previous_chunk_make_separate_batches() -> None:
    policy = Batching()
    answers = answer(
        PolicyBySteps(policy), [(None, {}, {"prev_chunk": one} if one else {}) for one in ("a", "", "b", "")]
    )
    assert answers == [("answer", {})] * 4 and policy.batches == [["a", "b"], None]


def test_a_policy_must_have_actions_left_when_they_arrive(caplog: pytest.LogCaptureFixture) -> None:
    protocol, source = Protocol("line", (0,), 1, (3,), 5), PolicySource("local", "x")
    guided, metadata = replace(source, chunking="rtc"), FakePolicy().metadata
    late = [replace(protocol, stress={"latency": ticks}) for ticks in (9, 10)]
    check_chunks(metadata, source, late[0], supports_prev_chunk=False)
    check_chunks(metadata, guided, protocol, supports_prev_chunk=True)
    with pytest.raises(ConfigError, match=r"latency: expected .* 10 predicted actions less one, got 10"):
        check_chunks(metadata, source, late[1], supports_prev_chunk=False)
    with pytest.raises(ConfigError, match="chunking: rtc: expected a policy with real-time chunking"):
        check_chunks(metadata, guided, protocol, supports_prev_chunk=False)
    warm, all_executed = replace(source, chunking="warm"), replace(protocol, replan_steps=10)
    check_chunks({**metadata, "warm_start": 0.5}, warm, protocol, supports_prev_chunk=True)
    with pytest.raises(ConfigError, match=r"chunking: warm: expected a policy .* warm_start, got one without"):
        check_chunks({**metadata, "warm_start": None}, warm, protocol, supports_prev_chunk=True)
    with pytest.raises(ConfigError, match=r"replan: expected .* 10 predicted actions less one, .*, got 10"):
        check_chunks({**metadata, "warm_start": 0.5}, warm, all_executed, supports_prev_chunk=True)
    ensemble = {**metadata, "temporal_ensemble": 0.01}
    check_chunks(ensemble, source, replace(protocol, replan_steps=1), supports_prev_chunk=False)
    assert not caplog.messages
    check_chunks({**metadata, "warm_start": 0.5}, source, protocol, supports_prev_chunk=True)
    assert "every chunk starts from noise" in caplog.text
    check_chunks(ensemble, source, protocol, supports_prev_chunk=False)
    assert "replan: 5: the policy's temporal ensembling averages fewer predictions" in caplog.text


# -- the record ---------------------------------------------------------------------------------------------------


def test_stress_is_on_record_and_another_one_is_neither_resumed_nor_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PolicySource, "load", lambda self: Fingerprints())
    monkeypatch.setattr("eval.harness.workers.identity", lambda *_: {"kind": "local"})
    benchmark = SEEING
    output = tmp_path / "dark.json"
    words = ["--policy", "demo", "--tasks", "0", "--trials", "1", "--output"]
    assert main([*words, str(output), "--stress", "brightness=0.5,latency=1"], benchmark) == 0
    out, err = capfd.readouterr()
    dark = json.loads(output.read_text())
    assert dark["protocol"]["stress"] == {"brightness": 0.5, "latency": 1} == json.loads(out)["stress"]
    assert "brightness 0.5, latency 1" in err
    assert main([*words, str(output), "--stress", "brightness=0.6,latency=1"], benchmark) == 2
    assert "belongs to another run: protocol.stress.brightness was 0.5, now 0.6" in capfd.readouterr().err
    assert main([*words, str(tmp_path / "plain.json")], benchmark) == 0
    plain = json.loads((tmp_path / "plain.json").read_text())
    assert "stress" not in plain["protocol"], "a run without stress is what it always was"
    with pytest.raises(ConfigError, match=r"dark: expected stress None as in plain, got \{'brightness': 0.5"):
        pairs.compare(plain, {"dark": dark}, "plain")


@pytest.mark.parametrize(("name", "value"), [("stress", "noise=0.1"), ("chunking", "rtc"), ("config", "native")])
def test_the_expert_is_not_disturbed(name: str, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--expert", f"--{name}", value], SEEING) == 2
    assert f"error: {name}: the scripted expert reads the simulator" in capfd.readouterr().err


def test_a_benchmark_without_cameras_offers_no_images_to_disturb(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--stress", "noise=0.1"], replace(SEEING, cameras=())) == 2
    err = capfd.readouterr().err
    assert "of latency (0 to 64, whole:" in err and "brightness" not in err


# -- what speed buys ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GridArguments(late.Arguments):
    """The toy's grid."""

    suite: str = "line"
    policy: str = "none"


class Walker(Watching):
    """Walks to the goal as it sees it, and overshoots if its observation is old."""

    def infer(self, obs: dict[str, Any], *, noise: Any = None, prev_chunk: Any = None, inference_delay: Any = None
              ) -> dict[str, Any]:  # fmt: skip
        super().infer({**obs, CAMERAS[0]: None}, noise=noise, prev_chunk=prev_chunk, inference_delay=inference_delay)
        to_go = float(obs["to_go"][0]) / 0.1
        rows = [np.clip(to_go - np.sign(to_go) * i, -1, 1) if abs(to_go) > i else 0.0 for i in range(10)]
        return {"actions": np.array(rows)[:, None], "policy_timing": {"total_ms": 1.0}}


@pytest.mark.slow
def test_the_grid_of_latencies_is_one_file_and_one_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    walker = Walker()
    monkeypatch.setattr(PolicySource, "load", lambda self: walker)
    monkeypatch.setattr("eval.harness.workers.identity", lambda *_: {"kind": "local"})
    output = tmp_path / "late.json"
    words = ["--policy", "demo", "--tasks", "1", "--ticks", "0,9", "--output", str(output), "--note", "why"]
    words += ["--video", str(tmp_path / "films")]
    assert late.main(SEEING, GridArguments, words) == 0
    grid, line = json.loads(output.read_text()), json.loads(capfd.readouterr().out)
    assert grid["schema"] == "vla_accel.toy.late/1" and grid["note"] == "why" and line["rows"] == grid["rows"]
    points = [(r["latency_ticks"], r["latency_ms"], r["chunking"], r["successes"], r["episodes"]) for r in grid["rows"]]
    # Nine of twelve ticks are spent waiting, and the goal is six steps away.
    assert points == [(0, 0, "plain", 2, 2), (0, 0, "rtc", 2, 2), (9, 900, "plain", 0, 2), (9, 900, "rtc", 0, 2)]
    assert grid["protocol"]["stress"] == {} and str(tmp_path) not in output.read_text()
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert sorted(p.name for p in (tmp_path / "late").glob("*-?.json")) == [
        f"{kind}-{ticks}.json" for kind in ("plain", "rtc") for ticks in (0, 9)
    ]
    films = [path.parent.name for path in (tmp_path / "films").glob("*/*.mp4")]
    assert sorted(films) == ["plain-0", "plain-9", "rtc-0", "rtc-9"], "none overwrites another"
    asked = walker.calls
    assert late.main(SEEING, GridArguments, words) == 0
    assert walker.calls == asked + 4 * 2, "played points are not played again: only warm-ups"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ticks=-1"], "ticks: expected at least 0, got -1"),
        (["--ticks", "65"], "stress: expected NAME=VALUE"),
        (["--stress", "latency=1"], "stress: expected NAME=VALUE, a name once"),
    ],
)
def test_a_grid_that_cannot_be_is_one_error(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert late.main(SEEING, GridArguments, words) == 2
    assert capfd.readouterr().err.startswith(f"error: {message}") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--expert"], ["--chunking", "rtc"], ["--report", "x.html"], ["--shard", "1/2"]])
def test_what_makes_no_sense_of_a_grid_is_no_option_of_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        late.main(SEEING, GridArguments, words)
    assert capsys.readouterr().err.startswith(f"python -m eval.toy.late: unknown option {words[0]}")
    with pytest.raises(SystemExit):
        late.main(SEEING, GridArguments, ["--help"])
    assert f"{words[0]} " not in capsys.readouterr().out


def test_chunks_of_a_policy_trained_for_them_have_their_own_name() -> None:
    trained = {"policy": {"config": {"rtc": {"trained": True}}}}
    assert (late._kind(trained, "rtc"), late._kind(trained, "plain")) == ("trained", "plain")
    assert late._kind({"policy": {"config": None}}, "rtc") == "rtc", "a server does not report it"
