"""The SVG pictures of README and docs/results.md, drawn without a library: equal figures give equal bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.tables.table import MODELS, steps_of
from vla_accel.report import colours
from vla_accel.report.colours import OTHER

Report = Mapping[str, Any]
INK = "#1a202c"
ROW, GAP = 22, 34
"""Pixels of a bar with its margin, and between groups."""


def document(width: int, height: int, body: Iterable[str]) -> str:
    """The text of an SVG file with a white background."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *body, "</svg>\n"])


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    """A rectangle; `title` shows up below a pointer."""
    hint = f"<title>{escape(title)}</title>" if title else ""
    end = f">{hint}</rect>" if hint else "/>"
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{colour}"{end}'


@dataclass(frozen=True)
class Bar:
    """A stacked bar: its label, (part, ms, colour) of each part, the text behind it, and a mark in ms."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    text: str
    floor: float | None = None

    @property
    def ms(self) -> float:
        return sum(ms for _, ms, _ in self.parts)


Groups = Sequence[tuple[str, Sequence[Bar]]]


def draw(groups: Groups, sizes: tuple[int, int, int], legend: Sequence[str], top: int, most: float = math.inf) -> str:
    """Groups of horizontal bars below each other. `sizes`: pixels left of the bars, of the longest bar, right of it.
    `most`: milliseconds at which a bar is cut off, with a gap."""
    left, width, right = sizes
    scale = width / min(most, max(bar.ms for _, bars in groups for bar in bars))
    y, body = top, list(legend)
    for title, bars in groups:
        y += 18
        body.append(text(8, y - 4, title, weight="bold"))
        for one in bars:
            body.append(text(left - 8, y + 13, one.label, anchor="end"))
            x = float(left)
            for name, ms, colour in one.parts:
                pixels = min(ms * scale, left + width - x)
                body.append(bar(x, y, pixels, ROW - 5, colour, f"{name}: {ms:.2f} ms"))
                x += pixels
            if one.ms > most:
                body.append(f'<path d="M{x - 26:.1f} {y + ROW - 4}l6 {3 - ROW}" stroke="#ffffff" stroke-width="4"/>')
            if one.floor:
                mark = f"M{left + one.floor * scale:.1f} {y - 2}v{ROW - 1}"
                body.append(f'<path d="{mark}" stroke="{INK}" stroke-width="2"/>')
            body.append(text(x + 8, y + 13, one.text))
            y += ROW
        y += GAP - 18
    return document(left + width + right, y, body)


# -- components of a call -----------------------------------------------------------------------------------------

PARTS = {**{name: colours.PARTS[name] for name in ("vision", "kv_cache", "denoise")}, "the rest": colours.PARTS[OTHER]}
SYSTEMS = {
    "native-bf16": "BF16",
    "native-fp8": "FP8 prefix",
    "native-fp8-vision": "FP8 prefix, vision",
    "native-int8-denoise": "INT8 expert",
    "native-fp8-int8-denoise": "FP8 prefix, INT8 expert",
    "native-fp8-vision-int8-denoise": "FP8 both, INT8 expert",
}
"""Labels of the systems that the picture shows; a report need not have all of them."""


def draw_latency(reports: Sequence[Report]) -> str:
    """A group for each `vla-accel bench` report and step count, a bar for each native system. Returns an SVG file."""
    legend, x = [], 180
    for name, colour in PARTS.items():
        legend += [bar(x, 10, 12, 12, colour), text(x + 17, 20, name.replace("kv_cache", "KV cache"))]
        x += 95
    legend.append(f'<path d="M{x + 6} 8v16" stroke="{INK}" stroke-width="2"/>' + text(x + 14, 20, "floor"))
    groups = []
    for report in reports:
        model = report["model"]
        base = {row["steps"]: row["median_ms"] for row in report["rows"] if row["system"] == "openpi-eager"}
        for steps in dict.fromkeys(row["steps"] for row in report["rows"]):
            rows = [r for r in report["rows"] if r["steps"] == steps and r["system"] in SYSTEMS and r["parts_ms"]]
            title = f"{_title(model)}, {steps} step{'s' * (steps > 1)}"
            if rows:
                groups.append((title, [_latency_bar(row, base.get(steps)) for row in rows]))
    return draw(groups, (180, 460, 250), legend, 40)


def _title(model: Report) -> str:
    return f"{MODELS[model['kind']]}, {model['views']} views, {model['action_horizon']} actions"


def _latency_bar(row: Report, base: float | None) -> Bar:
    whole = row["median_ms"]
    lengths = {name: row["parts_ms"].get(name, 0.0) for name in ("vision", "kv_cache", "denoise")}
    lengths["the rest"] = max(whole - sum(lengths.values()), 0.0)
    faster = f", {base / whole:.1f}× openpi" if base else ""
    parts = [(name, ms, PARTS[name]) for name, ms in lengths.items()]
    words = f"{whole:.2f} ms, {1e3 / whole:.0f} Hz{faster}"
    return Bar(SYSTEMS[row["system"]], parts, words, row["floors_ms"].get("total"))


# -- other projects' code on the same GPU, and what others published ------------------------------------------------

LOOKED_UP = "2026-11-22"
"""When the figures of `PUBLISHED` were on their pages."""
LABELS = {
    "native-fp8": "FP8",
    "native-fp8-vision": "FP8 with vision",
    "native-fp8-vision-int8-denoise": "FP8, INT8 expert",
}
THEIRS = {
    "realtime-vla": "realtime-vla", "openpi-max-autotune": "openpi, compiled", "openpi-eager": "openpi, eager",
    "lerobot-eager": "lerobot, eager",
}  # fmt: skip
"""Labels of other projects' systems."""
PLAIN, FASTEST, SAME_GPU, OTHER_GPU = colours.LINES[0], colours.LINES[5], colours.LINES[4], "#f3dcae"
"""Colours of our call in BF16, of our fastest, and of others' code on the same GPU and on another."""
MOST_MS = 60.0
"""Longer bars are cut off."""


