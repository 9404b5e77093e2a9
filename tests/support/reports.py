"""What the tests of reports share."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def figures_in(text: str) -> set[float]:
    """All measured values that a page's tables carry."""
    return {float(value) for value in re.findall(r'<data value="([^"]+)">', text)}
