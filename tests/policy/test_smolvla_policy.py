"""SmolVLA behind `OptimizedPolicy` on the CPU: batches, real-time chunking, measurements, and the server's wire."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.reference_rtc import guided_euler
from tests.support.tiny import draw
from tests.support.tiny_smolvla import observation, write_lerobot
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config
from vla_accel.errors import DependencyError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.smolvla.family import SMOLVLA
from vla_accel.families.smolvla.network import SmolVla
from vla_accel.nn.rtc import chunk_weights

FP32 = load_config("eager_fp32")
PROMPTS = ("pick up the bowl", "place it on the plate", "pick it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smolvla")
    write_lerobot(made, libero=True)
    return made


@pytest.fixture(scope="module")
def policy(folder: Path) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(folder, FP32, num_steps=3)


def test_a_batch_is_its_rows(policy: OptimizedPolicy) -> None:
    given = [observation(i, libero=True, prompt=p) for i, p in enumerate(PROMPTS)]
    noise = draw(policy, 5, 3)
    together = policy.infer_batch(given, noise=noise)
    for one, row, answer in zip(given, noise, together, strict=True):
        alone = policy.infer(one, noise=row)
        np.testing.assert_allclose(answer["actions"], alone["actions"], rtol=0, atol=1e-4)
    assert {e["used"] for e in together[0]["engines"]} == {"eager"}
    timing = together[0]["policy_timing"]
    assert {"vision_ms", "kv_cache_ms", "denoise_ms"} <= timing.keys()
    without = {k: v for k, v in given[0].items() if k != "observation/wrist_image"}
    with pytest.raises(ObservationError, match="missing observation/wrist_image"):
        policy.infer_batch([without, given[1]])


def test_a_previous_chunk_guides(policy: OptimizedPolicy) -> None:
    """As the shared guidance does it around this model's velocity."""
    given, noise = observation(libero=True), draw(policy, 5)
    first = policy.infer(given, noise=noise)["actions"]
    left, delay = first[1:], 2
    guided = policy.infer(given, noise=-noise, prev_chunk=left, inference_delay=delay)["actions"]
    plain = policy.infer(given, noise=-noise)["actions"]
    np.testing.assert_array_equal(plain, policy.infer(given, noise=-noise)["actions"])
    assert np.abs(guided - plain)[:delay].max() > 1e-2

    model, processor, config = policy.model, policy.processor, policy.model.config
    assert isinstance(model, SmolVla)
    inputs = processor.prepare(given)
    previous = processor.normalize_actions(left, inputs)
    target = torch.zeros(1, config.action_horizon, config.action_dim)
    target[0, : len(previous)] = torch.from_numpy(previous)
    weights = chunk_weights(policy.config.rtc, delay, len(previous), config.action_horizon)
    pixels = torch.from_numpy(np.stack(inputs.images)).permute(0, 3, 1, 2)[None] / 255.0 * 2 - 1
    with torch.no_grad():
        keys, values = model.prefix_cache(
            model.embed_images(pixels), torch.from_numpy(inputs.tokens)[None], torch.from_numpy(inputs.state)[None]
        )
        times = model.times(policy.schedule)
        rows, _ = model.conditioning(times)
        expected = guided_euler(
            lambda x, step: model.velocity(x, rows[step], None, None, keys, values),
            torch.from_numpy(-noise)[None], [*times.tolist(), 0.0], target, weights,
        )  # fmt: skip
    np.testing.assert_allclose(guided, processor.unnormalize_actions(expected[0].numpy(), inputs), rtol=0, atol=1e-4)


def test_a_baseline_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    assert bench_card(SMOLVLA).baselines == ("lerobot-eager", "lerobot-compile")
    with pytest.raises(DependencyError, match=r"lerobot.* not installed: pip install lerobot==0\.6\.1"):
        bench_card(SMOLVLA).baseline("lerobot-eager", horizon=50, steps=10, device="cpu")


@pytest.mark.slow
def test_work_counts_what_a_call_must_do() -> None:
    """The published floors: 0.58 TFLOP of two views, 0.195 GB of expert a step (hand-counted, within 5 %)."""
    config = bench_card(SMOLVLA).published()
    processor = bench_card(SMOLVLA).dummy(config, 2)
    inputs = processor.prepare(bench_card(SMOLVLA).random_observation(processor, np.random.default_rng(0)))
    specs = load_config("eager").specs(SMOLVLA.parts)
    work = bench_card(SMOLVLA).work(config, inputs, 10, specs)
    assert sum(w.flop for w in work.values()) == pytest.approx(0.58e12, rel=0.05)
    assert work["vision"].flop == pytest.approx(0.43e12, rel=0.05)
    assert work["denoise"].bytes / 10 == pytest.approx(0.195e9, rel=0.05)
