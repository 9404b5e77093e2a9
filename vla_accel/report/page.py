"""One HTML file of headings, charts with their figures as tables, and films, which opens offline. Every picture has a
caption, a text for screen readers and two widths; figures in tables carry their unrounded value (`<data value=…>`)."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from vla_accel.errors import ConfigError
from vla_accel.files import replacing
from vla_accel.report.charts import Bar, figure_class, stacked, svg

FILMS = {".mp4": "video/mp4", ".gif": "image/gif"}
MOST_FILMS = 6
"""Most pairs of films in a report."""


@dataclass(frozen=True)
class Number:
    """A figure of a table: the measured value, and its format; None is a dash."""

    value: float | int | None
    form: str = "{:.2f}"

    def __str__(self) -> str:
        return "-" if self.value is None else self.form.format(self.value)


Cell: TypeAlias = "str | Number"


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Picture:
    """A chart: `draw(narrow)` returns a matplotlib figure (`charts`); `words`: its text for screen readers."""

    title: str
    words: str
    draw: Callable[[bool], Any]
    figures: Table


@dataclass(frozen=True)
class Films:
    """Films side by side: (label, file) each, MP4 or GIF."""

    title: str
    films: Sequence[tuple[str, Path]]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


Item: TypeAlias = "Table | Picture | Films | Text"


@dataclass(frozen=True)
class Section:
    """A heading and the items below it."""

    title: str
    items: Sequence[Item]


@dataclass(frozen=True)
class Page:
    """A report; `summary`: the result in one or two sentences."""

    title: str
    summary: str
    sections: Sequence[Section]


def bars_picture(
    title: str, bars: Sequence[Bar], unit: str, figures: Table, limit: tuple[float, str] | None = None
) -> Picture:
    """Stacked bars with their figures."""
    words = f"Stacked bars: {'; '.join(f'{bar.label} {bar.text}' for bar in bars)}."
    return Picture(title, words, lambda narrow: stacked(bars, unit=unit, narrow=narrow, limit=limit), figures)


def write(page: Page, path: Path) -> Path:
    """Write the page atomically and return the path. Raises as `check_path` does."""
    check_path(path)
    text = render(page)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def check_path(path: Path) -> None:
    """Raise ConfigError for a name without .html, and DependencyError without matplotlib."""
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"report: expected a file name ending in .html, got {str(path)!r}")
    figure_class()


def render(page: Page) -> str:
    """Return the page's HTML."""
    sections = [section for section in page.sections if section.items]
    links = "".join(f'<li><a href="#s{i}">{escape(s.title)}</a></li>' for i, s in enumerate(sections))
    body = "".join(
        f'<section id="s{i}" aria-labelledby="h{i}"><h2 id="h{i}">{escape(s.title)}</h2>'
        f"{''.join(_item(item) for item in s.items)}</section>"
        for i, s in enumerate(sections)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The browser itself refuses whatever would have to be loaded.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; media-src data:; '
        "style-src 'unsafe-inline'\">"
        f'<link rel="icon" href="data:,"><title>{escape(page.title)}</title><style>{_STYLE}</style></head><body>'
        f'<a class="skip" href="#main">Skip to the results</a><header><h1>{escape(page.title)}</h1>'
        f'<p class="summary">{escape(page.summary)}</p><nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="main">{body}</main></body></html>\n'
    )


def _item(item: Item) -> str:
    if isinstance(item, Text):
        return f"<p>{escape(item.text)}</p>"
    if isinstance(item, Table):
        return _table(item)
    return _films(item) if isinstance(item, Films) else _picture(item)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    rows = "".join(
        f'<tr><th scope="row">{_cell(row[0])}</th>{"".join(_data_cell(cell) for cell in row[1:])}</tr>'
        for row in table.rows
    )
    # A wide table scrolls by itself, also by keyboard.
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(table.title, quote=True)}">'
        f"<table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
        "</table></div>"
    )


def _data_cell(cell: Cell) -> str:
    kind = ' class="n"' if isinstance(cell, Number) else ""
    return f"<td{kind}>{_cell(cell)}</td>"


def _cell(cell: Cell) -> str:
    if isinstance(cell, Number) and cell.value is not None:
        return f'<data value="{cell.value!r}">{escape(str(cell))}</data>'
    return escape(str(cell))


def _picture(picture: Picture) -> str:
    narrow, wide = (_data("image/svg+xml", svg(picture.draw(n)).encode()) for n in (True, False))
    return (
        f'<figure><picture><source media="(max-width: 700px)" srcset="{narrow}">'
        f'<img src="{wide}" alt="{escape(picture.words, quote=True)}"></picture>'
        f"<figcaption>{escape(picture.title)}</figcaption>{_table(picture.figures)}</figure>"
    )


def _films(films: Films) -> str:
    shown = []
    for label, path in films.films:
        kind, name = FILMS[path.suffix], escape(f"{films.title}: {label}", quote=True)
        data = _data(kind, path.read_bytes())
        film = (
            f'<img src="{data}" alt="{name}">'
            if kind.startswith("image")
            else f'<video controls muted loop playsinline preload="metadata" aria-label="{name}" src="{data}"></video>'
        )
        shown.append(f'<div class="film">{film}<p>{escape(label)}</p></div>')
    return f'<figure><div class="films">{"".join(shown)}</div><figcaption>{escape(films.title)}</figcaption></figure>'


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #444; --page: #fff; --line: #bbb; --link: #00518a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --quiet: #b5b5b5; --page: #16181c; --line: #4a4f57; --link: #7cc0f5; }
  figure img { background: #fff; border-radius: 6px; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 70rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.25rem; border-bottom: 1px solid var(--line); margin-top: 2rem; }
.summary { font-size: 1.1rem; } a { color: var(--link); } :focus-visible { outline: 3px solid #d55e00; }
.skip { position: absolute; left: -999px; } .skip:focus { left: 1rem; top: 0; background: var(--page); padding: .5rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; padding: 0; }
figure { margin: 1rem 0; } figcaption { color: var(--quiet); margin: .3rem 0; }
img, video { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; margin: .6rem 0; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; } th, td { padding: .25rem .6rem; text-align: left;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; } th[scope=row] { font-weight: 400; min-width: 8rem; }
td.n { text-align: right; white-space: nowrap; }
thead th { border-bottom: 2px solid var(--quiet); vertical-align: bottom; }
.films { display: flex; flex-wrap: wrap; gap: 1rem; } .film { flex: 1 1 18rem; } .film p { margin: 0; }
"""
