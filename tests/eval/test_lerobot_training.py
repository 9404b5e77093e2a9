"""Training with lerobot's trainer: what is recorded, what the trainer reads, when it saves, what is chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.lerobot import compare, record, train
from eval.lerobot.train import CAMERAS, LEAST_DEVIATION, Clock, Demonstrations, Enough
from vla_accel.errors import ConfigError


@pytest.fixture
def data(tmp_path: Path) -> Demonstrations:
    """Two episodes of four and three ticks, whose actions are the ticks of both."""
    for index, ticks in enumerate((range(4), range(4, 7))):
        count = len(ticks)
        arrays = {
            "images": np.stack([np.full((2, 4, 6, 3), (10 * tick, 10 * tick + 1, 0), np.uint8) for tick in ticks]),
            "states": np.tile(np.array(ticks, np.float64)[:, None], 8),
            "actions": np.concatenate((np.array(ticks, np.float64)[:, None], np.zeros((count, 6))), 1),
        }
        np.savez(tmp_path / f"episode_{index:05d}.npz", **arrays)  # type: ignore[arg-type]
    return Demonstrations(tmp_path)


def test_a_chunk_ends_with_its_episode(data: Demonstrations) -> None:
    data.read(SimpleNamespace(observation_delta_indices=None, action_delta_indices=[0, 1, 2]))
    assert (len(data), data.num_episodes, data.meta.episodes["dataset_from_index"]) == (7, 2, [0, 4])
    found = data[2]
    assert found["action"][:, 0].tolist() == [2, 3, 3] and found["action_is_pad"].tolist() == [False, False, True]
    assert found[CAMERAS[0]].shape == (3, 4, 6) and found[CAMERAS[0]][:, 0, 0].tolist() == [20, 21, 0]
    assert found["observation.state"].tolist() == [2.0] * 8


def test_a_history_begins_with_its_episode(data: Demonstrations) -> None:
    data.read(SimpleNamespace(observation_delta_indices=[-1, 0], action_delta_indices=[-1, 0, 1]))
    first, second = data[4], data[5]
    assert first["observation.state"][:, 0].tolist() == [4, 4] and second["observation.state"][:, 0].tolist() == [4, 5]
    assert second[CAMERAS[1]].shape == (2, 3, 4, 6) and second[CAMERAS[1]][:, 0, 0, 0].tolist() == [40, 50]
    assert first["action"][:, 0].tolist() == [4, 4, 5] and first["action_is_pad"].tolist() == [True, False, False]


def test_statistics_are_those_of_the_demonstrations(data: Demonstrations) -> None:
    stats = data.meta.stats
    assert stats["action"]["mean"][0] == 3 and stats["action"]["std"][0] == torch.arange(7.0).std()
    assert (stats["action"]["std"][1:] == LEAST_DEVIATION).all()
    torch.testing.assert_close(stats[CAMERAS[0]]["max"], torch.tensor([60.0, 61.0, 0.0]).view(3, 1, 1) / 255)


def test_a_folder_without_episodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"episodes: expected episode_\*.npz"):
        Demonstrations(tmp_path)


def test_the_clock_saves_at_equal_times_and_ends_the_run_after_the_last_folder() -> None:
    now = [0.0]
    clock = Clock(100, 2, lambda: now[0])
    update = clock.updating(lambda: "updated")
    now[0] = 500.0  # loading does not count
    assert update() == "updated" and not clock.saves() and clock.fall() == 1
    now[0] = 549.0
    assert not clock.saves()
    now[0] = 550.0
    assert clock.saves() and not clock.saves() and clock.fall() == pytest.approx(0.5)
    assert update() == "updated"
    now[0] = 620.0  # a slow update: the rate stays 0, and the folder is saved once
    assert clock.fall() == 0 and clock.saves() and not clock.saves()
    with pytest.raises(Enough):
        update()


def test_the_learning_rate_falls_by_the_clock_in_addition_to_lerobots_schedule() -> None:
    now, optimizer = [0.0], torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    clock = Clock(10, 1, lambda: now[0])
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, update / 4))
    _, schedule = clock.scheduling(lambda config, policy: (optimizer, warm))(None, None)
    update, rates = clock.updating(lambda: None), []
    for now[0] in (0.0, 5.0, 5.0, 5.0, 10.0):
        update()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.5, 0.5, 0.75, 1.0, 0.0])


class Arm:
    """An environment that counts its steps and reaches the goal after `goal` of them."""

    def __init__(self, goal: int) -> None:
        self.goal, self.executed = goal, list[np.ndarray]()

    @property
    def success(self) -> bool:
        return len(self.executed) >= self.goal

    def observation(self) -> dict[str, np.ndarray]:
        image = np.full((2, 2, 3), len(self.executed), np.uint8)
        return {"observation/image": image, "observation/wrist_image": image, "observation/state": np.zeros(8)}

    def step(self, action: np.ndarray, *, look: bool) -> None:
        self.executed.append(action)

    def act(self, env: Arm) -> list[float]:
        return [0.5] * 6 + [1.0]


@pytest.mark.parametrize("goal", [70, 75, 80, 85, 90])
def test_pushes_are_executed_but_not_recorded(goal: int) -> None:
    arm = Arm(goal)
    chosen = record.Arguments(Path(), Path(), noise=0.0, pushes=1.0)
    parts = record.demonstrate(arm, arm, chosen, 0, 220)
    recorded = [int(step["images"][0, 0, 0, 0]) for part in parts for step in part]
    pushed = [tick for tick, action in enumerate(arm.executed) if action[3] == 0]
    assert len(parts) > 2 and {len(part) for part in parts[:-1]} == {record.SHORTEST}
    assert sorted(recorded + pushed) == list(range(len(arm.executed))), "an action is recorded or is part of a push"
    assert max(tick for tick in pushed if tick - 1 not in pushed) < goal, "a push after the goal could undo it"
    assert sum(tick >= goal for tick in recorded) in (record.AFTER - 1, record.AFTER)
    assert all(action[-1] == 1.0 for action in arm.executed), "a push keeps the gripper's command"


def test_noise_is_executed_and_the_experts_action_recorded() -> None:
    arm = Arm(30)
    (steps,) = record.demonstrate(arm, arm, record.Arguments(Path(), Path(), pushes=0.0), 2, 220)
    assert all((step["actions"] == [0.5] * 6 + [1.0]).all() for step in steps)
    executed = np.stack(arm.executed)
    assert executed[:, :3].std() > 0.1 and (executed[:, 3:] == [0.5] * 3 + [1.0]).all()


def test_the_best_folder_is_chosen_and_of_equals_the_latest() -> None:
    def result(won: int, error: str | None = None) -> dict[str, object]:
        return {"episodes": [{"success": index < won, "error": error} for index in range(4)]}

    folders = [Path("checkpoints") / step for step in ("000100", "000200", "000300")]
    assert compare.best(dict(zip(folders, map(result, (2, 3, 3)), strict=True))) == folders[2]
    assert compare.best(dict(zip(folders, map(result, (3, 2, 1)), strict=True))) == folders[0]
    with pytest.raises(ConfigError, match="without errors, got Boom"):
        compare.best({folders[0]: result(2, "Boom")})


class Evaluations:
    """Stands in for `subprocess.run`: notes each command and returns a status; with status 0 it writes a result."""

    def __init__(self, status: int = 0, seeds: Mapping[str, int] | None = None) -> None:
        self.status, self.seeds, self.words = status, seeds or {}, list[list[str]]()

    def __call__(self, words: list[str], **options: object) -> SimpleNamespace:
        self.words.append(words)
        if self.status == 0:
            output = Path(words[words.index("--output") + 1])
            output.parent.mkdir(exist_ok=True)
            output.with_suffix(".episodes.jsonl").touch()
            episodes = [
                {"steps": 1, "task_id": 0, "trial": trial, "success": True, "error": None}
                for trial in range(int(words[words.index("--trials") + 1]))
            ]
            protocol = {"suite": "libero_spatial", "tasks": [0], "steps": [1], "trials": len(episodes), "max_steps": 9}
            content = {
                "schema": "vla_accel.libero.result/1", "episodes": episodes,
                "protocol": {**protocol, "seed": self.seeds.get(output.stem, 7)},
                "policy": {"name": "policy", "sha256": "ab"}, "launches": [{"hardware": {}, "software": {}}],
            }  # fmt: skip
            output.write_text(json.dumps(content))
        return SimpleNamespace(returncode=self.status)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run of six saved folders."""
    for step in range(100, 700, 100):
        folder = tmp_path / "act" / "checkpoints" / f"{step:06d}" / "pretrained_model"
        folder.mkdir(parents=True)
        (folder / "train_config.json").write_text('{"batch_size": 64}')
    return tmp_path / "act"


