"""A proportion and what a count of it leaves open. Imports no torch."""

from __future__ import annotations

import math

from vla_accel.errors import ConfigError

Z_95 = 1.959963984540054


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """Wilson's score interval (95 %) of a proportion; (0, 1) without episodes.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209. Unlike the normal approximation it
    does not collapse to a point at 0 or 100 %.
    """
    if not 0 <= successes <= episodes:
        raise ConfigError(f"successes: expected 0 to {episodes}, got {successes}")
    if episodes == 0:
        return 0.0, 1.0
    rate, z = successes / episodes, Z_95
    scale = 1 + z * z / episodes
    centre = (rate + z * z / (2 * episodes)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes**2))
    # At the ends the exact bound is 0 or 1; rounding must not move it.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == episodes else min(1.0, centre + half)
    return low, high
