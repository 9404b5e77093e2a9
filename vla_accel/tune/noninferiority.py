"""A sequential test that a candidate's success is not worse than a reference's by a margin, on paired episodes.

Both play the same episode; X is 1 (improvement), 0 or -1 (regression). The hypothesis to refute is "the candidate
is worse by `margin` or more": E[X] <= -margin. Bet against it with a share b of all money before each pair, 0 <= b <
1 / (1 - margin): the money is multiplied by 1 + b (X + margin). This is never negative and, under the hypothesis, at
most 1 on average. So the money grows from 1 to 1 / alpha with a probability of at most alpha, at any number of looks
and any stopping rule (J. Ville, 1939). Reaching it is the proof.

The money is spread over several b, because the best b depends on how often outcomes differ; an average of such bets is
such a bet, too. Pairs must come in random order. The test is exact, and no number of looks has to be planned.

Source: I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", J. R. Stat. Soc. B 86
(2024) 1. The interval for readers is T. Tango's, Stat. Med. 17 (1998) 891.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from vla_accel.measure.proportion import Z_95

Verdict = Literal["not worse", "worse", "open"]
BETS = ((0.15, 0.15), (0.35, 0.20), (0.65, 0.30), (0.92, 0.35))
"""(share of the largest bet, money on it). Large bets win soonest if few outcomes differ, small ones if many do."""
ALPHA_WORSE = 0.05
"""Probability of dropping a candidate as worse that is not: this costs speed, never success."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of finished episodes: won by the reference only, by the candidate only, by both or none."""

    regressions: int = 0
    improvements: int = 0
    same: int = 0

    @property
    def count(self) -> int:
        return self.regressions + self.improvements + self.same

    @property
    def difference(self) -> float:
        """The candidate's rate minus the reference's; 0 without pairs."""
        return (self.improvements - self.regressions) / self.count if self.count else 0.0

    def with_pair(self, reference: bool, candidate: bool) -> Pairs:
        """Add a pair."""
        name = "same" if reference == candidate else "regressions" if reference else "improvements"
        return replace(self, **{name: getattr(self, name) + 1})


@dataclass(frozen=True)
class Rule:
    """`margin`: the share of episodes that counts as worse; `alpha`: the largest probability of a wrong "not worse"."""

    margin: float = 0.02
    alpha: float = 0.025

    def verdict(self, pairs: Pairs) -> Verdict:
        """What is proven so far. Stop at the first verdict that is not open."""
        if money(pairs, -self.margin, better=True) >= 1 / self.alpha:
            return "not worse"
        return "worse" if money(pairs, -self.margin, better=False) >= 1 / ALPHA_WORSE else "open"

    @property
    def fewest_pairs(self) -> int:
        """Pairs needed if no outcome differs; with fewer nothing can be shown."""
        pairs = 1
        while self.verdict(Pairs(same=pairs)) == "open":
            pairs += 1
        return pairs

    def lower_bound(self, pairs: Pairs) -> float:
        """A bound below the true difference with probability 1 - alpha at least, at any stopping time."""
        low, high = -1.0, 1.0
        # The money decreases with the difference: bisect where it passes 1 / alpha.
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if money(pairs, middle, better=True) >= 1 / self.alpha else (low, middle)
        return low


def money(pairs: Pairs, mean: float, *, better: bool) -> float:
    """The money after betting 1 that E[X] is above `mean` (`better`), or below it."""
    side = 1 if better else -1
    # The largest bet loses everything at the worst outcome.
    largest = 1 / max(1 + side * mean, 1e-12)
    total = 0.0
    for share, put in BETS:
        bet = share * largest
        log = math.log(put)
        for outcome, times in ((-1, pairs.regressions), (1, pairs.improvements), (0, pairs.same)):
            log += times * math.log1p(bet * side * (outcome - mean))
        total += math.exp(min(log, 700.0))
    return total


def tango(pairs: Pairs) -> tuple[float, float]:
    """Tango's score interval (95 %) of the difference (candidate minus reference); (-1, 1) without pairs. After an
    early stop it only describes; `lower_bound` is the proof."""
    n, worse, better = pairs.count, pairs.regressions, pairs.improvements
    if not n:
        return -1.0, 1.0

    def score(delta: float) -> float:
        # The most likely share of regressions if the difference is delta: the root of a q^2 + b q + c.
        a = 2 * n
        b = -worse - better + (2 * n - better + worse) * delta
        c = -worse * delta * (1 - delta)
        q = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        spread = n * (2 * q + delta * (1 - delta))
        return (better - worse - n * delta) / math.sqrt(spread) if spread > 0 else math.copysign(
            math.inf, better - worse - n * delta
        )  # fmt: skip

    def root(target: float, low: float, high: float) -> float:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if score(middle) > target else (low, middle)
        return (low + high) / 2

    centre = pairs.difference
    return root(Z_95, -1.0, centre), root(-Z_95, centre, 1.0)
