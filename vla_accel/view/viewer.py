"""rerun's viewer, as far as a view needs it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from vla_accel.errors import ConfigError, DependencyError, OutputError

TICK, TIME = "tick", "time"
"""The time axes: control ticks, and seconds since the view was opened."""
_CONNECT_S = 3.0


class RerunViewer:
    """Sends values to a viewer at an address (HOST:PORT), into a file, or to a viewer that is started here."""

    def __init__(self, address: str = "", file: Path | None = None) -> None:
        try:
            import rerun
            import rerun.blueprint
        except ImportError as error:
            raise DependencyError(f"view: expected rerun: pip install 'vla_accel[view]' ({error})") from error
        self._rerun: Any = rerun
        self._stream: Any = rerun.RecordingStream("vla_accel")
        self._styled: set[str] = set()
        try:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._stream.save(str(file))
            elif address:
                _check_reachable(address)
                self._stream.connect_grpc(f"rerun+http://{address}/proxy")
            else:
                self._stream.spawn()
        except Exception as error:
            kind = ConfigError if file is None else OutputError
            what = file or (f"a viewer at {address}" if address else "a viewer that starts")
            raise kind(f"view: expected {what}, got: {str(error).strip().partition(chr(10))[0]}") from error

    def numbers(self, path: str, ticks: list[int], values: list[float], seconds: list[float]) -> None:
        rerun = self._rerun
        if path not in self._styled and path.endswith("/chunk"):
            self._styled.add(path)  # chunks overlap: points, where the executed actions are a line
            self._stream.log(path, rerun.SeriesPoints(marker_sizes=2.0), static=True, strict=True)
        times = [rerun.TimeColumn(TICK, sequence=ticks)]
        if seconds:
            times.append(rerun.TimeColumn(TIME, duration=seconds))
        self._stream.send_columns(path, times, rerun.Scalars.columns(scalars=values), strict=True)

    def image(self, path: str, tick: int, seconds: float, jpeg: bytes) -> None:
        self._log(path, tick, seconds, self._rerun.EncodedImage(contents=jpeg, media_type="image/jpeg"))

    def text(self, path: str, tick: int, seconds: float, text: str) -> None:
        self._log(path, tick, seconds, self._rerun.TextLog(text))

    def arrange(self, cameras: list[str], actions: list[str]) -> None:
        panel = self._rerun.blueprint
        views = [panel.Spatial2DView(origin=path, name=path) for path in cameras]
        plots = [panel.TimeSeriesView(origin=path, name=path) for path in actions]
        others = panel.TimeSeriesView(name="age, delays, counts", contents=["/age/**", "/delay/**", "/count/**"])
        latency = panel.TimeSeriesView(name="latency in ms", contents=["/**/latency_ms/**"])
        texts = panel.TextLogView(name="log")
        right = panel.Vertical(panel.Grid(*plots), panel.Horizontal(latency, others, texts), row_shares=[2, 1])
        whole = panel.Horizontal(panel.Vertical(*views), right, column_shares=[1, 3]) if views else right
        self._stream.send_blueprint(panel.Blueprint(whole, collapse_panels=True))

    def close(self) -> None:
        self._stream.disconnect()  # writes what is left

    def _log(self, path: str, tick: int, seconds: float, content: Any) -> None:
        self._stream.set_time(TICK, sequence=tick)
        self._stream.set_time(TIME, duration=seconds)
        self._stream.log(path, content, strict=True)


def _check_reachable(address: str) -> None:
    """Raise OSError unless something listens: rerun itself would only write to its log, and wait at the end."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
        pass
