"""Pictures of a run: rollout videos and the latency of each component as stacked bars.

Videos are MP4 where the package `imageio-ffmpeg` is installed, otherwise GIF. Files are written
under a temporary name and then renamed. Nothing here knows where frames or numbers came from.
Needs `imageio` (videos) and `matplotlib` (bars), imported when used.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from eval.harness import report
from vla_accel.errors import DependencyError
from vla_accel.files import replacing

COLOURS = ("#9aa5b1", "#2b6cb0", "#dd6b20", "#38a169", "#d69e2e", "#805ad5", "#319795", "#b83280")
"""Of the parts of a call, in their order."""
UNEXPLAINED = "#e2e8f0"


class VideoRecorder:
    """Collects frames of one episode, all cameras side by side.

    Args:
        cameras: observation keys of the images.
        every: actions between two frames.
        control_hz: actions in a second of simulated time.
    """

    def __init__(self, cameras: Sequence[str], *, every: int, control_hz: float) -> None:
        self.every = every
        self.fps = control_hz / every  # the video runs in simulated time
        self._cameras = cameras
        self.frames: list[np.ndarray] = []

    def add(self, observation: Mapping[str, Any]) -> None:
        """Keep the images of an observation, uint8 (H, W, 3) and of one height."""
        self.frames.append(np.concatenate([observation[name] for name in self._cameras], axis=1))


def check_video_packages() -> str:
    """The video format that will be used, `mp4` or `gif`.

    Raises:
        DependencyError: `imageio` is not installed.
    """
    if find_spec("imageio") is None:
        raise DependencyError("rollout videos need the package imageio: pip install imageio")
    return "mp4" if find_spec("imageio_ffmpeg") is not None else "gif"


def write_video(recorder: VideoRecorder, stem: Path) -> Path:
    """Write the frames to `stem` plus `.mp4` or `.gif`; returns that path."""
    suffix = check_video_packages()
    imageio = _import("imageio.v2")
    path = stem.with_name(f"{stem.name}.{suffix}")
    with replacing(path) as temporary:
        if suffix == "mp4":
            imageio.mimwrite(temporary, recorder.frames, fps=recorder.fps, macro_block_size=2)
        else:
            imageio.mimwrite(temporary, recorder.frames, duration=1e3 / recorder.fps, loop=0)
    return path


def draw_result(result: Mapping[str, Any], output: Path) -> str | None:
    """Draw a result's latencies beside its file `output`; returns the picture's path, or None where nothing was
    timed."""
    rows = [row for row in result["summary"]["rows"] if row["breakdown"]]
    if not rows:
        return None
    hardware = rows[0]["breakdown"]["hardware"]
    bars = [
        ("server's" if row["steps"] is None else str(row["steps"]), report.mean_parts(row["breakdown"])) for row in rows
    ]
    path = draw_latency(
        output.with_suffix(".latency.png"),
        bars,
        title=f"{report.policy_name(result)} on {hardware.get('gpu') or hardware['cpu']}",
        target_hz=rows[0]["target"]["target_hz"],
    )
    return str(path)


def draw_latency(
    path: Path,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    title: str,
    target_hz: float,
) -> Path:
    """Draw one stacked bar per row, with a line where `target_hz` would be.

    Args:
        path: PNG to write.
        rows: label and mean milliseconds by component, in the order they are stacked; `other` is what no component
            explains. The bar's height is their sum.
    """
    matplotlib = _import("matplotlib")
    matplotlib.use("Agg")
    pyplot = _import("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(1.3 * len(rows) + 4.2, 4.2), layout="constrained")
    bottoms = np.zeros(len(rows))
    places = np.arange(len(rows))
    names = dict.fromkeys(name for _, parts in rows for name in parts if name != report.OTHER)
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    if any(report.OTHER in parts for _, parts in rows):
        colours[report.OTHER] = UNEXPLAINED
    for name, colour in colours.items():
        heights = np.array([parts.get(name, 0.0) for _, parts in rows])
        axes.bar(places, heights, 0.6, bottom=bottoms, label=name, color=colour)
        bottoms += heights
    for place, total in zip(places, bottoms, strict=True):
        hz = f"\n{1e3 / total:.1f} Hz" if total else ""
        axes.text(place, total, f"{total:.1f} ms{hz}", ha="center", va="bottom", fontsize=9)
    axes.axhline(1e3 / target_hz, color="#c53030", linestyle="--", linewidth=1, label=f"{target_hz:g} Hz")
    axes.set_xticks(places, [label for label, _ in rows])
    axes.set_xlabel("denoising steps")
    axes.set_ylabel("mean latency of one call [ms]")
    axes.set_ylim(0, max(bottoms.max(), 1e3 / target_hz) * 1.18)
    axes.set_title(title, fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    try:
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=130)
    finally:
        pyplot.close(figure)
    return path


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DependencyError(f"pictures need the package {package}: pip install {package} ({error})") from error
