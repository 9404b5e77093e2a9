"""Colours of pictures: those of Okabe and Ito, which people with any colour vision can tell apart.

Source: M. Okabe and K. Ito, "Color Universal Design" (2008). A test simulates colour blindness and measures distances.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

OTHER = "other"
"""What no part explains."""
PARTS = {
    "preprocess": "#F0E442",
    "vision": "#0072B2",
    "kv_cache": "#E69F00",
    "denoise": "#009E73",
    "transfer": "#CC79A7",
    "postprocess": "#000000",
    OTHER: "#D9D9D9",
}
"""Of the parts of a call that have a colour of their own."""
SPARE = ("#56B4E9", "#D55E00")
"""Of parts with other names, in their order."""
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Of lines, in their order: without the yellow, which is hard to see on white."""
MARK, LIMIT = "#000000", "#D55E00"
"""Of a floor, and of a line that something should stay below."""


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name; names that are not in `PARTS` take those that are left."""
    names = list(dict.fromkeys(names))
    left = itertools.cycle([*SPARE, *(colour for name, colour in PARTS.items() if name not in (*names, OTHER))])
    return {name: PARTS[name] if name in PARTS else next(left) for name in names}
