"""A GR00T checkpoint through the whole policy: engines, batches, views that are missing, chunks, commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.groot_folders import LIBERO, TAG, observation, write_isaac
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config
from vla_accel.errors import ObservationError
from vla_accel.families.bench import bench_card, sized
from vla_accel.families.family import family_named
from vla_accel.families.groot.network import groot_n17
from vla_accel.measure.parity import compare
from vla_accel.measure.random_policy import random_policy


@pytest.fixture(scope="module")
def policy(groot_folder: Path) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(groot_folder, device="cpu")


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((8, 132)).astype(np.float32)


def test_it_acts(policy: OptimizedPolicy) -> None:
    assert policy.metadata["num_steps"] == 4, "the checkpoint's own"
    result = policy.infer(observation(), noise=noise())
    assert result["actions"].shape == (6, 7) and set(result["actions"][:, 6]) <= {-1.0, 1.0}
    assert [e["component"] for e in result["engines"]] == ["vision", "kv_cache", "denoise"]
    again = policy.with_steps(2).infer(observation(), noise=noise())["actions"]
    assert np.abs(again - result["actions"]).max() > 1e-4


def test_rows_of_a_batch_are_what_they_are_alone(policy: OptimizedPolicy) -> None:
    given = [observation(i, prompt) for i, prompt in enumerate(("open it", "pick up the black bowl", ""))]
    together = policy.infer_batch(given, noise=np.stack([noise(i) for i in range(3)]))
    for i, one in enumerate(given):
        alone = policy.infer(one, noise=noise(i))["actions"]
        np.testing.assert_allclose(together[i]["actions"][:, :6], alone[:, :6], atol=1e-5)


def test_a_chunk_begins_as_the_last_one_goes_on(policy: OptimizedPolicy) -> None:
    first = policy.infer(observation(), noise=noise())["actions"]
    guided = policy.infer(observation(1), noise=noise(1), prev_chunk=first[2:], inference_delay=2)["actions"]
    np.testing.assert_allclose(guided[:2, :6], first[2:4, :6], atol=1e-5)
    free = policy.infer(observation(1), noise=noise(1))["actions"]
    assert np.abs(guided[:2] - free[:2]).max() > 1e-2
    plain = policy.infer(observation(1), noise=noise(1))["actions"]
    np.testing.assert_array_equal(plain, free)
    with pytest.raises(ObservationError, match="prev_chunk: expected shape"):
        policy.infer(observation(), prev_chunk=np.zeros((7, 7)), inference_delay=1)


def test_images_of_earlier_control_steps_are_kept(small_images: None, tmp_path: Path) -> None:
    """The model sees the present images and those of two steps earlier; the metadata says how many a client keeps."""
    video = {**LIBERO["video"], "delta_indices": [-2, 0]}
    folder = write_isaac(tmp_path, modalities={TAG: {**LIBERO, "video": video}})
    policy = OptimizedPolicy.from_pretrained(folder, device="cpu")
    assert policy.metadata["history"] == 3
    given = [observation(seed) for seed in range(4)]
    kept = [policy.infer(one, noise=noise())["actions"] for one in given]
    keys = (*policy.processor.preset.images, *policy.processor.preset.state)
    for last, first in ((0, 0), (1, 0), (3, 1)):
        steps = given[first : last + 1]
        own = {**given[last], **{key: np.stack([one[key] for one in steps]) for key in keys}}
        np.testing.assert_array_equal(policy.infer(own, noise=noise())["actions"], kept[last])
        (alone,) = policy.infer_batch([own], noise=noise()[None])
        np.testing.assert_array_equal(alone["actions"], kept[last])
    policy.reset()
    assert np.abs(policy.infer(given[3], noise=noise())["actions"] - kept[3]).max() > 1e-3
    with pytest.raises(ObservationError, match=r"expected 1 to 3 images of each camera, .* a batch keeps no history"):
        policy.infer_batch(given[:2])


def test_parity_with_itself(groot_folder: Path, policy: OptimizedPolicy) -> None:
    config = PolicyConfig(precision="bf16", device="cpu")
    low = OptimizedPolicy.from_pretrained(groot_folder, config)
    report = compare(low, policy, [observation(i) for i in range(2)], name="groot")
    assert report.num_steps == 4 and 0.99 < report.actions.cosine < 1
    names = ["image_tokens", "deepstack", "text_keys", "text_values", "image_keys", "image_values"]
    assert list(report.components) == names
    assert {p.dtype.itemsize for n, p in low.model.named_parameters() if n.startswith("head.state_")} == {4}


@pytest.mark.slow
def test_work_of_the_published_size() -> None:
    """As counted apart from this code: 0.95 TFLOP and 1.66 GB a step at two views of 64 tokens."""
    family = family_named("groot")
    config = groot_n17()
    transforms = bench_card(family).dummy(config, 2)
    inputs = transforms.prepare(bench_card(family).random_observation(transforms, np.random.default_rng(0)))
    specs = PolicyConfig().specs(family.parts)
    work = bench_card(family).work(config, inputs, 4, specs)
    assert sum(w.flop for w in work.values()) / 1e12 == pytest.approx(0.95, abs=0.08)
    assert work["denoise"].bytes / 4 / 1e9 == pytest.approx(1.66, abs=0.1)


def test_a_random_policy_of_any_size(policy: OptimizedPolicy) -> None:
    card = sized("groot_n17")[0]
    assert card.family.name == "groot" and card.sweep == (4, 2, 1)
    other, _ = random_policy("groot", PolicyConfig(device="cpu", num_steps=1), model=policy.model)
    card = bench_card(other.family)
    result = other.infer(card.random_observation(other.processor, np.random.default_rng(0)))
    assert result["actions"].shape == (8, 7) and np.isfinite(result["actions"]).all()


def test_the_execution_horizon_changes_the_chunk(groot_folder: Path, policy: OptimizedPolicy) -> None:
    short = OptimizedPolicy.from_pretrained(
        groot_folder, load_config({"device": "cpu", "rtc": {"execution_horizon": 3}})
    )
    assert short.supports_prev_chunk
    first = policy.infer(observation(), noise=noise())["actions"]
    options = {"noise": noise(1), "prev_chunk": first[1:], "inference_delay": 1}
    whole, less = (p.infer(observation(1), **options)["actions"] for p in (policy, short))
    assert np.abs(whole - less).max() > 1e-3
