"""The exact flow, the errors of schedules, their search and the gate; then `vla-accel flow` on small checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import groot_folders, tiny_pi0_fast, tiny_smolvla
from tests.support.reports import figures_in
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.cli import main
from vla_accel.config import load_config
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.measure.flow import Errors, Exact, PolicyFlow, Units
from vla_accel.measure.paired import Mean, student
from vla_accel.measure.recording import save_observations
from vla_accel.measure.schedules import FEWEST, TIMES, FlowReport, judge, no_further_from_exact, search
from vla_accel.nn.flow import FlowNetwork, Schedule
from vla_accel.report.flow import summary

Velocity = Callable[[Tensor, Tensor], Tensor]


class KnownFlow:
    """The package's Euler loop over a velocity v(x, t) that is known; actions are the robot's."""

    def __init__(self, velocity: Velocity, count: int = 32, motion_dims: tuple[int, ...] = ()) -> None:
        self.noise = torch.from_numpy(np.random.default_rng(0).standard_normal((count, 3, 2)))
        self.motion_dims = motion_dims
        self._network: Any = SimpleNamespace(velocity=lambda x, t, *rest: velocity(x, t))

    def integrate(self, schedule: Schedule) -> np.ndarray:
        nothing = torch.empty(0)
        times = schedule.evaluations.double()
        return FlowNetwork.integrate(
            self._network, self.noise, times, None, nothing, nothing, schedule=schedule
        ).numpy()

    def robot(self, actions: np.ndarray) -> np.ndarray:
        return actions


def growing(x: Tensor, t: Tensor) -> Tensor:
    """Ends at e^-1 of the noise."""
    return x


WIDTH = 0.03


def bent(x: Tensor, t: Tensor) -> Tensor:
    """The flow to normal actions of mean m and deviation `WIDTH`. Its path, (1 - t) m + √((1 - t)² WIDTH² + t²) z from
    the noise z, is straight until it bends near t = WIDTH."""
    m = torch.linspace(-1, 1, len(x), dtype=x.dtype)[:, None, None]
    return -m + (t - (1 - t) * WIDTH**2) / ((1 - t) ** 2 * WIDTH**2 + t**2) * (x - (1 - t) * m)


def late(x: Tensor, t: Tensor) -> Tensor:
    """Bends near t = 1, where uniform steps are finer than cubic ones."""
    return (1.0 + 0.1 * x) / (1.05 - t)


# -- the exact flow ------------------------------------------------------------------------------------------------


def test_euler_is_of_first_order_and_the_exact_flow_of_second() -> None:
    flow = KnownFlow(growing)
    true = flow.noise.numpy() / np.e

    def error(actions: np.ndarray) -> float:
        return float(np.abs(actions - true).max())

    coarse, fine = (error(flow.integrate(Schedule.uniform(n))) for n in (20, 40))
    assert coarse / fine == pytest.approx(2, rel=0.05)
    exact = Exact.of(flow)
    assert error(exact.half) / error(exact.actions) == pytest.approx(4, rel=0.1)
    assert error(exact.actions) < 0.05 * error(exact.euler)


def test_a_binary_command_flips_and_has_no_share_in_the_error() -> None:
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(20, 4, 4)) * [1.0, 10.0, 1.0, 0.0]
    exact[..., 2] = np.where(exact[..., 2] > 0, 1.0, -1.0) + 0.01 * exact[..., 2]
    units = Units.of(exact)
    assert units.binary.tolist() == [False, False, True, False] and units.continuous.tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert not Units.of(exact, motion_dims=(2,)).binary.any(), "a step of two sizes is no command"
    found = exact + np.array([0.1, 0.0, 0.2, 0.0])
    found[3, :2, 2] *= -1
    errors = units.errors(found, exact)
    assert errors.flips.tolist() == [0, 0, 0, 2] + [0] * 16
    np.testing.assert_allclose(errors.share, 0.1 / units.spread[0] / 2)
    np.testing.assert_allclose(errors.robot[0], [0.1, 0.0, 0.2, 0.0], atol=1e-12)
    with pytest.raises(ObservationError, match="observations: expected ones whose actions differ"):
        Units.of(np.ones((8, 4, 2)))


# -- judging -------------------------------------------------------------------------------------------------------


def rows(report: FlowReport) -> dict[str, Any]:
    return {row.name: row for row in report.rows}


def test_where_the_velocity_bends_near_the_actions_few_searched_steps_beat_ten_uniform_ones() -> None:
    flow = KnownFlow(bent)
    report = judge(flow, Schedule.uniform(10), steps=(4, 3, 1))
    found = rows(report)
    true = np.linspace(-1, 1, 32)[:, None, None] + WIDTH * flow.noise.numpy()
    np.testing.assert_allclose(Exact.of(flow).actions, true, atol=1e-4)
    assert [row.name for row in report.rows[:2]] == ["10 uniform", "10 cubic"] and report.default is found["10 uniform"]
    assert (report.searched_on, report.judged_on) == (16, 16)
    assert found["3 searched"].error.value < found["3 cubic"].error.value < found["3 uniform"].error.value
    assert found["4 searched"].error.value < found["3 searched"].error.value < 0.6 * found["10 uniform"].error.value
    assert found["3 searched"].setting[0] == 1.0 and found["3 searched"].setting[1] < 0.5
    assert not found["1 uniform"].gate.passed and "1 cubic" not in found, "one step is one step"
    assert report.chosen is found["3 searched"] and report.half_error < 0.01


def test_where_it_bends_elsewhere_nothing_with_fewer_steps_passes() -> None:
    report = judge(KnownFlow(late), Schedule.uniform(10), steps=(5, 2))
    found = rows(report)
    assert found["5 cubic"].error.value > found["5 uniform"].error.value > report.default.error.value
    assert report.chosen is report.default
    assert all("its error may exceed" in row.gate.reasons[0] for row in report.rows[1:])


def test_the_configured_schedule_is_judged_too() -> None:
    times = (1.0, 0.2, 0.0)
    report = judge(KnownFlow(bent), Schedule.uniform(4), steps=(2,), configured=Schedule(times))
    assert rows(report)["2 configured"].setting == times
    again = judge(KnownFlow(bent), Schedule.uniform(4), steps=(2,), configured=Schedule.uniform(4))
    assert "4 configured" not in rows(again)


def test_a_checkpoint_with_a_schedule_of_its_own_is_the_measure() -> None:
    own = Schedule((1.0, 0.9, 0.7, 0.3, 0.0))
    report = judge(KnownFlow(bent), own, steps=(2,))
    assert report.default.name == "4 own" and report.default.setting == own.times
    assert rows(report)["4 uniform"].error.value != report.default.error.value


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((3,), "A call takes 3.00 ms instead of 10.00 on CPU."),
        ((10,), "A call takes 10.00 ms, as with the default, on"),
    ],
)
def test_the_summary_says_whether_the_chosen_steps_save_time(steps: tuple[int, ...], expected: str) -> None:
    found = judge(KnownFlow(bent), Schedule.uniform(10), steps=steps).as_dict()
    found |= {"hardware": {"cpu": "CPU"}, "rows": [{**row, "median_ms": row["num_steps"]} for row in found["rows"]]}
    assert expected in summary(found)[0]


def test_a_checkpoint_of_one_step_has_a_report_without_other_schedules() -> None:
    report = judge(KnownFlow(bent), Schedule.uniform(1), steps=(1,))
    assert report.rows == (report.default,)
    assert "Keep the checkpoint's own schedule, 1 uniform" in summary(report.as_dict())[0]


def test_the_searched_times_come_from_one_half_and_the_figures_from_the_other() -> None:
    """The halves' velocities bend at different times, so that a search that saw both would choose others."""
    order = np.random.default_rng(0).permutation(8)

    def halves(x: Tensor, t: Tensor) -> Tensor:
        first = torch.from_numpy(np.isin(np.arange(8), order[:4]))[:, None, None]
        at, size = torch.where(first, 0.3, 0.03), torch.where(first, 1.0, 30.0)
        return size * (1.0 + 0.1 * x.sign()) * torch.sigmoid((at - t) / 0.01)

    flow = KnownFlow(halves, 8)
    exact = Exact.of(flow)
    units = Units.of(exact.actions)
    report = judge(flow, Schedule.uniform(10), steps=(2,))

    def best(part: np.ndarray) -> tuple[float, ...]:
        (found,) = search(lambda s: float(units.errors(flow.integrate(s), exact.actions)[part].share.mean()), (2,))
        return found.times

    assert rows(report)["2 searched"].setting == best(order[:4]) != best(order)
    error = units.errors(flow.integrate(Schedule(best(order[:4]))), exact.actions)
    assert rows(report)["2 searched"].error.value == pytest.approx(error.share[order[4:]].mean())