@dataclass(frozen=True)
class Published:
    """The fastest published figure of another project: `ms` of a call with `views`; `how`: precision and GPU."""

    ms: float
    who: str
    how: str
    views: int

    @property
    def page(self) -> str:
        return PAGES[self.who]


PAGES = {
    "FlashRT": "https://github.com/flashrt-project/FlashRT",
    "ApxInf": "https://github.com/infinigence/ApxInf",
}
PUBLISHED = {
    "pi05": Published(17.58, "FlashRT", "FP8, RTX 5090", 2),
    "pi0": Published(24.48, "FlashRT", "FP8, RTX 5090", 3),
    "smolvla": Published(13.47, "ApxInf", "BF16, RTX 4090", 2),
    "groot": Published(16.6, "FlashRT", "FP8, RTX 5090", 2),
}
"""By family."""


def draw_models(reports: Sequence[Report]) -> str:
    """A group of bars for each model, at the first step count of its first `vla-accel bench` report. Later reports of
    the same shape on the same GPU add other projects' systems. Returns the text of the SVG file."""
    shapes: dict[tuple[Any, ...], list[Report]] = {}
    for report in reports:
        model = report["model"]
        shape = model["kind"], model["views"], model["action_horizon"], report["hardware"]["gpu"]
        shapes.setdefault(shape, []).append(report)
    return draw([_model_group(*same) for same in shapes.values()], (150, 380, 290), (), 12, MOST_MS)


def _model_group(report: Report, *others: Report) -> tuple[str, list[Bar]]:
    model, steps = report["model"], report["rows"][0]["steps"]
    gpu = report["hardware"]["gpu"].removeprefix("NVIDIA ")
    found, theirs = medians(report, steps), {}
    for one in (*others, report):
        theirs |= {name: ms for name, ms in medians(one, steps).items() if name in THEIRS}

    def drawn(label: str, ms: float, colour: str, words: str) -> Bar:
        return Bar(label, [(label, ms, colour)], f"{ms:.2f} ms{words}")

    plain = found["native-bf16"]
    bars = [drawn("BF16", plain, PLAIN, "")]
    fastest: str = min((name for name in found if name.startswith("native-")), key=found.__getitem__)
    if fastest != "native-bf16":
        bars.append(drawn(LABELS.get(fastest, fastest), found[fastest], FASTEST, ""))
    for name in sorted(theirs, key=theirs.__getitem__):
        bars.append(drawn(THEIRS[name], theirs[name], SAME_GPU, f", {theirs[name] / plain:.1f} times BF16"))
    other = PUBLISHED.get(model["kind"])
    if other is not None and other.views == model["views"]:
        bars.append(drawn(other.who, other.ms, OTHER_GPU, f", published for {other.how}"))
    return f"{_title(model)}, {steps_of(model['kind'], steps)}, {gpu}", bars


def medians(report: Report, steps: int) -> dict[str, float]:
    """Milliseconds of each system with so many steps."""
    return {row["system"]: row["median_ms"] for row in report["rows"] if row["steps"] == steps}


def sources(reports: Sequence[Report]) -> str:
    """The paragraph below README's picture: whose figures these are, and how they differ from ours."""
    known = {report["model"]["kind"] for report in reports} & PUBLISHED.keys()
    pages = {PUBLISHED[kind].who: PUBLISHED[kind].page for kind in sorted(known)}
    names = ", ".join(f"[{who}]({page})" for who, page in sorted(pages.items()))
    return (
        "Blue: whole calls of this package. Orange: other projects' code on the same GPU; compiled: torch.compile with "
        f"max-autotune. Pale: the fastest figures published by {LOOKED_UP} for other GPUs, measured by their authors "
        f"({names}; FlashRT times only the replay of its CUDA graph).\n"
    )
