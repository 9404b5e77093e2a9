"""Pieces of README's pictures: plain SVG, no library, the same bytes from the same figures."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK = "#1a202c"


def document(width: int, height: int, body: Iterable[str]) -> str:
    """The text of a file: `body` on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *body, "</svg>\n"])


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    """A rectangle; `title`: what a pointer above it is told."""
    told = f"<title>{escape(title)}</title>" if title else ""
    end = f">{told}</rect>" if told else "/>"
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{colour}"{end}'
