"""A live view shows each event, never delays or ends the loop, and says what it left out."""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.viewers import ShownView
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.errors import ConfigError, OutputError
from vla_accel.view import OFF, View, check_view, live, observations, open_view
from vla_accel.view.live import LiveView
from vla_accel.view.opening import Target

CHUNK = np.arange(6.0).reshape(3, 2)


def test_an_inference_shows_images_numbers_text_latencies_and_the_chunk_at_its_ticks() -> None:
    with ShownView() as view:
        view.inferred(4, {"images": {"top": np.zeros((8, 8, 3), np.uint8)}, "state": [1.0, 2.0], "prompt": "pick"},
                      CHUNK, {"vision_ms": 3.0, "server/queue_ms": 5})  # fmt: skip
        view.executed(4, np.array([7.0, 8.0]))
        view.measured(5, {"age/ms": 20})
    assert view.shown.curves == {
        "latency_ms/vision": [(4, 3.0)],
        "latency_ms/server/queue": [(4, 5.0)],
        "action/0/chunk": [(4, 0.0), (5, 2.0), (6, 4.0)],
        "action/1/chunk": [(4, 1.0), (5, 3.0), (6, 5.0)],
        "state/state/0": [(4, 1.0)],
        "state/state/1": [(4, 2.0)],
        "action/0/executed": [(4, 7.0)],
        "action/1/executed": [(4, 8.0)],
        "age/ms": [(5, 20.0)],
    }
    assert view.shown.planned == {"action/0/chunk", "action/1/chunk"}
    assert [(path, tick) for path, tick, _ in view.shown.images] == [("camera/images/top", 4)]
    assert view.shown.texts == [("prompt", 4, "pick")]
    assert view.shown.panels == (["camera/images/top"], ["action/0", "action/1"])


def test_episodes_follow_each_other_and_policies_have_paths_of_their_own() -> None:
    with ShownView() as view:
        for title in ("first", "second"):
            view.began(title)
            for tick in range(3):
                view.executed(tick, np.array([float(tick)]))
        view.inferred(0, {"prompt": "a"}, CHUNK[:, :1], {}, name="pi0 fast")
    assert view.shown.curves["action/0/executed"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 0.0), (4, 1.0), (5, 2.0)]
    assert "pi0_fast/action/0/chunk" in view.shown.curves
    assert [text for path, _, text in view.shown.texts if path == "log"] == ["first", "second"]


def test_an_episode_begins_after_the_rest_of_the_last_chunk() -> None:
    with ShownView() as view:
        for _ in range(2):
            view.began("an episode")
            view.inferred(0, {}, np.arange(10.0)[:, None], {})
            for tick in range(3):
                view.executed(tick, np.zeros(1))
            view.warned("stopped")
    assert [tick for tick, _ in view.shown.curves["action/0/chunk"]] == [*range(20)]
    assert [tick for tick, _ in view.shown.curves["action/0/executed"]] == [0, 1, 2, 10, 11, 12]
    assert [tick for _, tick, text in view.shown.texts if text == "stopped"] == [2, 12]


def test_the_prompt_is_shown_when_it_changes_and_warnings_are_lines_of_the_log() -> None:
    with ShownView() as view:
        for tick, prompt in enumerate(["a", "a", "b"]):
            view.inferred(tick, {"prompt": prompt}, CHUNK, {})
        logging.getLogger("vla_accel.realtime").warning("UNDERRUN at tick %d", 7)
    assert [text for _, _, text in view.shown.texts] == ["a", "b", "WARNING: UNDERRUN at tick 7"]


def test_a_viewer_that_hangs_loses_events_and_delays_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "MOST_EVENTS", 4)
    gate, entered = threading.Event(), threading.Event()

    class Hanging(ShownView.Viewer):
        def text(self, path: str, tick: int, seconds: float, text: str) -> None:
            entered.set()
            assert gate.wait(PATIENCE_S)

    view = LiveView(Hanging())
    view.began("hangs")
    assert entered.wait(PATIENCE_S)
    for tick in range(10):
        view.executed(tick, np.zeros(1))
    view.close(0.01)
    gate.set()
    assert view.dropped == 6
    assert "6 events were dropped" in caplog.text and "did not take the rest" in caplog.text


