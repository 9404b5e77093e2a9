"""ACT's native programs against its eager network; `tests/parity/test_parity_act.py` compares that with lerobot's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support import tiny_act
from tests.support.agreement import rms
from tests.support.tiny_act import config_of
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config
from vla_accel.errors import ConfigError
from vla_accel.families.act.family import ACT
from vla_accel.families.act.network import ActConfig, pixel_positions
from vla_accel.families.bench import bench_card
from vla_accel.families.loading import Checkpoint
from vla_accel.nn.resnet import ResNetConfig
from vla_accel.transforms.frames import FrameProcessor
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.robots import Preset

ONE_SIZE = tuple(config_of().cameras[:1]) * 3
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cameras of one size": {"cameras": ONE_SIZE},
    "environment": {"environment_dim": 3},
    "only the environment": {"state_dim": 0, "environment_dim": 3},
    "deep": {"decoder_depth": 2, "activation": "gelu", "backbone": ResNetConfig("resnet50")},
}


def policy_of(config: ActConfig, engine: str, dtype: str = "fp32") -> OptimizedPolicy:
    names = tuple(f"camera{index}" for index in range(len(config.cameras)))
    sizes = tuple(size for size in (config.state_dim, config.environment_dim) if size)
    preset = Preset(names, ("joints", "objects")[: len(sizes)], sum(sizes), config.action_dim, state_dims=sizes)
    processor = FrameProcessor(
        preset=preset, state=Normaliser.identity(sum(sizes)), actions=Normaliser.identity(config.action_dim),
        action_dim=config.action_dim, frame_shapes=tuple((c.height, c.width) for c in config.cameras),
        cameras=tuple(Normaliser("mean_std", np.array(c.mean), np.array(c.deviation)) for c in config.cameras),
    )  # fmt: skip
    checkpoint = Checkpoint("tiny", ACT, tiny_act.tiny_model(config), processor)
    settings = {"precision": dtype, "device": "cpu", "vision": engine, "denoise": engine}
    return OptimizedPolicy(checkpoint, load_config(settings))


def observations(policy: OptimizedPolicy, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [bench_card(ACT).random_observation(policy.processor, rng) for _ in range(count)]


def chunks(policy: OptimizedPolicy, count: int) -> np.ndarray:
    return np.stack([one["actions"] for one in policy.infer_batch(observations(policy, count))])


@pytest.mark.parametrize("name", list(VARIANTS))
def test_native_programs_compute_what_the_network_does(name: str) -> None:
    config = config_of(**VARIANTS[name])
    eager, native = (policy_of(config, engine) for engine in ("eager", "native"))
    expected = chunks(eager, 3)
    assert expected.std(1).min() > 1e-3, "a chunk that does not move shows nothing"
    for policy in (eager, native):
        np.testing.assert_allclose(chunks(policy, 3), expected, atol=1e-4)
        np.testing.assert_allclose(chunks(policy, 1)[0], expected[0], atol=1e-4)
    assert {entry["used"] for entry in native.ledger.as_list()} == {"native"}


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_bf16_agrees_to_its_own_rounding(engine: str) -> None:
    exact = torch.from_numpy(chunks(policy_of(config_of(), "eager"), 3))
    error = rms(torch.from_numpy(chunks(policy_of(config_of(), engine, "bf16"), 3)) - exact)
    assert 0 < error < 8 * torch.finfo(torch.bfloat16).eps * rms(exact)


def test_a_network_of_images_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="state_dim, environment_dim: expected one above 0"):
        config_of(state_dim=0)


def test_every_input_matters() -> None:
    policy = policy_of(config_of(environment_dim=3), "native")
    (seen,) = observations(policy, 1)
    plain = policy.infer(seen)["actions"]
    for key, value in seen.items():
        changed = policy.infer({**seen, key: np.zeros_like(value)})["actions"]
        assert np.abs(changed - plain).max() > 1e-3, key


def test_positions_of_a_feature_map() -> None:
    """Rows first, each half with sines and cosines by turns."""
    found = pixel_positions(2, 3, 8)
    assert found.shape == (6, 8)
    for index, (row, column) in enumerate([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]):
        angles = [
            2 * np.pi * row / 2,
            2 * np.pi * row / 2 / 100.0,
            2 * np.pi * column / 3,
            2 * np.pi * column / 3 / 100.0,
        ]
        expected = np.ravel([(np.sin(a), np.cos(a)) for a in angles])
        np.testing.assert_allclose(found[index], expected, atol=1e-5)
