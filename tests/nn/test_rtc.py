"""Guided real-time chunking: weights, special cases, the paper's formula written out, lerobot's own code."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.reference_rtc import Jacobian, guided_euler, pad_chunk
from vla_accel.config import PolicyConfig, RtcConfig, Schedule, load_config
from vla_accel.errors import ConfigError
from vla_accel.nn.flow import euler_times
from vla_accel.nn.rtc import chunk_weights, guidance_weights, prefix_weights

SCRIPT = Path(__file__).parents[1] / "references" / "make_lerobot_rtc_reference.py"
B, H, A = 2, 8, 3
SCHEDULES: tuple[Schedule, ...] = ("zeros", "ones", "linear", "exp")


def times(steps: int) -> list[float]:
    return euler_times(steps, torch.float64).tolist()


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """noise, target and a mixing matrix of the velocity, float64."""
    generator = torch.Generator().manual_seed(seed)
    noise, target = (torch.randn(B, H, A, generator=generator, dtype=torch.float64) for _ in range(2))
    return noise, target, torch.randn(H * A, H * A, generator=generator, dtype=torch.float64) / math.sqrt(H * A)


def curved(mix: Tensor):
    """A velocity that is not linear in x, differs from step to step, and mixes actions and dimensions."""

    def velocity(x: Tensor, step: int) -> Tensor:
        return torch.tanh(x.flatten(1) @ mix + 0.1 * step).view(x.shape) + 0.3 * x

    return velocity


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
def test_delay_and_end_are_cut_to_what_there_is(schedule: Schedule) -> None:
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
    assert guidance_weights([1.0, 0.3, 0.0], 5.0) == [5.0, pytest.approx(paper), 0.0]
    assert guidance_weights([0.3], 1.5) == [1.5]


@pytest.mark.parametrize("jacobian", ["identity", "exact"])
def test_without_weights_it_is_plain_euler_bit_for_bit(jacobian: Jacobian) -> None:
    noise, target, mix = tensors()
    velocity, x = curved(mix), noise
    for step in range(5):
        x = x + (-1.0 / 5) * velocity(x, step)
    for weights, bound in ((torch.zeros(H), None), (torch.ones(H), 0.0)):
        got = guided_euler(velocity, noise, times(5), target, weights, bound, jacobian)
        assert torch.equal(got, x)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_the_frozen_prefix_is_reproduced_and_the_rest_follows_the_flow(steps: int) -> None:
    noise, target, _ = tensors()
    goal = torch.full_like(noise, 0.4)

    def straight(x: Tensor, step: int) -> Tensor:
        return (x - goal) / times(steps)[step]  # the flow of one point: x̂ is the goal wherever x is

    delay = 3
    got = guided_euler(straight, noise, times(steps), target, prefix_weights(delay, delay, H, "zeros"))
    torch.testing.assert_close(got[:, delay:], goal[:, delay:])
    # The last step leaves 1 − t·w(t) of the error, t = 1 / steps.
    t = 1 / steps
    left = 1 - t * guidance_weights([t], steps)[0]
    assert 0 <= left < 0.35
    torch.testing.assert_close(got[:, :delay], target[:, :delay] + left * (goal - target)[:, :delay])


def by_the_paper(velocity, noise: Tensor, steps: int, target: Tensor, weights: Tensor, bound: float) -> Tensor:
    """Equations 2 to 4, in the paper's time (0 noise, 1 actions), with the whole Jacobian written out."""
    a = noise.clone()
    for k in range(steps):
        tau = k / steps

        def clean(flat: Tensor, k: int = k, tau: float = tau) -> Tensor:
            a = flat.view(1, H, A)
            return (a + (1 - tau) * -velocity(a, k)).flatten()

        scale = bound
        if tau > 0:
            r_squared = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
            scale = min(bound, (1 - tau) / (tau * r_squared))
        rows = []
        for row in range(B):
            jacobian = torch.func.jacrev(clean)(a[row].flatten())
            error = (target[row].flatten() - clean(a[row].flatten())) * weights.repeat_interleave(A).double()
            rows.append((error @ jacobian).view(H, A))
        a = a + (-velocity(a, k) + scale * torch.stack(rows)) / steps
    return a


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_exact_jacobian_is_the_papers_guidance(schedule: Schedule) -> None:
    noise, target, mix = tensors(1)
    weights = prefix_weights(2, 6, H, schedule)
    for steps, bound in ((4, 4.0), (10, 5.0)):
        expected = by_the_paper(curved(mix), noise, steps, target, weights, bound)
        got = guided_euler(curved(mix), noise, times(steps), target, weights, bound, "exact")
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
        identity = guided_euler(curved(mix), noise, times(steps), target, weights, bound)
        assert (identity - expected).abs().max() > 1e-2, "the two Jacobians must be told apart"


def test_guidance_pulls_towards_the_previous_chunk() -> None:
    noise, target, mix = tensors(2)
    plain = guided_euler(curved(mix), noise, times(10), target, torch.zeros(H))
    for jacobian in ("identity", "exact"):
        got = guided_euler(curved(mix), noise, times(10), target, prefix_weights(4, 4, H, "ones"), None, jacobian)
        before, after = ((c - target)[:, :4].abs().mean() for c in (plain, got))
        assert after < 0.3 * before


def test_weights_may_differ_from_row_to_row() -> None:
    noise, target, mix = tensors(3)
    rows = torch.stack((prefix_weights(1, 4, H, "linear"), prefix_weights(3, 7, H, "exp")))
    together = guided_euler(curved(mix), noise, times(3), target, rows)
    for row in range(B):
        pick = slice(row, row + 1)
        alone = guided_euler(curved(mix), noise[pick], times(3), target[pick], rows[row])
        torch.testing.assert_close(together[pick], alone)


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


def test_a_configuration_names_them() -> None:
    assert load_config({"rtc": {"schedule": "exp", "max_guidance_weight": 5}}).rtc == RtcConfig("exp", 5.0)
    assert PolicyConfig().rtc == RtcConfig("linear", None, None)


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
