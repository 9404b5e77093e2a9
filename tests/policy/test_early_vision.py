"""Vision starts before prompts are tokenized: same answers, right order, nothing left of a refused call.

The engines themselves replace CUDA graphs here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import NATIVE, PARTS, tiny_observation
from vla_accel import OptimizedPolicy
from vla_accel.errors import ObservationError
from vla_accel.kernels.image import resize
from vla_accel.pictures import Cameras, PixelValues
from vla_accel.policy import optimized, staging
from vla_accel.policy import pipeline as pipelines
from vla_accel.policy.pipeline import MOST_CAMERAS, Pipeline
from vla_accel.transforms.processing import Processor

NOISE = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
IMAGE, WRIST = "observation/image", "observation/wrist_image"
EARLY = ["vision", "encode", "rest", "wait"]


class Graphs:
    """`Captured` of a pipeline on the CPU; notes the order of its work."""

    def __init__(self, pipeline: Pipeline, log: list[str]) -> None:
        self.pipeline, self.log = pipeline, log

    def start(self) -> None:
        self.log.append("vision")
        prepare = self.pipeline._resize_images if self.pipeline._pieces else self.pipeline._upload_images
        prepare()
        self.pipeline.engines[0][1].run()

    def replay(self, *, changed: bool) -> None:
        assert changed
        self.log.append("rest")
        self.pipeline._upload_rest()
        for _, engine in self.pipeline.engines[1:]:
            engine.run()
        self.pipeline._download()

    def times(self) -> dict[str, float]:
        return dict.fromkeys(PARTS, 0.0)


@pytest.fixture
def plain(folder: Path) -> OptimizedPolicy:
    """Without graphs; resizes images on the host."""
    return OptimizedPolicy.from_pretrained(folder, NATIVE)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def policy(folder: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[OptimizedPolicy]:
    """With graphs, on a device that resizes images."""
    policy = OptimizedPolicy.from_pretrained(folder, NATIVE)
    encode, get, ours = Processor.encode, policy.pipelines.get, policy.device

    def noted(self: Processor, seen: Any) -> Any:
        log.append("encode")
        return encode(self, seen)

    def with_graphs(shape: Any) -> Pipeline:
        pipeline = get(shape)
        pipeline.captured = Graphs(pipeline, log)  # type: ignore[assignment]
        return pipeline

    for module in (pipelines, optimized):
        monkeypatch.setattr(module, "synchronize", lambda _: log.append("wait"))
    monkeypatch.setattr(resize, "fits_on", lambda device: device is ours)
    monkeypatch.setattr(Processor, "encode", noted)
    monkeypatch.setattr(policy.pipelines, "get", with_graphs)
    policy.infer(tiny_observation(9))
    log.clear()
    yield policy


def answer(policy: OptimizedPolicy, observation: dict[str, Any]) -> np.ndarray:
    return policy.infer(observation, noise=NOISE)["actions"]


def with_sizes(first: tuple[int, int], second: tuple[int, int] = (28, 28), seed: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    images = {key: rng.integers(0, 256, (*size, 3), np.uint8) for key, size in ((IMAGE, first), (WRIST, second))}
    return {**tiny_observation(seed), **images}


def as_floats(observation: dict[str, Any]) -> dict[str, Any]:
    return {**observation, IMAGE: observation[IMAGE].astype(np.float32) / 255}


def as_tensors(observation: dict[str, Any]) -> dict[str, Any]:
    """Floats with channels first, as lerobot sends them."""
    floats = as_floats(observation)
    return {**floats, IMAGE: torch.from_numpy(floats[IMAGE]).permute(2, 0, 1).contiguous()}


def as_views(observation: dict[str, Any]) -> dict[str, Any]:
    """The same pixels, in arrays whose memory has the channels in reverse or the image upside down."""
    image, wrist = observation[IMAGE], observation[WRIST]
    return {**observation, IMAGE: image[..., ::-1].copy()[..., ::-1], WRIST: wrist[::-1, ::-1].copy()[::-1, ::-1]}


@pytest.mark.parametrize("form", [as_tensors, as_views])
def test_the_layout_of_images_in_memory_changes_nothing(form: Any, policy: OptimizedPolicy) -> None:
    """Neither do calls of other layouts in between."""
    for seed in range(2):
        observation = tiny_observation(seed)
        want = answer(policy, as_floats(observation) if form is as_tensors else observation)
        np.testing.assert_array_equal(answer(policy, form(observation)), want)


@pytest.mark.parametrize("form", [dict, as_floats], ids=["bytes", "floats"])
def test_vision_starts_before_prompts_are_tokenized(
    form: Any, policy: OptimizedPolicy, plain: OptimizedPolicy, log: list[str]
) -> None:
    for seed in range(3):
        given = form(tiny_observation(seed))
        want = answer(plain, given)
        log.clear()
        np.testing.assert_array_equal(answer(policy, given), want)
        assert log == EARLY


@pytest.mark.parametrize("sizes", [((28, 28), (28, 28)), ((40, 60), (28, 200))])
def test_large_images_are_uploaded_one_by_one(
    sizes: Any, policy: OptimizedPolicy, plain: OptimizedPolicy, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each when it has been copied, of the model's size and of others; then vision runs."""
    answer(policy, with_sizes(*sizes))
    policy.pipelines.newest._find_pieces()
    sent = staging.upload
    monkeypatch.setattr(staging, "upload", lambda *piece: (log.append(f"{piece[0].nbytes} bytes"), sent(*piece)))
    for seed in range(2):
        given = with_sizes(*sizes, seed=seed)
        want = answer(plain, given)
        log.clear()
        np.testing.assert_array_equal(answer(policy, given), want)
        assert log == [*(f"{height * width * 3} bytes" for height, width in sizes), *EARLY]