def test_the_search_finds_the_best_times_of_its_grid() -> None:
    wanted = (TIMES[3], TIMES[10])

    def error(schedule: Schedule) -> float:
        return sum(min(np.log(t / w) ** 2 for t in schedule.times[1:-1]) for w in wanted)

    two, three = search(error, (2, 3))
    assert wanted[0] > two.times[1] > wanted[1], "the best single time lies between"
    assert three.times == (1.0, *wanted, 0.0)
    assert search(error, (1, 10)) == [] and [s.steps for s in search(error, (10, 5))] == [5]


GATES = [
    ("closer everywhere", [-0.1, -0.2, -0.1, -0.2], 0, True),
    ("the same", [0.0, 0.0, 0.0, 0.0], 0, True),
    ("closer on average, not shown", [-0.4, 0.2, -0.3, 0.2], 0, False),
    ("further", [0.1, 0.1, 0.2, 0.1], 0, False),
    ("closer, and one command flips in one chunk", [-0.1, -0.2, -0.1, -0.2], (1, 0, 0, 0), True),
    ("closer, and commands flip in every chunk", [-0.1, -0.2, -0.1, -0.2], (1, 2, 1, 2), False),
    ("not a number", [-0.1, float("nan"), -0.1, -0.2], 0, False),
]


