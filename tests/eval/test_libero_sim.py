"""The harness on the real simulator: the expert wins, a policy acts, an episode repeats itself.

Whole runs take tens of seconds each and are marked slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.harness.policies import PolicyActor, PolicyBySteps, PolicySource
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.runner import Runner, Setup
from eval.libero.benchmark import LIBERO, idle, make_environment
from eval.libero.expert import Expert
from eval.libero.expert_motion import ACTION_METRES, ACTION_RADIANS
from tests.support import xvla_folders
from tests.support.eval_support import FakePolicy, write_checkpoint
from vla_accel.families.xvla.transforms import axis_angles

pytest.importorskip("libero", reason="needs LIBERO")
ROOT = Path(__file__).parents[2]


def run(*words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run the command line in a process of its own; returns its JSON line and stderr."""
    words = (sys.executable, "-m", "eval.libero", *words)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    return json.loads(line), done.stderr


class Witness(FakePolicy):
    """Notes everything it sees, and leaves the gripper closing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def with_steps(self, steps: int) -> Witness:
        return self

    def infer(self, obs: dict[str, Any], *, noise: np.ndarray | None = None) -> dict[str, Any]:
        parts = (obs["observation/image"], obs["observation/wrist_image"], obs["observation/state"])
        self.seen.append(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
        return super().infer(obs, noise=noise)


@pytest.mark.slow
def test_an_episode_does_not_depend_on_those_before_it() -> None:
    protocol = Protocol("libero_spatial", tasks=(0,), trials=2, steps=(3,), max_steps=6, settings=LIBERO.settings)
    setup = Setup(LIBERO, protocol, PolicySource("local", "unused"))

    def seen(*episodes: EpisodeKey) -> list[list[bytes]]:
        witness = Witness()
        runner = Runner(setup, PolicyActor(PolicyBySteps(witness), LIBERO, protocol))
        found = []
        for episode in episodes:
            start = len(witness.seen)
            assert runner.run(episode).error is None
            found.append(witness.seen[start:][-2:])  # the two calls of the episode, without the warm-up's
        runner.close()
        return found

    one, two = EpisodeKey(3, 0, 0), EpisodeKey(3, 0, 1)
    first, other, again = seen(one, two, one)
    assert first == again, "bit for bit, images included"
    assert first != other
    assert seen(two) == [other]


@pytest.mark.slow
def test_a_moved_camera_shows_the_same_world_from_elsewhere() -> None:
    from eval.libero.suites import load_suite

    task = load_suite("libero_spatial").tasks[0]

    def look(camera: float, *trials: int) -> list[dict[str, Any]]:
        env = make_environment(task, {**LIBERO.settings, "camera": camera}, True)
        found = []
        for trial in trials:
            env.reset_to(task.start_states[0], seed=(7, 0, trial))
            place = env.model.camera("agentview").pos.copy()
            found.append({**env.observation(), "place": place, "physics": env.data.qpos.copy()})
        env.close()
        return found

    first, other, again = look(0.05, 0, 1, 0)
    (plain,) = look(0.0, 0)
    for key in ("observation/image", "place"):
        assert np.array_equal(first[key], again[key]), "the same episode has the same camera"
        assert not np.array_equal(first[key], other[key]) and not np.array_equal(first[key], plain[key])
    assert np.linalg.norm(first["place"] - plain["place"]) == pytest.approx(0.05)
    for key in ("observation/wrist_image", "observation/state", "physics"):
        assert np.array_equal(first[key], plain[key]), "nothing else has changed"


class Poser:
    """The expert's motion as absolute poses, by way of X-VLA's six numbers of a rotation."""

    def __init__(self) -> None:
        self.expert, self.rotation = Expert(), np.eye(3)

    def act(self, env: Any) -> np.ndarray:
        step, hand = self.expert.act(env).astype(np.float64), env.controller
        hand.update(force=True)
        if (turn := step[3:6] * ACTION_RADIANS).any():
            self.rotation = matrix(turn) @ hand.ee_ori_mat
        six = self.rotation[:, :2].T.reshape(1, 6)
        return np.concatenate((hand.ee_pos + step[:3] * ACTION_METRES, axis_angles(six)[0], step[6:]))


def matrix(turn: np.ndarray) -> np.ndarray:
    """The rotation (3, 3) of an axis times an angle."""
    angle = float(np.linalg.norm(turn))
    cross = np.cross(np.eye(3), turn / angle)
    return np.eye(3) + np.sin(angle) * cross + (1.0 - np.cos(angle)) * cross @ cross


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object"])
def test_absolute_poses_do_what_their_steps_do(suite: str) -> None:
    from eval.libero.suites import load_suite

    task, settings = load_suite(suite).tasks[0], {**LIBERO.settings, "absolute": True}
    env, poser = make_environment(task, settings, False), Poser()
    starts: list[np.ndarray] = []
    for trial in (0, 1):
        env.reset_to(task.start_states[trial], seed=(7, 0, trial))
        poser.rotation = env.controller.goal_ori.copy()
        starts.append(env.controller.ee_pos.copy())
        for _ in range(5):
            env.step(idle(env, None))
        assert np.abs(env.controller.ee_pos - starts[-1]).max() < 0.01, "the hand stays where it is"
        assert any(env.step(poser.act(env)) for _ in range(280)), f"trial {trial}"
    assert np.abs(starts[1] - starts[0]).max() < 0.05, "the settling steps of a later episode are no poses"
    env.close()


@pytest.mark.slow
def test_an_episode_of_xvla(tmp_path: Path) -> None:
    """Random weights: the whole chunk is executed, and an observation is X-VLA's own."""
    from eval.libero.suites import load_suite

    def libero_cameras(files: dict[str, Any]) -> None:
        for name in ("image", "image2"):
            files["config.json"]["input_features"][f"observation.images.{name}"]["shape"] = [3, 128, 128]
        files["config.json"]["resize_imgs_with_padding"] = [64, 64]

    folder = xvla_folders.write(tmp_path / "xvla", "libero", libero_cameras)
    config = tmp_path / "libero.yaml"
    config.write_text("{preset: xvla_libero, precision: fp32, checkpoint: {max_token_len: 24}}")
    words = ("--policy", str(folder), "--config", str(config), "--device", "cpu", "--tasks", "0", "--trials", "1")
    output = tmp_path / "run.json"
    line, _ = run(*words, "--max-steps", "10", "--replan", "8", "--output", str(output))
    assert line["errors"] == 0 and line["rows"][0]["successes"] == 0
    protocol = json.loads(output.read_text())["protocol"]
    assert (protocol["image_size"], protocol["absolute"]) == (128, True)
    task = load_suite("libero_spatial").tasks[0]
    posed, plain = (
        make_environment(task, {**LIBERO.settings, "image_size": 256, **more}, True)
        for more in ({"absolute": True}, {})
    )
    for env in (posed, plain):
        env.reset_to(task.start_states[0], seed=(7, 0, 0))
    seen, usual = posed.observation(), plain.observation()
    assert np.array_equal(seen["observation/image"], usual["observation/image"])
    assert np.array_equal(seen["observation/wrist_image"], usual["observation/wrist_image"][::-1, ::-1])
    state, rotation = seen["observation/state"], posed.controller.ee_ori_mat
    assert np.array_equal(state[:3], usual["observation/state"][:3]) and not state[9:].any()
    assert np.array_equal(state[3:9].reshape(2, 3).T, rotation[:, :2])
    for env in (posed, plain):
        env.close()