def test_the_launch_is_counted_before_a_graph_starts(policy: OptimizedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may be interrupted between both, while the GPU runs vision: `transfer` would be negative."""
    pipeline, began = policy.pipelines.newest, []
    graphs: Any = pipeline.captured
    start = graphs.start
    monkeypatch.setattr(graphs, "start", lambda: (began.append(time.perf_counter()), start()))
    answer(policy, tiny_observation(0))
    assert began and pipeline.launched <= began[-1]


def test_images_are_read_once_a_call(policy: OptimizedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], policy.processor._reader.read
    monkeypatch.setattr(policy.processor._reader, "read", lambda o: reads.append(o) or read(o))
    answer(policy, with_sizes((40, 60)))
    assert len(reads) == 1


@pytest.mark.parametrize("sizes", [((40, 60), (28, 28)), ((60, 40), (28, 200)), ((28, 28), (9, 12))])
def test_the_device_resizes_as_the_host_does(
    sizes: Any, policy: OptimizedPolicy, plain: OptimizedPolicy, log: list[str]
) -> None:
    """Some or all images, again with other images of these sizes, and in between with the model's size."""
    for seed, given in enumerate((sizes, sizes, ((28, 28), (28, 28)), sizes)):
        observation = with_sizes(*given, seed=seed)
        want = answer(plain, observation)
        log.clear()
        np.testing.assert_array_equal(answer(policy, observation), want)
        assert (log == EARLY) == (seed == 1), "vision starts early where the last call had images of these sizes"
        cameras = policy.pipelines.newest.shape.cameras
        assert cameras == (None if given[0] == given[1] else Cameras(given, "antialias"))
    assert len(policy.pipelines) == len(plain.pipelines) + 1


def test_a_batch_of_different_cameras_is_resized_on_the_host(policy: OptimizedPolicy, plain: OptimizedPolicy) -> None:
    given, noise = [with_sizes((40, 60)), with_sizes((36, 36), seed=4)], np.stack([NOISE] * 2)
    got, want = (
        [r["actions"] for r in one.infer_batch(given, noise=noise, prev_chunks=None)] for one in (policy, plain)
    )
    np.testing.assert_array_equal(got, want)
    assert policy.pipelines.newest.shape.cameras is None
    same = [with_sizes((40, 60)), with_sizes((40, 60), seed=4)]
    got, want = ([r["actions"] for r in one.infer_batch(same, noise=noise)] for one in (policy, plain))
    np.testing.assert_array_equal(got, want)
    assert policy.pipelines.newest.shape.cameras is not None


def test_only_some_camera_sizes_get_graphs(
    policy: OptimizedPolicy, plain: OptimizedPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    for width in range(MOST_CAMERAS + 2):
        given = with_sizes((30, 30 + width))
        np.testing.assert_array_equal(answer(policy, given), answer(plain, given))
    kept = {p.shape.cameras for p, _ in policy.pipelines._kept.values()} - {None}
    assert len(kept) == MOST_CAMERAS
    assert caplog.text.count("resized on the host") == 1
    answer(policy, with_sizes((30, 30)))
    assert policy.pipelines.newest.shape.cameras in kept


def test_pixel_maps_follow_the_camera_sizes(
    policy: OptimizedPolicy, plain: OptimizedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars as in lerobot 0.4."""
    answers = []
    for pixels in (PixelValues(outside=-255.0), None):
        for one in (policy, plain):
            monkeypatch.setattr(one, "processor", replace(one.processor, pixels=pixels))
        for size in ((40, 60), (50, 30)):
            answers.append(answer(policy, with_sizes(size)))
            np.testing.assert_array_equal(answers[-1], answer(plain, with_sizes(size)))
    assert all(abs(bars - black).max() > 1e-3 for bars, black in zip(answers[:2], answers[2:], strict=True))


@pytest.mark.slow
def test_another_shape_runs_its_own_vision(policy: OptimizedPolicy, plain: OptimizedPolicy, log: list[str]) -> None:
    longer = tiny_observation(1, "bowl " * 22)
    want = answer(plain, longer)
    log.clear()
    np.testing.assert_array_equal(answer(policy, longer), want)
    assert log == ["vision", "encode", "vision", "rest", "wait"]
    two, noise = [tiny_observation(seed) for seed in range(2)], np.stack([NOISE] * 2)
    want = [r["actions"] for r in plain.infer_batch(two, noise=noise)]
    log.clear()
    np.testing.assert_array_equal([r["actions"] for r in policy.infer_batch(two, noise=noise)], want)
    assert log == ["encode", "encode", "vision", "rest", "wait"]


@pytest.mark.parametrize(
    ("wrong", "key", "work"),
    [
        ({"observation/state": np.full(8, 1e300)}, "observation/state", ["vision", "encode", "wait"]),
        ({"prompt": ""}, "prompt", ["vision", "encode", "wait"]),
        ({"observation/state": np.zeros(3)}, "observation/state", []),
        ({IMAGE: np.zeros((4, 4), np.uint8)}, IMAGE, []),
    ],
)
def test_a_refused_call_leaves_nothing(
    policy: OptimizedPolicy, plain: OptimizedPolicy, log: list[str], wrong: dict[str, Any], key: str, work: list[str]
) -> None:
    log.clear()
    with pytest.raises(ObservationError, match=key):
        policy.infer({**tiny_observation(5), **wrong})
    assert log == work
    want = answer(plain, tiny_observation(2))
    log.clear()
    np.testing.assert_array_equal(answer(policy, tiny_observation(2)), want)
    assert log == EARLY
