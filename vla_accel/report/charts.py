"""Charts of reports by matplotlib, which is imported when one is drawn: stacked bars, rates with intervals, a heat map,
points, lines. Each comes in two widths, so that text stays readable on a phone; `svg` renders it."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from vla_accel.errors import DependencyError
from vla_accel.report.colours import LIMIT, LINES, MARK, PARTS, colours_of

WIDE, NARROW = 9.0, 3.7
"""Widths in inches at 100 dots each."""


@dataclass(frozen=True)
class Bar:
    """A stacked bar: lengths by name; `text` behind it; `floor`: position of a mark, or None."""

    label: str
    parts: Mapping[str, float]
    text: str = ""
    floor: float | None = None


@dataclass(frozen=True)
class Point:
    """A point; `front`: nothing is better in both measures; `dropped`: a gate refused it; `reference`: the others are
    compared with it."""

    label: str
    x: float
    y: float
    chosen: bool = False
    front: bool = False
    dropped: bool = False
    reference: bool = False


def stacked(bars: Sequence[Bar], *, unit: str, narrow: bool, limit: tuple[float, str] | None = None) -> Any:
    """Draw a horizontal bar a row; `limit`: position and name of a line across all bars."""
    longest = max((sum(bar.parts.values()) for bar in bars), default=0.0) or 1.0
    colours = colours_of(name for bar in bars for name in bar.parts)
    figure, axes = _axes(narrow, 0.5 * len(bars) + 1.7, unit, rows=[bar.label for bar in bars])
    for row, bar in enumerate(bars):
        left = 0.0
        for name, length in bar.parts.items():
            axes.barh(row, length, 0.66, left=left, color=colours[name], edgecolor="white", linewidth=0.6)
            left += length
        axes.text(left + 0.012 * longest, row, bar.text, va="center", fontsize=7 if narrow else 9)
        if bar.floor:
            axes.plot([bar.floor] * 2, [row - 0.42, row + 0.42], color=MARK, linewidth=2)
    handles = [_patch(colour, name.replace("kv_cache", "KV cache")) for name, colour in colours.items()]
    if any(bar.floor for bar in bars):
        handles.append(_line(MARK, "floor", "-"))
    if limit is not None:
        axes.axvline(limit[0], color=LIMIT, linestyle="--", linewidth=1.2)
        handles.append(_line(LIMIT, limit[1], "--"))
    axes.set_xlim(0, max(longest, limit[0] if limit else 0) * (1.5 if narrow else 1.25))
    return _with_legend(figure, 3 if narrow else 8, handles=handles)


def intervals(labels: Sequence[str], rates: Sequence[tuple[float | None, float, float]], *, narrow: bool) -> Any:
    """Draw a share of one with its interval (value, low, high) a row, in percent; a value may be None."""
    figure, axes = _axes(narrow, 0.42 * len(labels) + 0.9, "success [%]", rows=labels)
    for row, (value, low, high) in enumerate(rates):
        axes.plot([100 * low, 100 * high], [row, row], color=PARTS["vision"], linewidth=4, alpha=0.45)
        if value is not None:
            axes.plot([100 * value], [row], "o", color=PARTS["vision"], markersize=7)
    axes.set_xlim(-2, 102)
    axes.grid(axis="x", alpha=0.4)
    return figure


def heat(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], *, narrow: bool) -> Any:
    """Draw a map of shares of one, each cell with its percentage; darker is more, also in shades of grey."""
    height = (0.52 if narrow else 0.4) * len(rows) + 1.0
    figure, axes = _axes(narrow, height, rows=rows, most=24 if narrow else 60)
    shown = [[float("nan") if v is None else 100 * v for v in line] for line in values]
    # cividis is even in lightness for all kinds of colour vision; reversed, so that failures stand out as light.
    image = axes.imshow(shown, cmap="cividis_r", vmin=0, vmax=100, aspect="auto")
    for y, line in enumerate(shown):
        for x, value in enumerate(line):
            text = "-" if value != value else f"{value:.0f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if value > 55 else "black")
    axes.set_ylim(len(rows) - 0.5, -0.5)  # imshow has changed it
    many = len(columns) > (3 if narrow else 6)
    axes.set_xticks(
        range(len(columns)), [fill(c, 24 if many else 12) for c in columns], rotation=60 if many else 0,
        ha="right" if many else "center", rotation_mode="anchor" if many else "default", fontsize=7 if narrow else 9,
    )  # fmt: skip
    if not narrow:
        figure.colorbar(image, ax=axes, label="success [%]", shrink=0.9)
    return figure


def scatter(points: Sequence[Point], *, x: str, y: str, narrow: bool, finest: float | None = None) -> Any:
    """Draw points by two measures, with the front joined, and names at the front, the chosen and the reference
    point. x is logarithmic if it spans much; y is logarithmic down to `finest`, and linear below."""
    figure, axes = _axes(narrow, 4.2, x, y)
    front = sorted((p.x, p.y) for p in points if p.front)
    axes.step(*zip(*front, strict=True), where="post", color=PARTS["vision"], linewidth=1) if front else None
    marks = {"chosen": ("*", 15, PARTS["denoise"]), "kept": ("o", 7, PARTS["vision"]), "dropped": ("x", 7, LIMIT)}
    for p in points:
        mark, size, colour = marks["chosen" if p.chosen else "dropped" if p.dropped else "kept"]
        axes.plot([p.x], [p.y], mark, color=colour, markersize=size, linestyle="none")
        if p.chosen or p.front or p.reference:
            letters = 7 if narrow else 8
            axes.annotate(p.label, (p.x, p.y), xytext=(6, 5), textcoords="offset points", fontsize=letters)
    if finest is not None and max(p.y for p in points) > finest:  # else symlog would mark only the ends
        axes.set_yscale("symlog", linthresh=finest)
    decades = math.log10(max(p.x for p in points) / min(p.x for p in points))
    if decades > 0.7:
        # Few decades have one label between them; more labels would overlap on a phone.
        axes.set_xscale("log", subs=(3,) if decades < 2 else ())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.2, y=0.12)
    handles = [_line(colour, name, "none", mark) for name, (mark, _, colour) in marks.items()]
    return _with_legend(figure, 3, handles=handles)


Lines = Mapping[str, Sequence[tuple[float, float]]]


def lines(series: Lines, *, x: str, y: str, narrow: bool = False, limits: Lines | None = None) -> Any:
    """Draw a line through the points of each name, over a logarithmic x; `limits`: dashed lines in the same colours."""
    figure, axes = _axes(narrow, 4.2, x, y)
    colours, marks = dict(zip(series, itertools.cycle(LINES), strict=False)), "osD^vP*X"
    for index, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*points, strict=True), marker=marks[index % len(marks)], color=colours[name], label=name)
    for name, points in (limits or {}).items():
        axes.plot(*zip(*points, strict=True), linestyle="--", linewidth=1, color=colours[name], label=f"{name}: floor")
    ticks = sorted({point[0] for points in series.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(bottom=0)
    return _with_legend(figure, 2)


def svg(figure: Any) -> str:
    """Return the figure as SVG; the same figure gives the same text."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "vla_accel", "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def figure_class() -> Any:
    """Return matplotlib's `Figure`. Raises DependencyError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError(f"pictures need matplotlib ({error}); pip install 'vla_accel[report]'") from error
    return Figure


def _axes(
    narrow: bool, height: float, x: str = "", y: str = "", rows: Sequence[str] | None = None, most: int | None = None
) -> tuple[Any, Any]:
    """A figure and its axes; `rows`: one label a row from top to bottom, wrapped at `most` letters; else a grid."""
    figure = figure_class()(figsize=(NARROW if narrow else WIDE, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if rows is None:
        axes.grid(alpha=0.4)
    else:
        most = most or (16 if narrow else 34)
        axes.set_yticks(range(len(rows)), [fill(label, most) for label in rows], fontsize=7 if narrow else 9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
    return figure, axes


def _with_legend(figure: Any, columns: int, **more: Any) -> Any:
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=8, **more)
    return figure


def _patch(colour: str, name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=name, edgecolor="white")


def _line(colour: str, name: str, style: Any, mark: str = "") -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=style, marker=mark, label=name)
