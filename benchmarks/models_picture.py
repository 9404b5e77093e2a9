"""README's picture: a call of each model, beside the fastest that others have published.

What others published are their figures, on their GPUs: by their own account, as their pages said it on `LOOKED_UP`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.markdown import MODELS, steps_of
from benchmarks.svg import bar, document, text
from vla_accel.report import colours

LOOKED_UP = "2026-11-22"
_LEFT, _WIDTH, _RIGHT = 150, 380, 290  # of the labels, the longest bar and the text behind it, in pixels
_ROW, _GAP, _TOP = 22, 34, 12
LABELS = {
    "native-fp8": "FP8",
    "native-fp8-vision": "FP8 with vision",
    "native-fp8-vision-int8-denoise": "FP8, INT8 expert",
}
PLAIN, FASTEST, OTHERS = colours.LINES[0], colours.LINES[5], colours.LINES[4]
"""Of a call in BF16, of the fastest one, of the published one."""


@dataclass(frozen=True)
class Published:
    """The fastest figure that somebody else has published: `ms` of a call with so many `views`; `how` it ran."""

    ms: float
    who: str
    how: str
    views: int

    @property
    def page(self) -> str:
        """Where it stands."""
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


def draw_models(reports: Sequence[Mapping[str, Any]]) -> str:
    """A group of bars for each `vla-accel bench` report, of its first number of steps. Returns the SVG file's
    text."""
    groups = [_group(report) for report in reports]
    scale, y, body = _WIDTH / max(ms for _, rows in groups for _, ms, _, _ in rows), _TOP, []
    for title, rows in groups:
        y += 18
        body.append(text(8, y - 4, title, weight="bold"))
        for name, ms, colour, told in rows:
            body.append(text(_LEFT - 8, y + 13, name, anchor="end"))
            body.append(bar(_LEFT, y, ms * scale, _ROW - 5, colour, f"{name}: {ms:.2f} ms"))
            body.append(text(_LEFT + ms * scale + 8, y + 13, f"{ms:.2f} ms, {told}"))
            y += _ROW
        y += _GAP - 18
    return document(_LEFT + _WIDTH + _RIGHT, y, body)


def _group(report: Mapping[str, Any]) -> tuple[str, list[tuple[str, float, str, str]]]:
    """A title, and of each bar its label, ms, colour and what stands behind it."""
    model, steps = report["model"], report["rows"][0]["steps"]
    found = {row["system"]: row["median_ms"] for row in report["rows"] if row["steps"] == steps}
    theirs = {name.partition("-")[0]: ms for name, ms in found.items() if name in ("openpi-eager", "lerobot-eager")}
    gpu = report["hardware"]["gpu"].removeprefix("NVIDIA ")

    def ours(system: str, label: str, colour: str) -> tuple[str, float, str, str]:
        faster = "".join(f", {ms / found[system]:.1f}× {name}" for name, ms in theirs.items())
        return label, found[system], colour, f"{gpu}{faster}"

    rows = [ours("native-bf16", "BF16", PLAIN)]
    fastest: str = min((name for name in found if name.startswith("native-")), key=found.__getitem__)
    if fastest != "native-bf16":
        rows.append(ours(fastest, LABELS.get(fastest, fastest), FASTEST))
    other = PUBLISHED.get(model["kind"])
    if other is not None and other.views == model["views"]:
        rows.append((other.who, other.ms, OTHERS, other.how))
    views, actions = model["views"], model["action_horizon"]
    return f"{MODELS[model['kind']]}, {views} views, {actions} actions, {steps_of(model['kind'], steps)}", rows


def sources(reports: Sequence[Mapping[str, Any]]) -> str:
    """What stands below the picture: whose figures these are, and how they differ."""
    known = {report["model"]["kind"] for report in reports} & PUBLISHED.keys()
    pages = {PUBLISHED[kind].who: PUBLISHED[kind].page for kind in sorted(known)}
    names = ", ".join(f"[{who}]({page})" for who, page in sorted(pages.items()))
    return (
        f"Blue: ours, whole calls. Orange: the fastest figure that others had published by {LOOKED_UP}, by their own "
        f"account and on their GPU ({names}; FlashRT's are of the replayed graph alone).\n"
    )
