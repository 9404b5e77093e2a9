"""Pictures of a run: rollout videos, and the latency of each component as stacked bars.

Videos are MP4 where the package `imageio-ffmpeg` is installed, otherwise GIF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from eval.harness.pages import bars_of
from eval.harness.report import policy_name
from eval.script import write_png
from vla_accel.errors import DependencyError
from vla_accel.files import replacing
from vla_accel.report import charts
from vla_accel.report.conditions import machine


class VideoRecorder:
    """Collects frames of one episode, all cameras (observation keys) in one row: one every `every` actions."""

    def __init__(self, cameras: Sequence[str], *, every: int, control_hz: float) -> None:
        self.every = every
        self.fps = control_hz / every  # the video runs in simulated time
        self._cameras = cameras
        self.frames: list[Any] = []

    def add(self, observation: Mapping[str, Any]) -> None:
        """Keep the images of an observation, uint8 (H, W, 3) and of one height."""
        self.frames.append(np.concatenate([observation[name] for name in self._cameras], axis=1))


def check_video_packages() -> str:
    """The video format that will be used, `mp4` or `gif`. Raises DependencyError without `imageio`."""
    if find_spec("imageio") is None:
        raise DependencyError("rollout videos need the package imageio: pip install imageio")
    return "mp4" if find_spec("imageio_ffmpeg") is not None else "gif"


def write_video(recorder: VideoRecorder, stem: Path) -> Path:
    """Write the frames to `stem` plus `.mp4` or `.gif`; returns that path."""
    suffix = check_video_packages()
    import imageio.v2 as imageio

    path = stem.with_name(f"{stem.name}.{suffix}")
    with replacing(path) as temporary:
        if suffix == "mp4":
            imageio.mimwrite(temporary, recorder.frames, fps=recorder.fps, macro_block_size=2)
        else:
            imageio.mimwrite(temporary, recorder.frames, duration=1e3 / recorder.fps, loop=0)
    return path


def draw_result(
    result: Mapping[str, Any], output: Path, compare: Mapping[str, Mapping[str, Any]] | None = None
) -> str | None:
    """Draw the latencies of a result as stacked bars next to its file `output`, with those of other runs by name and a
    line at the target rate; returns the path of the picture, or None if nothing was timed."""
    rows = [row for row in result["summary"]["rows"] if row["breakdown"]]
    if not rows:
        return None
    target_hz, path = rows[0]["target"]["target_hz"], output.with_suffix(".latency.png")
    title = f"{policy_name(result)} on {machine(rows[0]['breakdown']['hardware'])}"
    bars = bars_of({"this run": result, **(compare or {})})
    limit = (1e3 / target_hz, f"{target_hz:g} Hz")
    write_png(charts.stacked(bars, unit=f"mean latency of one call [ms]: {title}", narrow=False, limit=limit), path)
    return str(path)
