"""Checkpoints trained with clean prefixes (`rtc: {trained: true}`): the actions up to the delay are pinned, each action
has its own flow time, and nothing is guided. tests/parity holds π0.5 to lerobot's own code."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.policy.test_guided_policy import (
    EAGER,
    PLACED,
    chunk,
    draw,
    exact_times,
    load,
    observed_by_hand,
    scaling,
    with_steps,
)
from tests.support.tiny import tiny_observation, write_tiny_checkpoints
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import RtcConfig, load_config
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families.pi0.network import Kind

TRAINED = RtcConfig(trained=True, max_delay=3)
PINNED = replace(EAGER, rtc=TRAINED)
NATIVE = replace(PINNED, denoise=EngineSpec("native"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    return write_tiny_checkpoints(tmp_path_factory.mktemp("pinned"))


def by_hand(policy: OptimizedPolicy, kind: Kind, noise: np.ndarray, previous: np.ndarray, delay: int) -> np.ndarray:
    """lerobot's loop (`euler_integrate` with `hard_prefix`) in float64: before each evaluation the prefix is put in,
    and its flow time is zero."""
    model, state, keys, values = observed_by_hand(policy, kind, tiny_observation(3))
    centre, half = scaling(kind, "actions")
    prefix = np.zeros((delay, 8))
    prefix[:, :7] = (previous[:delay] - centre) / half
    x = torch.from_numpy(noise)[None].double()
    for time, following in pairwise(exact_times(policy)):
        x[0, :delay] = torch.from_numpy(prefix)
        times = torch.full((5,), time, dtype=torch.float64)
        times[:delay] = 0.0
        embedding, rows = model.conditioning(times)
        rows = None if rows is None else rows[None]
        x = x - model.velocity(x, embedding[None], rows, state, keys, values) * (time - following)
    x[0, :delay] = torch.from_numpy(prefix)
    return x[0, :, :7].numpy() * half + centre


@pytest.mark.parametrize("config", [PINNED, NATIVE], ids=["eager", "native"])
@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize(("steps", "delay"), [(1, 1), (4, 3), (PLACED, 2)])
def test_the_chunk_is_lerobots(
    folders: dict[Kind, Path], kind: Kind, steps: Any, delay: int, config: PolicyConfig
) -> None:
    policy = load(folders[kind], with_steps(config, steps))
    assert policy.ledger.entries["denoise"].used == config.denoise.engine
    noise, previous = draw(policy, 4, 1)[0], chunk(5, 4)
    got = policy.infer(tiny_observation(3), noise=noise, prev_chunk=previous, inference_delay=delay)["actions"]
    want = by_hand(policy, kind, noise, previous, delay)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-4)
    np.testing.assert_allclose(got[:delay], previous[:delay], rtol=0, atol=1e-6)
    plain = policy.infer(tiny_observation(3), noise=noise)["actions"]
    assert np.abs(got[delay:] - plain[delay:]).max() > 1e-2, "the others see what is pinned"


@pytest.mark.parametrize("config", [PINNED, NATIVE], ids=["eager", "native"])
def test_without_a_previous_chunk_or_a_delay_it_is_the_plain_call(
    folders: dict[Kind, Path], config: PolicyConfig
) -> None:
    pinned, plain = load(folders["pi05"], config), load(folders["pi05"])
    noise = draw(plain, 4, 1)[0]
    want = plain.infer(tiny_observation(3), noise=noise)["actions"]
    np.testing.assert_allclose(pinned.infer(tiny_observation(3), noise=noise)["actions"], want, rtol=0, atol=1e-5)
    again = pinned.infer(tiny_observation(3), noise=noise, prev_chunk=chunk(5, 4), inference_delay=0)["actions"]
    np.testing.assert_allclose(again, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [PINNED, NATIVE], ids=["eager", "native"])
def test_a_batch_pins_each_row_by_its_own_delay(folders: dict[Kind, Path], config: PolicyConfig) -> None:
    policy = load(folders["pi05"], config)
    observations, noise = [tiny_observation(seed) for seed in range(3)], draw(policy, 1, 3)
    chunks, delays = [None, chunk(1, 4), chunk(2, 5)], [None, 1, 3]
    got = policy.infer_batch(observations, noise=noise, prev_chunks=chunks, inference_delays=delays)
    for row, (one, previous, delay) in enumerate(zip(observations, chunks, delays, strict=True)):
        alone = policy.infer(one, noise=noise[row], prev_chunk=previous, inference_delay=delay)["actions"]
        np.testing.assert_allclose(got[row]["actions"], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("left", "delay", "message"),
    [
        (4, 4, "inference_delay: expected at most 3 actions, of 4 that are left and 3 that the checkpoint was"),
        (2, 3, "inference_delay: expected at most 2 actions, of 2 that are left and 3 that the checkpoint was"),
    ],
)
def test_a_delay_that_was_never_trained_is_named(
    folders: dict[Kind, Path], left: int, delay: int, message: str
) -> None:
    policy = load(folders["pi05"], PINNED)
    with pytest.raises(ObservationError, match=message):
        policy.infer(tiny_observation(3), prev_chunk=chunk(5, left), inference_delay=delay)


@pytest.mark.parametrize(
    ("rtc", "message"),
    [
        ({"trained": True, "max_guidance_weight": 5.0}, "rtc.trained: expected no guidance beside it"),
        ({"max_delay": 3}, "rtc.max_delay: expected trained: true with it, got 3 alone"),
        ({"trained": True, "max_delay": 0}, "rtc.max_delay: expected at least 1, got 0"),
    ],
)
def test_what_contradicts_itself_is_named(rtc: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"rtc": rtc})


@pytest.mark.parametrize(("rtc", "most"), [(TRAINED, 3), (RtcConfig(trained=True), 4), (RtcConfig(), None)])
def test_metadata_tell_the_longest_delay(folders: dict[Kind, Path], rtc: RtcConfig, most: int | None) -> None:
    policy = load(folders["pi05"], replace(EAGER, rtc=rtc))
    assert policy.metadata["max_delay"] == most
    if most is not None:
        options = {"prev_chunk": chunk(5, 5), "noise": draw(policy, 1, 1)[0]}
        policy.infer(tiny_observation(3), inference_delay=most, **options)
        with pytest.raises(ObservationError, match=f"inference_delay: expected at most {most} actions"):
            policy.infer(tiny_observation(3), inference_delay=most + 1, **options)
