"""The commands of docs/lerobot.md as they are typed there, with a toy robot, PushT, and tiny checkpoints; the bundled
checkpoint in LIBERO.

Each is a process of its own, as users start it. Runs where lerobot and the package are installed (CONTRIBUTING).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip(
    "lerobot_policy_vla_accel", reason="NOT RUN: needs the environment of the plugins (see CONTRIBUTING)"
)

import torch
import yaml

from tests.plugins.folders import write_act, write_arm, write_pusht
from tests.plugins.programs import free_port, process, reachable, replaced, run, until
from tests.support.pages import ROOT, commands

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
SHOWN = [command.line for command in commands(ROOT / "docs/lerobot.md")]
INSTALL, LIBERO = "pip install '.[checkpoints]' ", "pip install 'lerobot[libero]' "
BY_TYPE, BY_PATH = "lerobot-eval --policy.type=", "lerobot-eval --policy.path=accelerated"
EXPORT, ATTACHED = "export VLA_ACCEL_ATTACH=", "lerobot-eval --policy.path=path/to/policy"
FOLDER, ROLLOUT = "python -m lerobot_policy_vla_accel ", "lerobot-rollout "
SERVER, CLIENT = "python -m lerobot_policy_vla_accel.policy_server ", "python -m lerobot.async_inference.robot_client "
# The client has no option that finds a robot of another package that is not installed.
CLIENT_WITH_TOY = (
    "import runpy, tests.plugins.toy_arm; "
    "runpy.run_module('lerobot.async_inference.robot_client', run_name='__main__', alter_sys=True)"
)
PUSHT = ["--env.type=pusht", "--env.episode_length=6"]
SMALL = ["--eval.n_episodes=2", "--eval.batch_size=2", "--eval.use_async_envs=false"]


def shown(start: str, *instead: str) -> list[str]:
    return replaced(SHOWN, start, *instead)


def without(words: list[str], *starts: str) -> list[str]:
    return [word for word in words if not word.startswith(starts)]


def outcome(folder: Path) -> dict[str, float]:
    return json.loads((folder / "eval_info.json").read_text())["overall"]


@pytest.fixture(scope="module")
def pusht(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with a checkpoint for PushT and a configuration that names the task, which PushT does not."""
    folder = tmp_path_factory.mktemp("pusht")
    write_pusht(folder / "checkpoint")
    (folder / "task.yaml").write_text("default_prompt: push the T to its place\n")
    return folder


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with a checkpoint for the toy robot and the page's folder of it."""
    folder = tmp_path_factory.mktemp("arm")
    write_arm(folder / "checkpoint")
    words = [w.replace("path/to/checkpoint", "checkpoint") for w in shown(FOLDER)]
    run(words, folder)
    return folder


def test_lerobot_eval_by_type_and_by_path(pusht: Path) -> None:
    by_type = shown(
        BY_TYPE, "--policy.checkpoint=checkpoint", "--policy.config=task.yaml", "--policy.num_steps=2", *PUSHT, *SMALL,
        "--policy.device=cpu", "--output_dir=by_type",
    )  # fmt: skip
    run(without(by_type, "--env.task"), pusht)
    words = [w.replace("path/to/checkpoint", "checkpoint") for w in shown(FOLDER)]
    words[words.index("--num-steps") + 1] = "2"
    run([*words, "--config", "task.yaml"], pusht)
    by_path = shown(BY_PATH, *PUSHT, *SMALL, "--policy.device=cpu", "--output_dir=by_path")
    run(without(by_path, "--env.task"), pusht)
    first, second = outcome(pusht / "by_type"), outcome(pusht / "by_path")
    assert first["n_episodes"] == 2
    assert first["avg_sum_reward"] == second["avg_sum_reward"]


