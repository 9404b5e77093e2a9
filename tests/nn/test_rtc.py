"""Guided real-time chunking: weights, special cases, the paper's formula written out, lerobot's own code."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.reference_rtc import guided_euler, pad_chunk
from vla_accel.config import GuidanceSchedule, RtcConfig, load_config
from vla_accel.errors import ConfigError
from vla_accel.nn.flow import Schedule, euler_times
from vla_accel.nn.rtc import chunk_weights, guidance_weight, prefix_weights, step_gains

SCRIPT = Path(__file__).parents[1] / "references" / "make_lerobot_rtc_reference.py"
B, H, A = 2, 8, 3
SCHEDULES: tuple[GuidanceSchedule, ...] = ("zeros", "ones", "linear", "exp")


def times(steps: int) -> list[float]:
    return [*euler_times(steps, torch.float64).tolist(), 0.0]


def tensors() -> tuple[Tensor, Tensor]:
    """noise and target, float64."""
    generator = torch.Generator().manual_seed(0)
    noise, target = (torch.randn(B, H, A, generator=generator, dtype=torch.float64) for _ in range(2))
    return noise, target


def test_the_weights_fall_from_the_delay_to_the_end() -> None:
    expected = {
        "zeros": [1, 1, 0, 0, 0, 0, 0, 0],
        "ones": [1, 1, 1, 1, 1, 0, 0, 0],
        "linear": [1, 1, 0.75, 0.5, 0.25, 0, 0, 0],
        "exp": [1, 1, *(f * math.expm1(f) / (math.e - 1) for f in (0.75, 0.5, 0.25)), 0, 0, 0],
    }
    for schedule in SCHEDULES:
        torch.testing.assert_close(prefix_weights(2, 5, 8, schedule), torch.tensor(expected[schedule]).float())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_delay_and_end_are_cut_to_what_there_is(schedule: GuidanceSchedule) -> None:
    torch.testing.assert_close(prefix_weights(9, 3, 8, schedule), torch.tensor([1.0] * 3 + [0.0] * 5))
    torch.testing.assert_close(prefix_weights(8, 20, 8, schedule), torch.ones(8))
    torch.testing.assert_close(prefix_weights(0, 0, 8, schedule), torch.zeros(8))
    assert prefix_weights(0, 12, 8, schedule).shape == (8,)
    config = RtcConfig(schedule, execution_horizon=4)
    torch.testing.assert_close(chunk_weights(config, 1, 3, 8), prefix_weights(1, 3, 8, schedule))
    torch.testing.assert_close(chunk_weights(config, 1, 6, 8), prefix_weights(1, 4, 8, schedule))
    torch.testing.assert_close(chunk_weights(RtcConfig(schedule), 1, 6, 8), prefix_weights(1, 6, 8, schedule))


def test_the_guidance_weight_is_the_papers_and_bounded() -> None:
    tau = 1 - 0.3
    paper = (1 - tau) / (tau * ((1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)))
    assert [guidance_weight(t, 5.0) for t in (1.0, 0.3, 0.0)] == [5.0, pytest.approx(paper), 0.0]
    assert guidance_weight(0.3, 1.5) == 1.5


@pytest.mark.slow
def test_by_default_a_step_moves_by_no_more_than_the_error() -> None:
    """The bound of equal steps is their number, to the last bit of a kernel's float32."""
    for steps in range(1, 1001):
        gains = step_gains([1.0] * steps, Schedule.uniform(steps).dts, None)
        assert torch.tensor(gains).tolist() == [float(steps)] * steps
    placed = Schedule((1.0, 0.3, 0.01, 0.0))
    gains = step_gains(placed.times[:-1], placed.dts, None)
    assert gains == pytest.approx([1 / 0.7, guidance_weight(0.3, 1 / 0.29), guidance_weight(0.01, 100.0)])
    assert step_gains(placed.times[:-1], placed.dts, 2.0) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("times", [times(1), times(2), times(3), times(10), [1.0, 0.3, 0.01, 0.0]], ids=len)
def test_the_frozen_prefix_is_reproduced_and_the_rest_follows_the_flow(times: list[float]) -> None:
    noise, target = tensors()
    goal = torch.full_like(noise, 0.4)

    def straight(x: Tensor, step: int) -> Tensor:
        return (x - goal) / times[step]  # the flow of one point: x̂ is the goal wherever x is

    delay = 3
    got = guided_euler(straight, noise, times, target, prefix_weights(delay, delay, H, "zeros"))
    torch.testing.assert_close(got[:, delay:], goal[:, delay:])
    # The last step leaves 1 − t·w(t) of the error.
    t = times[-2]
    left = 1 - t * guidance_weight(t, 1 / t)
    assert 0 <= left < 0.35
    torch.testing.assert_close(got[:, :delay], target[:, :delay] + left * (goal - target)[:, :delay])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "cosine"}, "rtc.schedule: expected .*zeros, .* got 'cosine'"),
        ({"max_guidance_weight": -1.0}, "rtc.max_guidance_weight"),
        ({"max_guidance_weight": math.nan}, "rtc.max_guidance_weight"),
        ({"max_guidance_weight": math.inf}, "rtc.max_guidance_weight"),
        ({"execution_horizon": 0}, "rtc.execution_horizon"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RtcConfig(**changes)
    with pytest.raises(ConfigError, match=message):
        load_config({"rtc": changes})
    with pytest.raises(ConfigError, match="delay and end"):
        prefix_weights(-1, 3, 8, "ones")


@pytest.mark.parity
def test_the_identity_jacobian_is_lerobots_guidance(request: pytest.FixtureRequest) -> None:
    python = request.config.getoption("--lerobot-python", None)
    if not python:
        pytest.skip("NOT RUN: needs --lerobot-python (see CONTRIBUTING)")
    done = subprocess.run([python, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=300)
    cases = json.loads(done.stdout)
    assert len(cases) == 24
    for case in cases:
        mix = torch.tensor(case["mix"])
        noise, previous = torch.tensor(case["noise"]), torch.tensor(case["previous"])
        config = RtcConfig(case["schedule"], case["max_guidance_weight"], case["execution_horizon"])
        _, horizon, dim = noise.shape
        weights = chunk_weights(config, case["delay"], previous.shape[1], horizon)
        got = guided_euler(
            lambda x, step, mix=mix: torch.tanh(x.flatten(1) @ mix + 0.1 * step).view(x.shape) + 0.3 * x,
            noise,
            times(case["steps"]),
            pad_chunk(previous, horizon, dim),
            weights,
            config.max_guidance_weight,
        )
        torch.testing.assert_close(got, torch.tensor(case["actions"]), rtol=1e-4, atol=1e-4)
