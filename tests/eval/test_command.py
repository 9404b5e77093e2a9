"""`python -m eval.libero` end to end with a fake policy and simulator: what it writes, how it resumes, its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eval.libero.__main__ as libero
from eval.harness import command, workers
from eval.harness.benchmark import Benchmark, Suite
from eval.harness.policies import PolicySource
from eval.libero.benchmark import LIBERO
from eval.libero.suites import LiberoTask
from tests.support.eval_support import PARTS, FakeEnv, FakePolicy
from tests.support.local_hub import COMMIT, LocalHub, served
from tests.support.tiny import write_tiny_checkpoint
from vla_accel.cli.options import read
from vla_accel.client import PolicyClient
from vla_accel.errors import ServerError, SimulatorError
from vla_accel.server import ServerConfig, background

ROOT = Path(__file__).parents[2]
TASKS = tuple(LiberoTask(i, f"task_{i}", f"do thing {i}", np.zeros((50, 3)), Path("x.bddl")) for i in range(10))
SUITE = Suite("libero_spatial", TASKS, 220)


class Harness:
    """Runs the command line in this process; counts episodes and policy calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.played: list[int] = []
        self.made: list[int] = []
        self.looked = 0
        self.fail: Callable[[int], None] | None = None
        self.succeed_after: int | None = 7
        self._capfd = capfd
        harness = self

        class Env(FakeEnv):
            def __init__(self, task: LiberoTask) -> None:
                super().__init__(harness.succeed_after)
                harness.made.append(task.id)
                print("what simulators print")
                os.write(1, b"what their C libraries print\n")
                self.task = task

            def step(self, action: np.ndarray, *, look: bool) -> bool:
                harness.looked += look
                return super().step(action, look=look)

            def reset_to(self, start_state: np.ndarray, *, seed: Sequence[int]) -> None:
                super().reset_to(start_state, seed=seed)
                harness.played.append(self.task.id)
                if harness.fail is not None:
                    harness.fail(len(harness.played))

        self.benchmark = replace(
            LIBERO, load_suite=lambda name: SUITE, make_environment=lambda task, settings, render: Env(task)
        )
        monkeypatch.setattr(PolicySource, "load", lambda self: FakePolicy())
        monkeypatch.setattr(workers, "identity", lambda source, policy, benchmark: {"kind": source.where})

    def run(self, *words: str) -> tuple[int, dict[str, Any] | None, str]:
        """Returns exit code, the JSON line of stdout, and stderr."""
        self.played, self.made, self.looked = [], [], 0
        code = command.main(self.benchmark, libero.Arguments, list(words))
        out, err = self._capfd.readouterr()
        lines = out.splitlines()
        assert len(lines) <= 1, f"stdout is for one JSON line, got {out!r}"
        return code, json.loads(lines[0]) if lines else None, err


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Harness:
    return Harness(monkeypatch, capfd)


SWEEP = ("--steps", "1,3", "--tasks", "0-1", "--trials", "2")


def keys(path: Path) -> Counter[tuple[int, int, int]]:
    """How often each episode is in a result file."""
    episodes = json.loads(path.read_text())["episodes"]
    return Counter((e["steps"], e["task_id"], e["trial"]) for e in episodes)


SWEEP_KEYS = Counter((n, task, trial) for n in (1, 3) for task in (0, 1) for trial in (0, 1))


