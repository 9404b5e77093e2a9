"""The demonstrations that lerobot's trainer reads: chunks that end with the episode, histories that begin with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.lerobot.train import CAMERAS, LEAST_DEVIATION, Demonstrations
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
