"""Colours of charts, which people with any colour vision can tell apart: M. Okabe and K. Ito, "Color Universal
Design" (2008)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

OTHER = "other"
"""The rest of a call outside all parts."""
PARTS = {
    "preprocess": "#F0E442",
    "vision": "#0072B2",
    "kv_cache": "#E69F00",
    "denoise": "#009E73",
    "transfer": "#CC79A7",
    "postprocess": "#000000",
    OTHER: "#D9D9D9",
}
"""Parts of a call with fixed colours."""
SPARE = ("#56B4E9", "#D55E00")
"""Colours of other parts, in order."""
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of lines, in order, without yellow, which is hard to see on white."""
MARK, LIMIT = "#000000", "#D55E00"
"""Colours of a floor, and of a limit."""


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name; names outside `PARTS` take the unused ones."""
    names = list(dict.fromkeys(names))
    left = itertools.cycle([*SPARE, *(colour for name, colour in PARTS.items() if name not in (*names, OTHER))])
    return {name: PARTS[name] if name in PARTS else next(left) for name in names}
