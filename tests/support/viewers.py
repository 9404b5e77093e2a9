"""A viewer that keeps what it is sent."""

from __future__ import annotations

from typing import Any

from vla_accel.view.live import LiveView


class KeptViewer:
    """Keeps curves as (tick, value) by path, images and texts as (path, tick, content), and the panels."""

    def __init__(self) -> None:
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.planned: set[str] = set()
        self.images: list[tuple[str, int, bytes]] = []
        self.texts: list[tuple[str, int, str]] = []
        self.panels: Any = None
        self.closed = False

    def numbers(self, path: str, ticks: list[int], values: list[float], seconds: list[float]) -> None:
        self.curves.setdefault(path, []).extend(zip(ticks, values, strict=True))
        if not seconds:
            self.planned.add(path)

    def image(self, path: str, tick: int, seconds: float, jpeg: bytes) -> None:
        self.images.append((path, tick, jpeg))

    def text(self, path: str, tick: int, seconds: float, text: str) -> None:
        self.texts.append((path, tick, text))

    def arrange(self, cameras: list[str], actions: list[str]) -> None:
        self.panels = cameras, actions

    def close(self) -> None:
        self.closed = True


class ShownView(LiveView):
    """A view with such a viewer, `shown`; the end of its block closes it."""

    Viewer = KeptViewer

    def __init__(self) -> None:
        self.shown = KeptViewer()
        super().__init__(self.shown)

    def __enter__(self) -> ShownView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert self.shown.closed and not self.failed
