"""The diagrams of docs/ as SVG: boxes in rows, joined by arrows. `make tables` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.svg import INK, document, text

HOST, GPU, NEUTRAL = "#fdf1d6", "#d6e9f5", "#edf2f7"
"""Fill of what runs on the host, on the GPU, and elsewhere."""
WIDTH, HEIGHT, GAP, MARGIN = 160, 52, 44, 12
"""Pixels of a box, between boxes, and around them."""


@dataclass(frozen=True)
class Box:
    """A box with a title and a line below it. `wide`: how many columns it covers."""

    title: str
    line: str = ""
    fill: str = NEUTRAL
    wide: int = 1


def diagram(rows: Sequence[Sequence[Box | None]], arrows: Sequence[tuple[str, str, str]]) -> str:
    """An SVG file. `rows`: boxes by row and column, None leaves a column empty. `arrows`: titles of two boxes, and the
    label between them."""
    places: dict[str, tuple[float, float, float]] = {}
    body = [
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    ]
    columns = 0
    for index, row in enumerate(rows):
        column, y = 0, MARGIN + index * (HEIGHT + GAP)
        for box in row:
            x, count = MARGIN + column * (WIDTH + GAP), box.wide if box else 1
            column += count
            if box is None:
                continue
            width = count * (WIDTH + GAP) - GAP
            places[box.title] = (x, y, width)
            body.append(
                f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6" fill="{box.fill}" stroke="{INK}"/>'
            )
            middle = x + width / 2
            body.append(text(middle, y + (22 if box.line else 31), box.title, anchor="middle", weight="bold"))
            if box.line:
                small = (
                    f'<text x="{middle:g}" y="{y + 40}" text-anchor="middle" font-size="11">{escape(box.line)}</text>'
                )
                body.append(small)
        columns = max(columns, column)
    body += [_arrow(places[start], places[end], label) for start, end, label in arrows]
    width = 2 * MARGIN + columns * (WIDTH + GAP) - GAP
    return document(width, 2 * MARGIN + len(rows) * (HEIGHT + GAP) - GAP, body)


def _arrow(start: tuple[float, float, float], end: tuple[float, float, float], label: str) -> str:
    """A straight line between boxes of one row, or from a box to the row below or above, with its label."""
    (x1, y1, w1), (x2, y2, w2) = start, end
    if y1 == y2:
        left, right, y = (x1 + w1, x2, y1 + HEIGHT / 2) if x1 < x2 else (x1, x2 + w2, y1 + HEIGHT / 2)
        line, middle, words = f"M{left:g} {y:g}H{right:g}", (left + right) / 2, y - 6
        anchor = "middle"
    else:
        low, high = max(x1, x2), min(x1 + w1, x2 + w2)
        x = (low + high) / 2 if low < high else x1 + w1 / 2
        top, bottom = (y1 + HEIGHT, y2) if y1 < y2 else (y1, y2 + HEIGHT)
        target = x if low < high else x2 + w2 / 2
        line, middle, words, anchor = f"M{x:g} {top:g}L{target:g} {bottom:g}", x + 6, (top + bottom) / 2 + 4, "start"
    drawn = f'<path d="{line}" stroke="{INK}" fill="none" marker-end="url(#head)"/>'
    small = f'<text x="{middle:g}" y="{words:g}" text-anchor="{anchor}" font-size="11">{escape(label)}</text>'
    return drawn + (small if label else "")


CALL = diagram(
    [
        [Box("check", "keys, dtypes, NaN", HOST), Box("tokenize", "prompt, state", HOST),
         Box("stage", "one copy", HOST), None, Box("unnormalize", "robot's units", HOST)],
        [Box("vision", "CUDA graph 1", GPU), None, Box("prefix", "K/V cache, graph 2", GPU),
         Box("denoise", "steps, graph 2", GPU), Box("download", "graph 2", GPU)],
    ],
    [
        ("check", "tokenize", ""), ("tokenize", "stage", ""), ("check", "vision", "images"),
        ("vision", "prefix", "image tokens"), ("stage", "prefix", "tokens, noise"), ("prefix", "denoise", ""),
        ("denoise", "download", ""), ("download", "unnormalize", "the only wait"),
    ],
)  # fmt: skip
"""The life of a call."""
SERVER = diagram(
    [
        [Box("client A", "websocket"), Box("connection", "decode, limits, key", HOST),
         Box("turns", "one queue a client", HOST), Box("dispatch", "batches", HOST),
         Box("replica 1", "policy on cuda:0", GPU)],
        [Box("client B", "websocket"), None, None, None,
         Box("replica 2", "policy on cuda:1", GPU)],
    ],
    [
        ("client A", "connection", ""), ("client B", "connection", ""), ("connection", "turns", ""),
        ("turns", "dispatch", ""), ("dispatch", "replica 1", ""), ("dispatch", "replica 2", ""),
    ],
)  # fmt: skip
"""The path of a request through `vla-accel serve`."""
PLAN = diagram(
    [
        [None, Box("kernel choice", "why_not(gpu, sizes), timings", HOST)],
        [Box("component", "eager module"), Box("plan", "shapes and buffers", HOST),
         Box("chain", "dependent launches", HOST), Box("CUDA graph", "one replay a call", GPU)],
        [None, Box("ledger", "what runs, and why", HOST)],
    ],
    [
        ("component", "plan", ""), ("kernel choice", "plan", ""), ("plan", "chain", ""),
        ("chain", "CUDA graph", "record"), ("plan", "ledger", ""),
    ],
)  # fmt: skip
"""From a component to its CUDA graph."""
DIAGRAMS = {"diagram_call": CALL, "diagram_server": SERVER, "diagram_plan": PLAN}
"""SVG files by name."""
