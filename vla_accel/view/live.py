"""A view whose work happens in a thread of its own, behind a bounded queue."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from vla_accel.view import observations
from vla_accel.view.view import View

logger = logging.getLogger("vla_accel.view")

MOST_EVENTS = 2000
"""Events that may wait for the viewer."""
MOST_OBSERVATIONS = 8
"""Observations among them: their images take memory."""
_SEND_EVERY_S = 0.5


class Viewer(Protocol):
    """A program that shows values by path. Its methods may wait and raise. `seconds` count from the view's start."""

    def numbers(self, path: str, ticks: list[int], values: list[float], seconds: list[float]) -> None:
        """Add points to a curve; `seconds` is empty for values that are only planned."""
        ...

    def image(self, path: str, tick: int, seconds: float, jpeg: bytes) -> None: ...

    def text(self, path: str, tick: int, seconds: float, text: str) -> None: ...

    def arrange(self, cameras: list[str], actions: list[str]) -> None:
        """Arrange the panels; called again when there are further paths."""
        ...

    def close(self) -> None: ...


class LiveView(View):
    """Sends events to a viewer from a thread.

    An event that finds the queue full is dropped and counted. The first error of the viewer is a warning; further ones
    are only counted. Warnings of the package's logger are shown, too.
    """

    on = True

    def __init__(self, viewer: Viewer) -> None:
        self._viewer, self._start = viewer, time.monotonic()
        self._queue: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(MOST_EVENTS)
        self._observations = threading.BoundedSemaphore(MOST_OBSERVATIONS)
        self.dropped = self.failed = 0
        # The thread's own: the episode's first tick, the newest and the last planned tick, curves not sent yet, texts,
        # and panels.
        self._first, self._newest, self._planned, self._sent_s = 0, -1, -1, 0.0
        self._curves: dict[str, tuple[list[int], list[float], list[float | None]]] = {}
        self._texts: dict[str, str] = {}
        self._panels: tuple[dict[str, None], dict[str, None]] = {}, {}
        self._arranged = (0, 0)
        self._thread = threading.Thread(target=self._main, name="view", daemon=True)
        self._thread.start()
        self._handler = _Warnings(self)
        logging.getLogger("vla_accel").addHandler(self._handler)

    def began(self, title: str) -> None:
        self._put(self._begin, title, self._now())

    def inferred(
        self,
        tick: int,
        observation: Mapping[str, Any],
        actions: Any,
        latency_ms: Mapping[str, Any],
        name: str = "",
    ) -> None:
        prefix, now = f"{observations.path_of(name)}/" if name else "", self._now()
        self._put(self._show_inference, prefix, tick, now, actions, latency_ms)
        if not self._observations.acquire(blocking=False):
            self.dropped += 1
        elif not self._put(self._show_observation, prefix, tick, now, observation):
            self._observations.release()

    def executed(self, tick: int, action: np.ndarray) -> None:
        self._put(self._show_action, tick, self._now(), action)

    def measured(self, tick: int, numbers: Mapping[str, float]) -> None:
        self._put(self._show_numbers, tick, self._now(), numbers)

    def warned(self, text: str) -> None:
        """Show a line of the log."""
        self._put(self._show_text, "log", self._now(), text)

    def close(self, timeout_s: float = 10.0) -> None:
        logging.getLogger("vla_accel").removeHandler(self._handler)
        end = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        self._thread.join(max(end - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning("view: the viewer did not take the rest within %.3g s", timeout_s)
        if self.dropped or self.failed:
            logger.warning("view: %d events were dropped, %d failed", self.dropped, self.failed)

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _put(self, show: Callable[..., None], *arguments: Any) -> bool:
        try:
            self._queue.put_nowait((show, arguments))
        except queue.Full:
            self.dropped += 1
            return False
        return True

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        running = True
        while running:
            try:
                event = self._queue.get(timeout=_SEND_EVERY_S)
                running = event is not None
                if event is not None:
                    self._safely(event[0], *event[1])
            except queue.Empty:
                pass
            if not running or self._now() - self._sent_s >= _SEND_EVERY_S:
                self._send()
        self._safely(self._viewer.close)

    def _safely(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                logger.warning("view: %s: %s; the policy continues", type(error).__name__, error)

    def _begin(self, title: str, seconds: float) -> None:
        self._first = max(self._newest, self._planned) + 1  # after the rest of the last chunk
        self._show_text("log", seconds, title)

    def _at(self, tick: int) -> int:
        self._newest = max(self._newest, self._first + tick)
        return self._first + tick

    def _show_inference(
        self, prefix: str, tick: int, seconds: float, actions: Any, latency_ms: Mapping[str, Any]
    ) -> None:
        first, chunk = self._at(tick), np.asarray(actions, np.float64)
        self._planned = max(self._planned, first + len(chunk) - 1)
        for name, value in latency_ms.items():
            if isinstance(value, (int, float)):
                self._add(f"{prefix}latency_ms/{observations.path_of(name).removesuffix('_ms')}", first, seconds, value)
        for index, column in enumerate(chunk.T):
            panel = f"{prefix}action/{index}"
            self._panels[1][panel] = None
            for offset, value in enumerate(column.tolist()):
                self._add(f"{panel}/chunk", first + offset, None, value)

    def _show_observation(self, prefix: str, tick: int, seconds: float, observation: Mapping[str, Any]) -> None:
        try:
            first = self._at(tick)
            for path, value in observations.parts(observation):
                if isinstance(value, bytes):
                    self._panels[0][prefix + path] = None
                    self._safely(self._viewer.image, prefix + path, first, seconds, value)
                elif isinstance(value, str):
                    if self._texts.get(prefix + path) != value:
                        self._texts[prefix + path] = value
                        self._safely(self._viewer.text, prefix + path, first, seconds, value)
                else:
                    self._add(prefix + path, first, seconds, value)
        finally:
            self._observations.release()

    def _show_action(self, tick: int, seconds: float, action: np.ndarray) -> None:
        for index, value in enumerate(np.asarray(action, np.float64).tolist()):
            self._panels[1][f"action/{index}"] = None
            self._add(f"action/{index}/executed", self._at(tick), seconds, value)

    def _show_numbers(self, tick: int, seconds: float, numbers: Mapping[str, float]) -> None:
        for path, value in numbers.items():
            self._add(path, self._at(tick), seconds, float(value))

    def _show_text(self, path: str, seconds: float, text: str) -> None:
        self._viewer.text(path, max(self._newest, 0), seconds, text)

    def _add(self, path: str, tick: int, seconds: float | None, value: float) -> None:
        """Add a point to a curve; `seconds` is None for values that are only planned."""
        ticks, values, times = self._curves.setdefault(path, ([], [], []))
        ticks.append(tick)
        values.append(value)
        times.append(seconds)

    def _send(self) -> None:
        self._sent_s, curves, self._curves = self._now(), self._curves, {}
        for path, (ticks, values, times) in curves.items():
            seconds = [one for one in times if one is not None]
            self._safely(self._viewer.numbers, path, ticks, values, seconds)
        if (known := (len(self._panels[0]), len(self._panels[1]))) != self._arranged:
            self._arranged = known
            self._safely(self._viewer.arrange, *map(list, self._panels))


class _Warnings(logging.Handler):
    """Shows the package's warnings, but for those of the view itself."""

    def __init__(self, view: LiveView) -> None:
        super().__init__(logging.WARNING)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != logger.name:
            self._view.warned(f"{record.levelname}: {record.getMessage()}")
