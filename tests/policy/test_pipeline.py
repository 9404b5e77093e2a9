"""What a call leaves in the staging buffers, and that nothing of one call is in the next, nor in its caller's hands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import EAGER, NATIVE, TOKENIZER, random_model, tiny_config, tiny_observation
from tests.transforms.test_presets import ALL, aloha, processor_of
from vla_accel import OptimizedPolicy
from vla_accel.errors import EngineError, ObservationError
from vla_accel.families.loading import Checkpoint
from vla_accel.families.pi0.family import PI0
from vla_accel.transforms.images import resize
from vla_accel.transforms.robots import PRESETS

VIEWS = ("observation/image", "observation/wrist_image")


@pytest.fixture(scope="module", params=[EAGER, NATIVE], ids=["eager", "native"])
def policy(request: pytest.FixtureRequest, folder: Path) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(folder, request.param)


def staged(policy: OptimizedPolicy) -> dict[str, np.ndarray]:
    return policy.pipelines.newest._host


def guided_and_plain(batch: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    previous = np.random.default_rng(0).uniform(0.5, 1, (3, 7))
    guidance = {"prev_chunks": [previous] + [None] * (batch - 1), "inference_delays": [2] + [None] * (batch - 1)}
    return guidance, [tiny_observation(seed) for seed in range(batch)]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_plain_call_after_a_guided_one_finds_target_and_weights_of_zero(policy: OptimizedPolicy, batch: int) -> None:
    guidance, observations = guided_and_plain(batch)
    for _ in range(2):
        policy.infer_batch(observations, **guidance)
        assert staged(policy)["target"][0].any() and staged(policy)["weights"][0].any()
        assert not staged(policy)["weights"][1:].any()
        for _ in range(2):
            policy.infer_batch(observations)
            assert not staged(policy)["target"].any() and not staged(policy)["weights"].any()


@torch.inference_mode()
def test_a_call_that_failed_half_way_guides_nobody(policy: OptimizedPolicy) -> None:
    inputs = [policy.processor.prepare(tiny_observation())]
    policy.infer(tiny_observation())
    pipeline, feed = policy._feed(inputs, None, None)
    target = np.ones(staged(policy)["target"].shape, np.float32)
    guidance = {"target": target, "weights": np.ones(target.shape[:2])}
    with pytest.raises(EngineError, match="weights: expected dtype float32, got float64"):
        pipeline.finish(replace(feed, guidance=guidance), torch.Generator())
    assert staged(policy)["target"].any()
    policy.infer(tiny_observation())
    assert not staged(policy)["target"].any() and not staged(policy)["weights"].any()


def test_a_shorter_prompt_leaves_nothing_of_the_longer_one(folder: Path) -> None:
    policy = OptimizedPolicy.from_pretrained(folder, NATIVE)
    counts, pipelines = [], []
    for prompt in ("bowl " * 10, "bowl"):
        policy.infer(tiny_observation(0, prompt))
        tokens = policy.processor.prepare(tiny_observation(0, prompt)).tokens
        counts.append(len(tokens))
        pipelines.append(policy.pipelines.newest)
        np.testing.assert_array_equal(staged(policy)["tokens"][0, : len(tokens)], tokens)
        assert not staged(policy)["tokens"][0, len(tokens) :].any()
    assert pipelines[0] is pipelines[1] and counts[1] < counts[0]


def same(image: np.ndarray) -> np.ndarray:
    return image


@pytest.mark.parametrize(
    ("form", "seen"),
    [
        (same, same),
        (lambda x: x[::-1], same),
        (lambda x: x[:, ::-1], same),
        (lambda x: np.repeat(x, 2, 0)[::2], same),
        (np.asfortranarray, same),
        (lambda x: np.moveaxis(x, -1, 0).copy(), lambda x: np.moveaxis(x, 0, -1)),
        (lambda x: x / np.float32(255), lambda x: (255 * x).astype(np.uint8)),
        (lambda x: np.repeat(x, 2, 1), lambda x: resize(x, 28, "antialias")),
    ],
    ids=["as it is", "upside down", "mirrored", "strided", "columns first", "channels first", "floats", "wider"],
)
def test_images_of_every_form_are_staged_and_left_alone(policy: OptimizedPolicy, form: Any, seen: Any) -> None:
    observation = tiny_observation(7)
    given = {key: form(observation[key]) for key in VIEWS}
    before = {key: image.copy() for key, image in given.items()}
    for image in given.values():
        image.flags.writeable = False
    policy.infer({**observation, **given})
    for place, key in zip(staged(policy)["images"][0], VIEWS, strict=True):
        np.testing.assert_array_equal(place, seen(before[key]))
        np.testing.assert_array_equal(given[key], before[key])
        assert not np.shares_memory(place, given[key])


def test_what_a_caller_does_with_images_after_the_call_changes_nothing(policy: OptimizedPolicy) -> None:
    noise = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    observations = [tiny_observation(seed) for seed in range(2)]
    want = [policy.infer(o, noise=noise)["actions"] for o in observations]
    frames = tiny_observation(0)  # one buffer for all frames, as cameras have
    first = policy.infer(frames, noise=noise)
    kept = first["actions"].copy(), first["state"].copy()
    for key in VIEWS:
        frames[key][:] = observations[1][key]
    frames["observation/state"][:] = observations[1]["observation/state"]
    assert not np.array_equal(staged(policy)["images"][0, 0], frames[VIEWS[0]])
    np.testing.assert_array_equal(policy.infer(frames, noise=noise)["actions"], want[1])
    np.testing.assert_array_equal(kept[0], want[0])
    np.testing.assert_array_equal(first["actions"], kept[0])
    np.testing.assert_array_equal(first["state"], kept[1])


def test_a_batch_of_other_views_is_refused_and_the_next_is_not() -> None:
    processor = replace(processor_of(PRESETS["aloha"]), action_dim=16, max_token_len=48)
    model = random_model(tiny_config("pi0", vocab_size=TOKENIZER.vocab_size, action_dim=16))
    policy = OptimizedPolicy(Checkpoint("aloha", PI0, model, processor), EAGER)
    three, one = aloha(*ALL), aloha(ALL[0])
    for batch, counts in (([three, one], r"\[3, 1\]"), ([one, three], r"\[1, 3\]")):
        with pytest.raises(ObservationError, match=f"batch: expected equally many views, got {counts}"):
            policy.infer_batch(batch)
    assert len(policy.pipelines) == 0
    assert len(policy.infer_batch([three, three])) == 2 and len(policy.infer_batch([one, one])) == 2


@torch.inference_mode()
def test_a_feed_must_fill_the_buffers(policy: OptimizedPolicy) -> None:
    policy.infer(tiny_observation())
    pipeline, feed = policy._feed([policy.processor.prepare(tiny_observation())], None, None)
    tokens: Any = feed.inputs["tokens"]
    images: Any = feed.inputs["images"]
    for changes, parts in (
        ({"images": None}, ("pi05", "expected images", "tokens")),
        ({"tokens": None}, ("pi05", "expected tokens", "images")),
        ({"images": [*images, *images]}, ("images: expected 2", "got 4")),
        ({"images": images[:1]}, ("images: expected 2", "got 1")),
        ({"images": [i[:, :, :1] for i in images]}, ("images: expected shape (28, 28, 3)", "got (28, 28, 1)")),
        ({"tokens": []}, ("tokens: expected 1", "got 0")),
        ({"tokens": [np.tile(tokens[0], 9)]}, ("tokens: expected shape", f"got ({9 * len(tokens[0])},)")),
    ):
        inputs = {name: rows for name, rows in {**feed.inputs, **changes}.items() if rows is not None}
        with pytest.raises(EngineError) as refused:
            pipeline.start(inputs)
            pipeline.finish(replace(feed, inputs=inputs), torch.Generator())
        assert all(part in str(refused.value) for part in parts), refused.value


def test_results_share_nothing(policy: OptimizedPolicy) -> None:
    noise = np.zeros((2, 5, 8), np.float32)
    want = policy.infer_batch([tiny_observation(), tiny_observation()], noise=noise)
    engines = [dict(e) for e in want[0]["engines"]]
    one, other = policy.infer_batch([tiny_observation(), tiny_observation()], noise=noise)
    one["engines"][0]["used"] = "changed by a caller"
    one["engines"].pop()
    one["policy_timing"].clear()
    one["actions"][:] = np.nan
    assert other["engines"] == engines and other["policy_timing"]
    np.testing.assert_array_equal(other["actions"], want[1]["actions"])
    assert policy.metadata["engines"] == engines and policy.infer(tiny_observation())["engines"] == engines