def test_a_sweep_writes_result_log_and_picture(harness: Harness, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "run.json"
    code, line, err = harness.run(*SWEEP, "--output", str(output))
    assert code == 0 and line is not None
    assert harness.made == [0, 1], "each environment is built once"
    result = json.loads(output.read_text())
    assert result["schema"] == "vla_accel.libero.result/1"
    assert keys(output) == SWEEP_KEYS
    protocol = result["protocol"]
    assert (protocol["max_steps"], protocol["max_steps_source"]) == (220, "openpi")
    assert (protocol["seed"], protocol["wait_steps"], protocol["replan_steps"]) == (7, 10, 5)
    assert result["launches"][0]["software"]["python"] and result["launches"][0]["hardware"]["cpu"]
    assert result["command"][:5] == ["python", "-m", "eval.libero", "--steps", "1,3"]
    rows = {row["steps"]: row for row in result["summary"]["rows"]}
    assert rows[3]["breakdown"]["schema"] == "vla_accel.breakdown/1"
    assert rows[3]["breakdown"]["components"]["denoise"]["mean_ms"] == pytest.approx(11.0)
    assert rows[3]["breakdown"]["samples"] == 4 * 2  # 7 actions are two chunks
    fit = result["summary"]["denoise_fit"]
    assert (fit["intercept_ms"], fit["slope_ms"]) == pytest.approx((2.0, 3.0))
    assert line["rows"][1]["steps"] == 3 and line["rows"][1]["rate"] == 1.0
    for row in line["rows"]:
        parts = {**PARTS, "denoise": 2.0 + 3.0 * row["steps"]}
        assert row["components_ms"] == pytest.approx({**parts, "total": sum(parts.values())})
        assert row["mean_ms"] == row["components_ms"]["total"]
    assert (line["errors"], line["output"]) == (0, str(output))
    assert sorted(p.name for p in output.parent.iterdir()) == [
        "run.episodes.jsonl",
        "run.json",
        "run.latency.png",
    ]
    assert "what simulators print" in err and "what their C libraries print" in err
    assert "denoise time = 2.00 ms + 3.00 ms x steps" in err and "100% (2/2)" in err


@pytest.mark.slow
def test_quick_is_three_tasks_three_trials_and_a_video(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line, _ = harness.run("--steps", "3", "--quick")
    assert code == 0 and line is not None
    assert (line["tasks"], line["trials"]) == ([0, 1, 2], 3)
    assert harness.played == [0] * 3 + [1] * 3 + [2] * 3
    assert Path(line["output"]).parent == Path("runs/libero")
    assert Path(line["output"]).name.startswith("demo-libero_spatial-quick-")
    (video,) = line["videos"]
    assert Path(video).stat().st_size > 0 and Path(line["figure"]).stat().st_size > 0
    assert "data:video/mp4" in Path(line["report"]).read_text()
    # What is asked for explicitly goes before what --quick stands for.
    _, line, _ = harness.run("--quick", "--tasks", "4", "--trials", "1")
    assert line is not None and (line["tasks"], line["trials"]) == ([4], 1)
    assert line["rows"][0]["steps"] == 10, "without --steps the policy's own count is used"


def test_video_films_the_first_trial_of_each_task(harness: Harness, tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    _, line, _ = harness.run(*SWEEP, "--output", str(tmp_path / "run.json"), "--video", str(folder))
    expected = [f"libero_spatial-task{t}-trial0-steps{n}" for t in (0, 1) for n in (1, 3)]
    assert sorted(p.stem for p in folder.iterdir()) == expected
    assert line is not None and sorted(Path(v).stem for v in line["videos"]) == expected


def test_film_all_films_every_episode_with_what_the_policy_sees(harness: Harness, tmp_path: Path) -> None:
    words, looked = ("--steps", "1", "--tasks", "0", "--trials", "2", "--output", str(tmp_path / "run.json")), []
    for more in ((), ("--film-all", "--overwrite")):
        _, line, _ = harness.run(*words, *more)
        looked.append(harness.looked)
    assert line is not None and len(line["videos"]) == 2
    assert all(Path(v).parent == tmp_path / "run" and Path(v).stat().st_size for v in line["videos"])
    assert looked[0] == looked[1] > 0, "a film must cost no rendering"


@pytest.mark.slow
def test_a_finished_run_is_not_played_again_unless_asked(harness: Harness, tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    words = (*SWEEP, "--output", str(output))
    _, first, _ = harness.run(*words)
    code, second, err = harness.run(*words)
    assert code == 0 and harness.played == []
    assert "8 of 8 episodes are on record" in err
    assert first is not None and second is not None and first["rows"] == second["rows"]
    harness.succeed_after = None
    code, third, _ = harness.run(*words, "--overwrite")
    assert code == 0 and len(harness.played) == 8
    assert third is not None and third["rows"][0]["successes"] == 0
    assert keys(output) == SWEEP_KEYS


def test_an_interrupted_run_continues(harness: Harness, tmp_path: Path) -> None:
    def interrupt(episode: int) -> None:
        if episode == 4:
            raise KeyboardInterrupt

    output = tmp_path / "run.json"
    harness.fail = interrupt
    code, line, err = harness.run(*SWEEP, "--output", str(output))
    assert (code, line) == (130, None) and "interrupted" in err
    assert not output.exists()
    harness.fail = None
    code, line, err = harness.run(*SWEEP, "--output", str(output))
    assert code == 0 and len(harness.played) == 8 - 3
    assert "3 of 8 episodes are on record" in err
    assert keys(output) == SWEEP_KEYS
    assert [e["launch"] for e in json.loads(output.read_text())["episodes"]] == [0] * 3 + [1] * 5


@pytest.mark.slow
def test_crashed_episodes_are_errors_with_exit_code_1(harness: Harness, tmp_path: Path) -> None:
    def crash(episode: int) -> None:
        if episode == 2:
            raise SimulatorError("it exploded")

    output = tmp_path / "run.json"
    harness.fail = crash
    words = (*SWEEP, "--output", str(output))
    code, line, err = harness.run(*words)
    assert code == 1 and line is not None and line["errors"] == 1
    assert "error in task 0, trial 0, 3 steps: SimulatorError: it exploded" in err
    rows = {row["steps"]: row for row in line["rows"]}
    assert (rows[3]["successes"], rows[3]["episodes"], rows[3]["errors"]) == (3, 3, 1)
    assert rows[3]["rate"] == 1.0
    assert harness.made == [0, 0, 1], "a simulator that crashed is built anew"
    harness.fail = None
    assert harness.run(*words)[0] == 1, "an error stays on record"
    assert harness.played == []
    code, line, err = harness.run(*words, "--retry-errors")
    assert code == 0 and len(harness.played) == 1 and line is not None
    assert line["rows"][1]["episodes"] == 4 and keys(output) == SWEEP_KEYS


def test_files_of_another_run_or_program_are_never_overwritten(harness: Harness, tmp_path: Path) -> None:
    output, foreign = tmp_path / "run.json", tmp_path / "precious.json"
    harness.run(*SWEEP, "--output", str(output))
    foreign.write_text("{}")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for words, message in (
        (("--seed", "8", "--output", str(output)), "belongs to another run: protocol.seed was 7, now 8"),
        (("--output", str(foreign)), "precious.json exists, but its episode log"),
    ):
        code, line, err = harness.run(*SWEEP, *words)
        assert (code, line) == (2, None) and harness.played == [] and message in err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


BAD = [
    ("--suite libero_spacial", "suite: expected one of"),
    ("--tasks 10", "tasks: expected indices 0 to 9, got 10"),
    ("--steps 0", "steps: expected at least 1, got 0"),
    ("--trials 0", "trials: expected an integer >= 1, got 0"),
    ("--trials 51", "trials: expected at most 50, one for each start state, got 51"),
    ("--max-steps 0", "max_steps: expected an integer >= 1, got 0"),
    ("--seed -1", "seed: expected an integer >= 0, got -1"),
    ("--workers 0", "workers: expected at least 1, got 0"),
    ("--target-hz 0", "target-hz: expected a number above 0, got 0.0"),
    ("--target-hz nan", "target-hz: expected a number above 0, got nan"),
    ("--replan 0", "replan_steps: expected an integer >= 1, got 0"),
    ("--replan 11", "replan: expected at most the policy's 10 predicted actions, got 11"),
    ("--policy http://host:1", "policy: expected ws://host:port, got 'http://host:1'"),
    ("--policy ws://host:1 --steps 1,3", "steps: a remote policy has its server's"),
    ("--policy ws://host:1 --config x.yaml", "config: a remote policy is configured at"),
    ("--policy ws://host:1 --device cpu", "device: a remote policy runs on its server's device"),
    ("--policy ws://host:1 --api-key-file no/keys", "api_key_file no/keys: expected a readable file"),
    ("--api-key-file keys", "api_key_file: expected --policy ws://host:port with it, got demo"),
    ("--expert --tls-ca cert.pem", "tls_ca: the scripted expert reads"),
    ("--expert --device cpu", "device: the scripted expert"),
    ("--expert --policy folder", "policy: the scripted expert"),
    ("--overwrite --retry-errors", "retry-errors: expected it without --overwrite"),
    ("--expert --steps 3", "steps: the scripted expert has no denoising steps"),
    ("--expert --suite libero_goal", "expert: it plays libero_spatial, libero_object only"),
    ("--output result.txt", "output: expected a file name ending in .json, got 'result.txt'"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_clear_line(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line, err = harness.run(*words.split())
    assert (code, line) == (2, None) and harness.played == []
    (said,) = [text for text in err.splitlines() if not text.startswith("loading policy")]
    assert not words.startswith("--output") or "loading policy" not in err
    assert said.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == [], "bad input leaves nothing behind"


def test_where_results_without_a_name_cannot_go_is_said_before_the_policy_is_loaded(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    code, line, err = harness.run(*SWEEP)
    assert (code, line) == (2, None)
    assert err == "error: output: runs/libero cannot be written: runs: Not a directory\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policy ./no/such/folder", "checkpoint: expected a folder or one of demo"),
        ("--policy dmeo", "checkpoint: expected a folder or one of demo"),
        ("--config native_fp9", "config: expected a file or one of auto, eager"),
    ],
)
def test_an_unknown_name_is_refused_before_anything_is_loaded(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded: list[str] = []
    benchmark: Benchmark = replace(LIBERO, load_suite=lambda name: loaded.append(name) or SUITE)
    assert command.main(benchmark, libero.Arguments, words.split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and len(err.splitlines()) == 1 and not loaded


def test_on_a_cluster_a_folder_may_lie_where_it_is_played() -> None:
    asked = read(libero.Arguments, ["--policy", "only/over/there", "--ray", "auto", "--steps", "1"], "eval.libero")
    benchmark = replace(LIBERO, load_suite=lambda name: SUITE)
    assert command.make_request(benchmark, asked, []).source.where == "only/over/there"


@pytest.mark.slow
def test_a_name_on_the_hub_is_evaluated_like_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "snapshot"
    write_tiny_checkpoint(folder)
    benchmark = replace(
        LIBERO, load_suite=lambda name: SUITE, make_environment=lambda task, settings, render: FakeEnv(3)
    )
    policies = []
    hub = LocalHub({("someone/tiny", COMMIT): folder})
    with served(hub, tmp_path / "cache", monkeypatch):
        for policy, config in (("someone/tiny", []), (str(folder), ["--config", "eager"])):
            output = tmp_path / f"{len(policies)}.json"
            words = ["--policy", policy, "--steps", "1", "--tasks", "0", "--trials", "1", "--device", "cpu", *config]
            code = command.main(benchmark, libero.Arguments, [*words, "--output", str(output)])
            assert code == 0, capfd.readouterr().err
            policies.append(json.loads(output.read_text())["policy"])
    named, local = policies
    assert named["name"] == "tiny" and named["sha256"] == local["sha256"] and len(named["sha256"]) == 64
    assert named["config"] == local["config"], "what auto chooses is what ran, and what makes two runs the same"
    assert named["config"]["vision"]["engine"] == "eager"


def test_a_policy_server_is_evaluated_like_any_policy(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("websockets", reason="needs websockets")

    from eval.harness import policies
    from tests.support.openpi_wire import openpi_pack, serving

    def answer(obs: dict[str, Any]) -> bytes:
        actions = {"actions": np.full((10, 7), 0.1), "policy_timing": {"infer_ms": 12.0}}
        return openpi_pack(actions)

    monkeypatch.setattr(PolicySource, "load", lambda self: PolicyClient(self.where))
    monkeypatch.setattr(workers, "identity", policies.identity)
    output = tmp_path / "run.json"
    words = ("--tasks", "0", "--trials", "2", "--output", str(output))
    hello = openpi_pack({"policy": "far", "num_steps": 5})
    with serving(answer, hello) as address:
        code, line, _ = harness.run("--policy", address, *words)
        assert code == 0 and line is not None
        code, _, err = harness.run("--policy", address, "--steps", "3", *words)
        assert code == 2 and "runs 5, got 3" in err
    (row,) = line["rows"]
    assert (row["steps"], row["successes"]) == (None, 2)
    assert row["mean_ms"] > 0, "without the server's own total, the wall clock counts"
    policy = json.loads(output.read_text())["policy"]
    assert policy["metadata"] == {"policy": "far", "num_steps": 5}


@pytest.mark.slow
def test_a_missing_gl_library_is_one_clear_line(tmp_path: Path) -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    # The library search is made to find nothing, in a process of its own.
    (tmp_path / "sitecustomize.py").write_text("import ctypes.util\nctypes.util.find_library = lambda name: None\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "MUJOCO_GL": "osmesa"}
    words = [sys.executable, "-m", "eval.libero", "--expert", "--quick"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "OpenGL library" in said and "apt-get install" in said


def test_a_remote_policy_gets_the_key_of_its_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with background(FakePolicy(), ServerConfig(port=0, api_key_file=keys)) as server:
        source = PolicySource.parse(server.address, LIBERO, config=None, device="auto", api_key_file=keys)
        with source.load() as policy:
            assert policy.metadata
        with pytest.raises(ServerError, match="api_key"):
            replace(source, api_key_file=None).load()