def test_a_comparison_plays_every_run_again_so_that_the_log_decides_what_is_missing(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = compare.Arguments(trained, Path("selection"), Path("held_out"), trained / "paired.json", trials=3)
    saves = train.Arguments(Path(), Path()).saves
    for _ in range(2):
        monkeypatch.setattr(compare.subprocess, "run", played := Evaluations())
        compare.run(chosen)
        policies = [words[words.index("--policy") + 1] for words in played.words]
        selected = [Path(policy).parent.name for policy in policies[:-3]]
        assert len(selected) == saves and selected[-1] == "000600", "as many as a training saves, the last ones"
        best = str(trained / "checkpoints" / "000600" / "pretrained_model")
        assert policies[-3:] == [f"lerobot:{best}", best, best]
        assert all("--retry-errors" in words for words in played.words)
        report = json.loads((trained / "paired.json").read_text())
        assert [row["pairs"] for row in report["rows"]] == [3, 3] and "600 updates of 64" in report["note"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (1, r"000200\.json: expected a readable evaluation result, got: No such file"),  # a traceback
        (2, r"python -m eval\.libero ended with status 2"),
        (-9, r"python -m eval\.libero ended with status -9"),
    ],
)
def test_a_comparison_ends_with_an_evaluation_that_cannot_play(
    status: int, message: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare.subprocess, "run", Evaluations())
    chosen = compare.Arguments(trained, Path("selection"), Path("held_out"))
    compare.run(chosen)
    monkeypatch.setattr(compare.subprocess, "run", Evaluations(status))
    with pytest.raises(ConfigError, match=message):
        compare.run(chosen)  # results of the first comparison are there


def test_a_comparison_fails_if_its_runs_cannot_be_paired(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.subprocess, "run", Evaluations(seeds={"native": 8}))
    with pytest.raises(ConfigError, match="native: expected seed 7 as in lerobot, got 8"):
        compare.run(compare.Arguments(trained, Path("selection"), Path("held_out")))


def test_a_comparison_does_not_replace_its_own_runs(trained: Path) -> None:
    output = trained / "episodes" / "native.json"
    with pytest.raises(ConfigError, match="output: expected a file outside"):
        compare.run(compare.Arguments(trained, Path("selection"), Path("held_out"), output))


def test_a_folder_with_episodes_is_not_recorded_into(tmp_path: Path) -> None:
    states, output = tmp_path / "states", tmp_path / "episodes"
    (states / "libero_spatial").mkdir(parents=True)
    np.savez(states / "libero_spatial" / "task_00.npz", states=np.zeros((2, 3)))
    output.mkdir()
    (output / "episode_00000_0.npz").touch()
    with pytest.raises(ConfigError, match="output: expected a folder without episodes, got 1 in"):
        record.run(record.Arguments(states, output, episodes=1))
