"""The first component of a call begins before the rest of the observation is prepared: in the order, with the same
answers, and with nothing left of a call that was refused. Graphs are stood in for by the engines themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.errors import ObservationError
from vla_accel.families import prompted
from vla_accel.pictures import PixelValues
from vla_accel.policy import pipeline as pipelines
from vla_accel.policy.pipeline import Pipeline
from vla_accel.transforms.processing import Processor

PARTS = ("vision", "kv_cache", "denoise")
CONFIG = PolicyConfig(num_steps=2, precision="fp32", device="cpu").with_specs(
    dict.fromkeys(PARTS, EngineSpec("native"))
)
NOISE = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
IMAGE = "observation/image"


class Graphs:
    """As `Captured` with a lead, of a pipeline on the CPU; notes what happens in which order."""

    def __init__(self, pipeline: Pipeline, happened: list[str]) -> None:
        self.pipeline, self.happened = pipeline, happened

    def begin(self) -> None:
        self.happened.append("vision")
        self.pipeline.engines[0][1].run()

    def replay(self) -> None:
        self.happened.append("the rest")
        for _, engine in self.pipeline.engines[1:]:
            engine.run()
        self.pipeline._download()

    def times(self) -> dict[str, float]:
        return dict.fromkeys(PARTS, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def happened() -> list[str]:
    return []


@pytest.fixture
def policy(folder: Path, happened: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[OptimizedPolicy]:
    policy = OptimizedPolicy.from_pretrained(folder, CONFIG)
    prepare, get = Processor.prepare, policy.pipelines.get

    def noted(self: Processor, observation: Mapping[str, Any], **options: Any) -> Any:
        happened.append("prepare")
        return prepare(self, observation, **options)

    def with_graphs(shape: Any) -> Pipeline:
        pipeline = get(shape)
        pipeline.captured = Graphs(pipeline, happened)  # type: ignore[assignment]
        return pipeline

    monkeypatch.setattr(pipelines, "synchronize", lambda _: happened.append("wait"))
    monkeypatch.setattr(prompted, "fits_on", lambda _: True)
    monkeypatch.setattr(Processor, "prepare", noted)
    monkeypatch.setattr(policy.pipelines, "get", with_graphs)
    policy.infer(tiny_observation(9))
    happened.clear()
    yield policy


def answer(policy: OptimizedPolicy, observation: dict[str, Any]) -> np.ndarray:
    return policy.infer(observation, noise=NOISE)["actions"]


AHEAD = ["vision", "prepare", "the rest", "wait"]


@pytest.fixture(scope="module")
def plain(folder: Path) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(folder, CONFIG)


def test_vision_begins_before_the_rest_is_prepared(
    policy: OptimizedPolicy, plain: OptimizedPolicy, happened: list[str]
) -> None:
    for seed in range(3):
        np.testing.assert_array_equal(
            answer(policy, tiny_observation(seed)), answer(plain, tiny_observation(seed))
        )  # fmt: skip
    assert happened == [*AHEAD, "prepare"] * 3, "the second prepare of each is the plain policy's"


def test_cameras_images_are_fitted_as_without(policy: OptimizedPolicy, plain: OptimizedPolicy) -> None:
    wide = {**tiny_observation(3), IMAGE: np.random.default_rng(3).integers(0, 256, (40, 60, 3), np.uint8)}
    np.testing.assert_array_equal(answer(policy, wide), answer(plain, wide))


def test_pixel_maps_travel_with_the_images(
    policy: OptimizedPolicy, folder: Path, happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bars as lerobot 0.4 has them; two calls of the same shape, whose cameras have other sizes."""
    other = OptimizedPolicy.from_pretrained(folder, CONFIG)
    answers = []
    for pixels in (PixelValues(outside=-255.0), None):
        for one in (policy, other):
            monkeypatch.setattr(one, "processor", replace(one.processor, pixels=pixels))
        answer(policy, tiny_observation(9))
        happened.clear()
        for size in ((40, 60, 3), (70, 30, 3)):
            wide = {**tiny_observation(3), IMAGE: np.random.default_rng(3).integers(0, 256, size, np.uint8)}
            answers.append(answer(policy, wide))
            np.testing.assert_array_equal(answers[-1], answer(other, wide))
        assert happened == [*AHEAD, "prepare"] * 2
    assert all(abs(bars - black).max() > 1e-3 for bars, black in zip(answers[:2], answers[2:], strict=True))


def test_parts_of_a_call_still_add_up(policy: OptimizedPolicy) -> None:
    timing = policy.infer(tiny_observation())["policy_timing"]
    parts = [value for name, value in timing.items() if name not in ("infer_ms", "total_ms")]
    assert sum(parts) == pytest.approx(timing["total_ms"]) and min(parts) >= 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_images_that_are_to_be_converted_wait(policy: OptimizedPolicy, happened: list[str], dtype: Any) -> None:
    observation = tiny_observation()
    policy.infer({**observation, IMAGE: observation[IMAGE].astype(dtype) / 255})
    assert happened == ["prepare", "vision", "the rest", "wait"]


def test_another_shape_is_computed_from_its_own_beginning(
    policy: OptimizedPolicy, plain: OptimizedPolicy, happened: list[str]
) -> None:
    longer = tiny_observation(1, "bowl " * 22)
    want = answer(plain, longer)
    happened.clear()
    np.testing.assert_array_equal(answer(policy, longer), want)
    assert happened == ["vision", "prepare", "wait", "vision", "the rest", "wait"]
    two = [tiny_observation(seed) for seed in range(2)]
    want = [r["actions"] for r in plain.infer_batch(two, noise=np.stack([NOISE] * 2))]
    happened.clear()
    got = [r["actions"] for r in policy.infer_batch(two, noise=np.stack([NOISE] * 2))]
    np.testing.assert_array_equal(got, want)
    assert happened == ["prepare", "prepare", "vision", "the rest", "wait"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"observation/state": np.zeros(3)}, r"observation/state: expected shape \(8,\)"),
        ({"prompt": ""}, "prompt"),
        ({IMAGE: np.zeros((4, 4), np.uint8)}, "observation/image: expected shape"),
    ],
)
def test_a_refused_call_leaves_nothing(
    policy: OptimizedPolicy, plain: OptimizedPolicy, happened: list[str], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ObservationError, match=message):
        policy.infer({**tiny_observation(5), **wrong})
    assert happened == (["prepare"] if IMAGE in wrong else ["vision", "prepare", "wait"])
    want = answer(plain, tiny_observation(2))
    happened.clear()
    np.testing.assert_array_equal(answer(policy, tiny_observation(2)), want)
    assert happened == AHEAD