def test_few_observations_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_OBSERVATIONS", 2)
    gate, entered = threading.Event(), threading.Event()

    class Hanging(ShownView.Viewer):
        def text(self, path: str, tick: int, seconds: float, text: str) -> None:
            entered.set()
            assert gate.wait(PATIENCE_S)

    viewer = Hanging()
    view = LiveView(viewer)
    view.began("hangs")
    assert entered.wait(PATIENCE_S)
    for tick in range(5):
        view.inferred(tick, {"state": np.zeros(1)}, CHUNK, {})
    gate.set()
    eventually(lambda: len(viewer.curves.get("state/state/0", ())) == 2)
    view.inferred(5, {"state": np.zeros(1)}, CHUNK, {})
    view.close()
    assert view.dropped == 3
    assert len(viewer.curves["state/state/0"]) == 3 and len(viewer.curves["action/0/chunk"]) == 18


def test_errors_of_the_viewer_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ShownView.Viewer):
        def text(self, path: str, tick: int, seconds: float, text: str) -> None:
            raise OSError("no space left")

        def numbers(self, path: str, ticks: list[int], values: list[float], seconds: list[float]) -> None:
            if path == "age/ms":
                raise OSError("no space left")
            super().numbers(path, ticks, values, seconds)

        def arrange(self, cameras: list[str], actions: list[str]) -> None:
            raise OSError("no space left")

    viewer = Broken()
    view = LiveView(viewer)
    for title in ("a", "b", "c"):
        view.began(title)
    view.measured(0, {"age/ms": 1.0, "count/underruns": 2.0})
    view.inferred(0, {"prompt": "pick", "state": [5.0]}, CHUNK, {})
    view.executed(0, np.zeros(1))
    view.close()
    assert {"count/underruns", "state/state/0", "action/0/chunk", "action/0/executed"} <= viewer.curves.keys()
    assert caplog.text.count("no space left") == 1
    assert "0 events were dropped, 6 failed" in caplog.text  # four texts, a curve and the panels


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (np.full((40, 60, 3), 200, np.uint8), (40, 60)),
        (np.full((3, 40, 60), 200 / 255, np.float32), (40, 60)),
        (np.stack([np.zeros((40, 60, 3), np.uint8), np.full((40, 60, 3), 200, np.uint8)]), (40, 60)),
        (np.full((1, 1, 512, 1024, 3), 200, np.uint8), (128, 256)),
        (Image.new("RGB", (60, 40), (200, 200, 200)), (40, 60)),
    ],
    ids=["levels", "fractions, channels first", "newest of a history", "reduced", "pillow"],
)
def test_pictures_of_every_layout_are_shown(value: Any, shape: tuple[int, int]) -> None:
    ((path, content),) = observations.parts({"observation/image.top": value})
    pixels = np.asarray(Image.open(io.BytesIO(content)))  # type: ignore[arg-type]
    assert path == "camera/observation/image_top" and pixels.shape == (*shape, 3)
    assert abs(float(pixels.mean()) - 200) < 2


def test_what_is_no_picture_number_or_text_is_left_out() -> None:
    import torch

    odd = {"a": None, "b": object(), "c": torch.ones(2, requires_grad=True), "d": np.zeros((5, 6, 7)), "e": b"x"}
    assert [*observations.parts({**odd, "state": torch.ones(2)})] == [("state/state/0", 1.0), ("state/state/1", 1.0)]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("rerun", Target()),
        ("rerun://gpu-box:9876", Target("gpu-box:9876")),
        ("rerun://[::1]:9876", Target("[::1]:9876")),
        ("rerun:run.rrd", Target(file=Path("run.rrd"))),
        ("rerun:~/a/run.rrd", Target(file=Path.home() / "a" / "run.rrd")),
    ],
)
def test_a_target_is_a_viewer_an_address_or_a_file(text: str, target: Target) -> None:
    assert check_view(text) == target


@pytest.mark.parametrize("text", ["", "Rerun", "rerun:", "rerun://host", "rerun:run.mp4", "foxglove"])
def test_another_target_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="view: expected rerun"):
        check_view(text)


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.rrd").mkdir()
    with pytest.raises(OutputError, match="view"):
        check_view(f"rerun:{tmp_path}/run.rrd")


def test_without_a_target_nothing_is_shown() -> None:
    assert open_view(None) is OFF and not OFF.on
    view = View()
    assert open_view(view) is view
