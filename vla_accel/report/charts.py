"""Pictures of reports, drawn by matplotlib: stacked bars, rates with intervals, a heat map, points with a front, lines.

Each function returns a figure of one of two widths, so that letters stay readable on a telephone; `svg` writes it. They
know numbers and labels, not where these come from. Needs matplotlib, imported when a picture is drawn.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

from vla_accel.errors import DependencyError
from vla_accel.report.colours import LIMIT, LINES, MARK, PARTS, colours_of

WIDE, NARROW = 9.0, 3.7
"""Widths in inches at 100 dots each."""


@dataclass(frozen=True)
class Bar:
    """`parts`: lengths by name, in their order; `floor`: where a mark stands, or None; `told`: text behind the bar."""

    label: str
    parts: Mapping[str, float]
    told: str = ""
    floor: float | None = None


@dataclass(frozen=True)
class Point:
    """`chosen`: it gets the large mark; `front`: nothing is better both ways; `dropped`: some gate refused it."""

    label: str
    x: float
    y: float
    chosen: bool = False
    front: bool = False
    dropped: bool = False


@dataclass(frozen=True)
class Rates:
    """Shares of one, each with an interval: `labels`, and (value, low, high) of each; a value of None was not seen."""

    labels: Sequence[str]
    values: Sequence[tuple[float | None, float, float]] = field(default_factory=tuple)


def stacked(bars: Sequence[Bar], *, unit: str, narrow: bool, limit: tuple[float, str] | None = None) -> Any:
    """A horizontal bar a row, its parts one behind the other; `limit`: a line across all, and its name."""
    longest = max((sum(bar.parts.values()) for bar in bars), default=0.0) or 1.0
    colours = colours_of(name for bar in bars for name in bar.parts)
    figure, axes = _axes(narrow, 0.5 * len(bars) + 1.7)
    for row, bar in enumerate(bars):
        left = 0.0
        for name, length in bar.parts.items():
            axes.barh(row, length, 0.66, left=left, color=colours[name], edgecolor="white", linewidth=0.6)
            left += length
        axes.text(left + 0.012 * longest, row, bar.told, va="center", fontsize=7 if narrow else 9)
        if bar.floor:
            axes.plot([bar.floor] * 2, [row - 0.42, row + 0.42], color=MARK, linewidth=2)
    handles = [_patch(colour, name.replace("kv_cache", "KV cache")) for name, colour in colours.items()]
    if any(bar.floor for bar in bars):
        handles.append(_line(MARK, "floor", "-"))
    if limit is not None:
        axes.axvline(limit[0], color=LIMIT, linestyle="--", linewidth=1.2)
        handles.append(_line(LIMIT, limit[1], "--"))
    _rows(axes, [bar.label for bar in bars], narrow)
    axes.set_xlim(0, max(longest, limit[0] if limit else 0) * (1.5 if narrow else 1.25))
    axes.set_xlabel(unit)
    figure.legend(handles=handles, loc="outside upper left", ncols=3 if narrow else 8, frameon=False, fontsize=8)
    return figure


def intervals(rates: Rates, *, narrow: bool) -> Any:
    """A point with its interval a row, in percent."""
    figure, axes = _axes(narrow, 0.42 * len(rates.labels) + 0.9)
    for row, (value, low, high) in enumerate(rates.values):
        axes.plot([100 * low, 100 * high], [row, row], color=PARTS["vision"], linewidth=4, alpha=0.45)
        if value is not None:
            axes.plot([100 * value], [row], "o", color=PARTS["vision"], markersize=7)
    _rows(axes, rates.labels, narrow)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("success [%]")
    axes.grid(axis="x", alpha=0.4)
    return figure


def heat(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], *, narrow: bool) -> Any:
    """Shares of one as a map, each cell with its percentage; darker is more, so that grey shades tell it, too."""
    figure, axes = _axes(narrow, (0.52 if narrow else 0.4) * len(rows) + 1.0)
    shown = [[float("nan") if v is None else 100 * v for v in line] for line in values]
    # cividis is even in lightness for all kinds of colour vision; reversed, so that failures stand out as light.
    image = axes.imshow(shown, cmap="cividis_r", vmin=0, vmax=100, aspect="auto")
    for y, line in enumerate(shown):
        for x, value in enumerate(line):
            text = "-" if value != value else f"{value:.0f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if value > 55 else "black")
    _rows(axes, rows, narrow, most=24 if narrow else 60)
    many = len(columns) > (3 if narrow else 6)
    axes.set_xticks(
        range(len(columns)), [fill(c, 24 if many else 12) for c in columns], rotation=60 if many else 0,
        ha="right" if many else "center", rotation_mode="anchor" if many else "default", fontsize=7 if narrow else 9,
    )  # fmt: skip
    if not narrow:
        figure.colorbar(image, ax=axes, label="success [%]", shrink=0.9)
    return figure


def scatter(points: Sequence[Point], *, x: str, y: str, narrow: bool, finest: float | None = None) -> Any:
    """Points by two measures, the front joined; what is chosen is a star, what was dropped a cross. Names stand at the
    front and at what was chosen. x is drawn by its logarithm where it spans much. `finest`: y is drawn by its logarithm
    down to this value, and evenly from there to 0."""
    figure, axes = _axes(narrow, 4.2)
    front = sorted((p.x, p.y) for p in points if p.front)
    axes.step(*zip(*front, strict=True), where="post", color=PARTS["vision"], linewidth=1) if front else None
    for p in points:
        mark, size = ("*", 15) if p.chosen else ("x", 7) if p.dropped else ("o", 7)
        colour = PARTS["denoise"] if p.chosen else LIMIT if p.dropped else PARTS["vision"]
        axes.plot([p.x], [p.y], mark, color=colour, markersize=size, linestyle="none")
        if p.chosen or p.front:
            axes.annotate(
                p.label, (p.x, p.y), xytext=(6, 5), textcoords="offset points", fontsize=7 if narrow else 8
            )  # fmt: skip
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if finest is not None and max(p.y for p in points) > finest:  # else symlog would mark the ends alone
        axes.set_yscale("symlog", linthresh=finest)
    decades = math.log10(max(p.x for p in points) / min(p.x for p in points))
    if decades > 0.7:
        # Few decades have one label between them; more labels would meet on a phone.
        axes.set_xscale("log", subs=(3,) if decades < 2 else ())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.2, y=0.12)
    axes.grid(alpha=0.4)
    marks = [("chosen", "*", PARTS["denoise"]), ("kept", "o", PARTS["vision"]), ("dropped", "x", LIMIT)]
    handles = [_line(colour, name, "none", mark) for name, mark, colour in marks]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, narrow: bool = False,
    limits: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Any:  # fmt: skip
    """A line for each name, its points (x, y) marked; x is drawn by its logarithm, with the values that there are.
    `limits`: lines of what the machine allows, by the name of theirs: dashed, in its colour."""
    figure, axes = _axes(narrow, 4.2)
    colours, marks = dict(zip(series, itertools.cycle(LINES), strict=False)), "osD^vP*X"
    for index, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*points, strict=True), marker=marks[index % len(marks)], color=colours[name], label=name)
    for name, points in (limits or {}).items():
        axes.plot(*zip(*points, strict=True), linestyle="--", linewidth=1, color=colours[name], label=f"{name}: floor")
    ticks = sorted({point[0] for points in series.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.4)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    return figure


def svg(figure: Any) -> str:
    """The figure as SVG; the same figure gives the same text."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "vla_accel", "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def figure_class() -> Any:
    """matplotlib's `Figure`. Raises DependencyError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError(f"pictures need matplotlib ({error}); pip install 'vla_accel[report]'") from error
    return Figure


def _axes(narrow: bool, height: float) -> tuple[Any, Any]:
    figure = figure_class()(figsize=(NARROW if narrow else WIDE, height), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _rows(axes: Any, labels: Sequence[str], narrow: bool, most: int | None = None) -> None:
    """One label a row, from above to below, broken where it is long."""
    most = most or (16 if narrow else 34)
    axes.set_yticks(range(len(labels)), [fill(label, most) for label in labels], fontsize=7 if narrow else 9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _patch(colour: str, name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=name, edgecolor="white")


def _line(colour: str, name: str, style: Any, mark: str = "") -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, marker=mark, label=name)