@pytest.fixture(scope="module")
def act(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with two small ACT policies as lerobot saves them, for PushT and for the toy robot."""
    folder = tmp_path_factory.mktemp("act")
    write_act(folder / "policy", {"observation.image": (96, 96)}, 2)
    write_act(folder / "arm", {f"observation.images.{name}": (48, 64) for name in ("front", "wrist")}, 6)
    return folder


def test_lerobot_eval_runs_lerobots_own_folder_on_the_engines(act: Path) -> None:
    found = {}
    (variable,) = [line.removeprefix("export ").partition("=") for line in SHOWN if line.startswith(EXPORT)]
    for value in ("0", variable[2]):
        words = shown(
            ATTACHED, "--policy.path=policy", *PUSHT, *SMALL, "--policy.device=cpu", f"--output_dir=eval{value}"
        )
        said = run(words, act, **{variable[0]: value})
        assert ("ACTPolicy runs on vla_accel" in said) is (value != "0") and "is not accelerated" not in said
        found[value] = outcome(act / f"eval{value}")["avg_sum_reward"]
    assert found["0"] == pytest.approx(found["1"], rel=1e-3)


def test_the_async_server_attaches_lerobots_own_policy(act: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_ACCEL_ATTACH", "1")
    port, log = free_port(), act / "client.jsonl"
    client = shown(
        CLIENT, f"--server_address=127.0.0.1:{port}", "--policy_device=cpu", "--robot.type=toy_arm",
        "--policy_type=act", "--pretrained_name_or_path=arm", f"--robot.log={log}", "--actions_per_chunk=4",
        "--robot.height=48", "--robot.width=64",
    )  # fmt: skip
    client = ["python", "-c", CLIENT_WITH_TOY, *without(client, "--robot.port", "--robot.cameras")[3:]]
    with process(shown(SERVER, f"--port={port}"), act, "server.log") as server:
        until(lambda: reachable(port), server)
        with process(client, act) as robot:
            until(lambda: log.is_file() and len(log.read_text().splitlines()) > 8, robot)
    said = (act / "server.log").read_text()
    assert "ACTPolicy runs on vla_accel" in said and "is not accelerated" not in said


@pytest.mark.parametrize("inference", ["rtc", "sync"])
def test_lerobot_rollout_drives_a_robot(arm: Path, inference: str) -> None:
    log = arm / f"{inference}.jsonl"
    words = shown(
        ROLLOUT, f"--inference.type={inference}", "--duration=3", "--robot.type=toy_arm", f"--robot.log={log}",
        "--robot.discover_packages_path=tests.plugins.toy_arm", "--policy.device=cpu", "--play_sounds=false",
        "--return_to_initial_position=false",
    )  # fmt: skip
    said = run(without(words, "--robot.port", "--robot.cameras"), arm)
    # lerobot tries again after an error of the policy, and says so.
    assert "Rollout finished" in said and "RTC inference error" not in said
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(actions) > 10 and len({tuple(a.values()) for a in actions}) > 5


def test_the_async_server_answers_lerobots_own_client(arm: Path) -> None:
    port = free_port()
    log = arm / "client.jsonl"
    client = shown(
        CLIENT, f"--server_address=127.0.0.1:{port}", "--policy_device=cpu", "--robot.type=toy_arm",
        f"--robot.log={log}", "--actions_per_chunk=4", "--robot.height=48", "--robot.width=64",
    )  # fmt: skip
    client = ["python", "-c", CLIENT_WITH_TOY, *without(client, "--robot.port", "--robot.cameras")[3:]]
    with process(shown(SERVER, f"--port={port}"), arm) as server:
        until(lambda: reachable(port), server)
        with process(client, arm) as robot:
            until(lambda: log.is_file() and len(log.read_text().splitlines()) > 8, robot)
    actions = [json.loads(line) for line in log.read_text().splitlines()[:8]]
    assert len({tuple(a.values()) for a in actions}) > 4


def test_lerobot_eval_in_libero(tmp_path: Path) -> None:
    """The bundled checkpoint, one episode; its start states as lerobot expects to find them."""
    benchmark = pytest.importorskip("libero.libero.benchmark", reason="needs LIBERO")
    suite = benchmark.get_benchmark_dict()["libero_spatial"]()
    starts = tmp_path / "starts" / "libero_spatial"
    starts.mkdir(parents=True)
    torch.save(suite.get_task_init_states(0), starts / suite.tasks[0].init_states_file)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"init_states": str(starts.parent)}))
    words = shown(
        BY_TYPE, "--policy.checkpoint=demo", "--policy.num_steps=3", "--policy.n_action_steps=5", "--policy.device=cpu",
        "--env.task_ids=[0]", "--env.observation_height=256", "--env.observation_width=256", "--eval.n_episodes=1",
        "--eval.batch_size=1", "--eval.use_async_envs=false", "--output_dir=libero",
    )  # fmt: skip
    run(words, tmp_path, LIBERO_CONFIG_PATH=str(tmp_path))
    assert outcome(tmp_path / "libero")["pc_success"] == 100.0


def test_every_command_of_the_page_is_run_here() -> None:
    starts = (INSTALL, LIBERO, EXPORT, ATTACHED, BY_TYPE, BY_PATH, FOLDER, ROLLOUT, SERVER, CLIENT)
    assert [sum(line.startswith(start) for line in SHOWN) for start in starts] == [1] * len(starts) == [1] * len(SHOWN)
