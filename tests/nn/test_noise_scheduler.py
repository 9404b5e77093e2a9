"""Noise schedulers against diffusers' own."""

from __future__ import annotations

import itertools

import pytest
import torch

from vla_accel.errors import ConfigError
from vla_accel.families.diffusion_policy.scheduler import BETAS, PREDICTIONS, NoiseScheduler


@pytest.mark.parametrize("steps", [1, 7, 10, 16, 100])
@pytest.mark.parametrize(("kind", "betas", "prediction"), [*itertools.product(("DDPM", "DDIM"), BETAS, PREDICTIONS)])
@pytest.mark.parametrize("clip", [1.0, None])
def test_the_steps_are_those_of_diffusers(
    kind: str, betas: str, prediction: str, clip: float | None, steps: int
) -> None:
    diffusers = pytest.importorskip("diffusers")
    ours = NoiseScheduler(kind, betas=betas, prediction=prediction, clip=clip)  # type: ignore[arg-type]
    theirs = getattr(diffusers, f"{kind}Scheduler")(
        num_train_timesteps=100, beta_start=ours.beta_start, beta_end=ours.beta_end, beta_schedule=betas,
        clip_sample=clip is not None, clip_sample_range=clip or 1.0, prediction_type=prediction,
    )  # fmt: skip
    theirs.set_timesteps(steps)
    x = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    assert [step.time for step in ours.steps(steps)] == theirs.timesteps.tolist()
    for step in ours.steps(steps):
        e = torch.randn(x.shape, generator=torch.Generator().manual_seed(int(step.time)))
        torch.manual_seed(int(step.time))
        z = torch.randn(x.shape)
        torch.manual_seed(int(step.time))
        # The output: an estimate of the noise that leaves the clean chunk near the bound, or that chunk.
        output = 0.7 * x + 0.3 * e
        want = theirs.step(output, step.time, x).prev_sample
        got = step(x, output, ours.clip, z if step.noise else None)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
        x = want.clamp(-3, 3)


def test_noise_is_drawn_at_each_step_but_the_last_of_ddpm() -> None:
    steps = NoiseScheduler("DDPM").steps(4)
    assert [bool(step.noise) for step in steps] == [True, True, True, False]
    assert not any(step.noise for step in NoiseScheduler("DDIM").steps(4))
    assert (NoiseScheduler("DDPM").draws(4), NoiseScheduler("DDIM").draws(4)) == (4, 1)


def test_impossible_schedulers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_steps: expected 1 to 100, the steps of the training, got 101"):
        NoiseScheduler().steps(101)
    for name, value in (("kind", "PNDM"), ("betas", "sigmoid"), ("prediction", "v_prediction")):
        with pytest.raises(ConfigError, match=f"scheduler.{name}"):
            NoiseScheduler(**{name: value})  # type: ignore[arg-type]
