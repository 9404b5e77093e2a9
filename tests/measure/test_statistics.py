"""The share of recorded values outside the statistics, by dimension, in the commands that have observations."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import groot_folders, tiny_smolvla
from tests.support.tiny import statistics, tiny_observation, write_tiny_checkpoint
from vla_accel.cli import main
from vla_accel.errors import ObservationError
from vla_accel.families.bench import bench_card, dummy_processor
from vla_accel.families.family import family_named
from vla_accel.families.loading import load
from vla_accel.measure.recording import save_observations
from vla_accel.measure.statistics import fits
from vla_accel.transforms.normalisation import DEVIATIONS, FAR, Range


def test_outside_and_far_outside_are_counted_by_dimension() -> None:
    low, high = np.array([0.0, -1.0, -np.inf]), np.array([1.0, 3.0, np.inf])
    known = Range(low, high, "limits")
    x = np.array([[0.5, 0.0, 9e9], [1.1, 3.1, 0.0], [-(FAR + 0.1), 3.0 + 4 * (FAR - 0.1), -9e9]])
    assert known.outside(x).tolist() == [[False, False, False], [True, True, False], [True, True, False]]
    assert known.widened(FAR).outside(x).tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    rows = Range(np.array([[0.0], [-5.0]]), np.array([[1.0], [5.0]]), "limits")
    assert rows.outside(np.array([[2.0], [2.0]])).tolist() == [[True], [False]]
    assert rows.outside(np.array([[2.0]])).tolist() == [[True]]


def test_a_constant_that_float32_rounds_is_inside() -> None:
    constant = np.array([100.1])
    known = Range(constant.astype(np.float32).astype(np.float64), constant.astype(np.float32) + 1e-8, "limits")
    assert not known.widened(0.0).outside(constant[None]).any()


def test_unusual_statistics_are_named_by_dimension() -> None:
    low = np.array([0.0, 5.0, 0.0, 1e4, -np.inf])
    high = np.array([1.0, 5.0, 1e-5 + 3e-5, 1e4 + 0.5, np.inf])
    found = Range(low, high, "limits").suspicious()
    assert set(found) == {1, 2, 3} and "no span" in found[1]
    assert Range(low[:1], high[:1], "limits").suspicious() == {}


WRITERS: dict[str, Callable[[Path], object]] = {
    "pi05": write_tiny_checkpoint,
    "pi0": partial(write_tiny_checkpoint, kind="pi0"),
    "smolvla": partial(tiny_smolvla.write_lerobot, libero=True),
    "groot": groot_folders.write_isaac,
    "groot_n16": groot_folders.write_n16,
    "groot_n15": groot_folders.write_n15,
    "groot_n15 of lerobot": groot_folders.write_n15_lerobot,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_the_statistics_give_back_is_inside_them(write: Callable[[Path], object], tmp_path: Path) -> None:
    """The middle of the range lies inside, a state moved by 0.6 and by 11 spans outside and far outside."""
    write(tmp_path)
    processor = load(tmp_path).processor
    example = processor.example()
    middle = processor.prepare(example)
    horizon = getattr(processor, "rows", 3)
    model = np.zeros((horizon, processor.action_dim))
    actions = processor.unnormalize_actions(model, middle)[:2]
    inside = [{**example, "actions": actions}, {**example, "action": actions[0]}]
    state, acted = fits(processor, inside)
    assert (state.name, state.rows, acted.name, acted.rows) == ("state", 2, "actions", 3)
    assert state.range.known and not state.outside.any() and not acted.outside.any()
    (key,) = processor.preset.state
    for spans, far in ((0.6, False), (FAR + 0.6, True)):
        moved = np.array(example[key], float)
        moved[1] += spans * state.range.span[1]
        state, acted = fits(processor, [example, {**example, key: moved}])
        assert acted.rows == 0
        assert state.outside.tolist() == [0.5 if i == 1 else 0.0 for i in range(len(moved))]
        assert state.far.any() == far and (not far or state.far[1] == 0.5)


def test_mean_and_std_are_a_range_of_so_many_deviations(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "pi0")
    state, _ = fits(load(tmp_path).processor)
    expected = statistics()["state"]
    np.testing.assert_allclose(state.range.high, np.add(expected["mean"], DEVIATIONS * np.array(expected["std"])), 1e-4)
    assert f"{DEVIATIONS:g} std" in state.range.meaning


def test_the_robots_own_units_are_not_those_of_the_statistics() -> None:
    """ALOHA's: flipped joints, actions relative to the state, a gripper's opening and its servo's angle."""
    from tests.transforms.test_presets import processor_of
    from vla_accel.transforms.robots import PRESETS

    processor = processor_of(PRESETS["aloha"])
    example = processor.example()
    inputs = processor.prepare(example)
    actions = processor.unnormalize_actions(np.zeros((2, processor.action_dim)), inputs)
    found = processor.before_scaling(inputs, actions)
    np.testing.assert_allclose(processor.actions.normalise(found["actions"]), 0, atol=1e-6)
    np.testing.assert_allclose(processor.state.normalise(found["state"])[0, :6], 0, atol=1e-6)


def test_without_statistics_there_is_no_range() -> None:
    family = family_named("pi05")
    processor = dummy_processor(bench_card(family).published(), 2)
    state, acted = fits(processor, [{**processor.example(), "observation/state": np.full(8, 1e9)}])
    assert not state.range.known and not state.outside.any() and not acted.range.known
    assert state.as_dict()["low"] == [None] * 8 and len(state.lines()) == 1


def test_actions_of_another_width_are_an_error(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    with pytest.raises(ObservationError, match=r"observations\[1\]: actions: expected shape \(k, 7\)"):
        fits(load(tmp_path).processor, [tiny_observation(), {**tiny_observation(), "actions": np.zeros(6)}])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two observations of a tiny checkpoint; dimension 5 of the second is in degrees."""
    write_tiny_checkpoint(tmp_path / "tiny")
    rows: list[dict[str, Any]] = [{**tiny_observation(seed), "actions": np.zeros((2, 7))} for seed in range(2)]
    rows[1]["observation/state"][5] = 90.0
    save_observations(rows, tmp_path / "recorded.npz")
    return tmp_path


def test_doctor_shows_a_checkpoints_statistics(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", str(recorded / "tiny")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "  7: -1.2 to 1.85" in said and "%" not in said
    data = ["--observations", str(recorded / "recorded.npz")]
    assert main([*words, *data]) == 1
    said = capsys.readouterr().out
    assert "  5: 50.00 % outside -1 to 1.75, 50.00 % by more than 10 spans" in said and "actions: 0.00 %" in said
    assert main([*words, *data, "--json", "--count", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["statistics"]["state"]["rows"] == 1
    assert main([*words, *data, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["statistics"]["state"]["far_outside"][5] == 0.5 and not report["passed"]
    assert main(["doctor", *data]) == 1
    assert "observations: expected a checkpoint" in capsys.readouterr().err


def test_parity_shows_how_the_recording_fits(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = recorded / "parity.json"
    words = ["parity", str(recorded / "tiny"), "--config", "eager", "--device", "cpu", "--num-steps", "1"]
    assert main([*words, "--observations", str(recorded / "recorded.npz"), "--output", str(output)]) == 0
    assert "  5: 50.00 % outside -1 to 1.75" in capsys.readouterr().out
    assert json.loads(output.read_text())["statistics"]["state"]["outside"][5] == 0.5
    assert main([*words, "--count", "2", "--output", str(output)]) == 0
    assert "outside" not in capsys.readouterr().out and json.loads(output.read_text())["statistics"] == {}