@pytest.mark.slow
def test_the_expert_wins_in_several_processes(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    line, _ = run("--expert", "--tasks", "0-1", "--trials", "2", "--workers", "2", "--output", str(output))
    # The expert wins 498 of 500; these four are among them.
    assert (line["rows"][0]["successes"], line["errors"]) == (4, 0)
    assert json.loads(output.read_text())["policy"]["kind"] == "expert" and line["figure"] is None


@pytest.mark.slow
def test_workers_with_policies_of_their_own_report_latency_and_film(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    words = ("--policy", str(folder), "--steps", "1,2", "--tasks", "0-1", "--trials", "1")
    output, video = tmp_path / "run.json", tmp_path / "videos"
    words = (*words, "--max-steps", "6", "--workers", "2", "--device", "cpu")
    line, err = run(*words, "--output", str(output), "--video", str(video))
    assert "loading policy" in err
    assert [row["steps"] for row in line["rows"]] == [1, 2] and line["errors"] == 0
    result = json.loads(output.read_text())
    assert result["protocol"]["max_steps_source"] == "--max-steps"
    assert result["policy"]["sha256"] and result["policy"]["device"] == "cpu"
    for row in result["summary"]["rows"]:
        breakdown = row["breakdown"]
        assert breakdown["schema"] == "vla_accel.breakdown/1" and breakdown["workers"] == 2
        assert breakdown["samples"] == 2 * 2  # two episodes, asked after 0 and 5 actions
        assert {entry["component"] for entry in breakdown["engines"]} == {"vision", "kv_cache", "denoise"}
        parts = breakdown["components"]
        total = parts.pop("total")["mean_ms"]
        assert set(parts) == {"preprocess", "vision", "kv_cache", "denoise", "transfer", "postprocess"}
        assert sum(part["mean_ms"] for part in parts.values()) == pytest.approx(total, rel=1e-9)
        assert total <= row["wall_mean_ms"]
    assert len(list(video.iterdir())) == 4 and Path(line["figure"]).exists()


@pytest.mark.slow
def test_the_demo_policy_acts_in_the_real_simulator(tmp_path: Path) -> None:
    words = ("--policy", "demo", "--steps", "3", "--tasks", "0", "--trials", "2")
    line, _ = run(*words, "--output", str(tmp_path / "run.json"))
    (row,) = line["rows"]
    assert (row["episodes"], row["errors"]) == (2, 0)
    # A policy that knows nothing loses all; one that wins nine of ten loses both once in 100.
    assert row["successes"] >= 1