@pytest.mark.parametrize(("name", "more", "flips", "passes"), GATES, ids=[g[0] for g in GATES])
def test_the_gate(name: str, more: list[float], flips: Any, passes: bool) -> None:
    robot, none = np.zeros((4, 2)), np.zeros(4)
    default = Errors(np.full(4, 0.5), robot, none)
    gate = no_further_from_exact(Errors(0.5 + np.array(more), robot, none + flips), default)
    assert gate.passed == passes == (not gate.reasons)


def test_means_have_students_interval() -> None:
    # Student's own example: additional hours of sleep of ten patients.
    sleep = Mean.of([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
    assert (sleep.value, sleep.low, sleep.high) == pytest.approx((1.58, 0.70, 2.46), abs=0.005)
    assert sleep.upper == pytest.approx(1.58 + 1.833 * 0.389, abs=0.005)
    assert sleep.detectable == pytest.approx((1.833 + 0.883) * 0.389, abs=0.005)
    assert [student(0.95, n) for n in (1, 4, 30)] == pytest.approx([6.3138, 2.1318, 1.6973], abs=1e-4)
    with pytest.raises(ConfigError, match="expected at least 2 values"):
        Mean.of([1.0])


# -- the command ---------------------------------------------------------------------------------------------------


def pi05(folder: Path) -> list[dict[str, Any]]:
    write_tiny_checkpoint(folder)
    prompts = ("pick", "pick up the bowl")
    return [tiny_observation(seed, prompts[seed % 2]) for seed in range(FEWEST)]


def smolvla(folder: Path) -> list[dict[str, Any]]:
    tiny_smolvla.write_lerobot(folder, libero=True)
    return [tiny_smolvla.observation(seed, libero=True) for seed in range(FEWEST)]


def groot(folder: Path) -> list[dict[str, Any]]:
    groot_folders.write_isaac(folder)
    return [groot_folders.observation(seed) for seed in range(FEWEST)]


@pytest.mark.slow
@pytest.mark.parametrize("write", [pi05, smolvla, groot])
def test_the_command_writes_a_configuration_that_others_take(
    write: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vla_accel.measure.flow.FINE", 40)
    folder, out, seen, mine = (tmp_path / name for name in (write.__name__, "out", "seen.npz", "mine.yaml"))
    save_observations(write(folder), seen)
    mine.write_text("schedule: [1.0, 0.2, 0.0]\nseed: 5\n")
    words = ["--config", str(mine), "--observations", str(seen), "--device", "cpu", "--steps", "2,1", "--calls", "2"]
    assert main(["flow", str(folder), *words, "--output", str(out)]) == 0
    printed, one_checkpoint = capsys.readouterr().out, "this checkpoint's on this machine"
    assert "median ms" in printed and "% of their spread" in printed and one_checkpoint in printed
    result = json.loads((out / "flow.json").read_text())
    default, *others = result["rows"]
    own = OptimizedPolicy.from_pretrained(folder, device="cpu").num_steps
    assert (default["name"], default["num_steps"], default["passed"]) == (f"{own} uniform", own, True)
    assert [row["num_steps"] for row in others] == [own, 2, 2, 2, 1, 2]
    assert (others[-1]["name"], others[-1]["schedule"]) == ("2 configured", [1.0, 0.2, 0.0])
    assert (result["searched_on"], result["judged_on"]) == (4, 4)
    assert all(row["median_ms"] > 0 and len(row["dimensions"]) == len(result["spread"]) for row in result["rows"])
    assert result["hardware"]["device"] == "cpu" and result["observations"] == "seen.npz" and result["seed"] == 0
    drawn = figures_in((out / "report.html").read_text())
    for figure in (lambda row: row["median_ms"], lambda row: 100 * row["error"]["value"]):
        assert set(map(figure, result["rows"])) <= drawn
    (chosen,) = [row for row in result["rows"] if row["chosen"]]
    assert one_checkpoint in (out / "flow.yaml").read_text()
    config = load_config(out / "flow.yaml")
    listed = list(config.schedule) if isinstance(config.schedule, tuple) else config.schedule
    assert (config.num_steps, listed, config.seed) == (chosen["num_steps"], chosen["schedule"], 5)
    assert OptimizedPolicy.from_pretrained(folder, out / "flow.yaml").num_steps == chosen["num_steps"]


def test_the_flow_of_a_policy_ends_where_the_policy_does(tmp_path: Path) -> None:
    seen = pi05(tmp_path / "tiny")
    policy = OptimizedPolicy.from_pretrained(tmp_path / "tiny", "eager_fp32", device="cpu")
    flow = PolicyFlow(policy, seen, seed=3)
    noise = np.random.default_rng(3).standard_normal((len(seen), *policy.action_shape)).astype(np.float32)
    times = (1.0, 0.3, 0.01, 0.0)
    placed = policy.with_steps(schedule=times)
    got = flow.robot(flow.integrate(Schedule(times)))
    for one, z, actions in zip(seen, noise, got, strict=True):
        np.testing.assert_allclose(actions, placed.infer(one, noise=z)["actions"], atol=1e-5)
    assert np.abs(got - flow.robot(flow.integrate(policy.schedule))).max() > 1e-3


def test_one_clear_error_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny"
    seen = pi05(folder)
    save_observations(seen[:5], tmp_path / "few.npz")
    save_observations([{"front": one["observation/image"]} for one in seen], tmp_path / "other.npz")
    fast = tmp_path / "fast"
    tiny_pi0_fast.write_lerobot(fast)
    cases = [
        (
            (folder, "--observations", tmp_path / "few.npz"),
            "recording .*few.npz: observations: expected at least 8, .*, got 5",
        ),
        ((folder, "--observations", tmp_path / "other.npz"), r"recording .*other.npz: observations\[0\]: .*got front"),
        ((fast,), "flow: expected a model whose steps integrate a flow, got pi0_fast"),
    ]
    for words, message in cases:
        out = tmp_path / "out"
        assert main(["flow", *map(str, words), "--device", "cpu", "--output", str(out)]) == 1
        assert re.match(f"vla-accel flow: {message}", capsys.readouterr().err.splitlines()[-1]), message
        assert not out.exists()
