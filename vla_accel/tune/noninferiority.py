"""A sequential test that a candidate's success is not worse than a reference's by a margin, on paired episodes.

Both play the same episode; its difference X is 1 (gained), 0 or -1 (lost). To be refuted is "the candidate is worse by
`margin` or more": E[X] <= -margin. Bet on the opposite, before each pair, a share b of all money, 0 <= b < 1 / (1 -
margin): the money is multiplied by 1 + b (X + margin). That is never negative, and on average at most 1 where the
candidate is that much worse, whatever else is true of the pairs. So the money never grows from 1 to 1 / alpha with a
probability above alpha, however often one looks and whenever one stops (J. Ville, 1939). Reaching it is the proof.

Money is spread over several b beforehand, because the best depends on how often outcomes differ; the average of such
bets is one, too. Pairs must come in random order. No approximation enters, and no number of looks has to be planned.

Source: I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", J. R. Stat. Soc. B 86
(2024) 1. The interval for readers is T. Tango's, Stat. Med. 17 (1998) 891.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from vla_accel.errors import ConfigError
from vla_accel.measure.proportion import Z_95

Verdict = Literal["not worse", "worse", "open"]
BETS = ((0.15, 0.15), (0.35, 0.20), (0.65, 0.30), (0.92, 0.35))
"""(share of the largest bet, money put on it). Large bets win soonest where pairs hardly differ, small ones where they
do."""
ALPHA_WORSE = 0.05
"""Probability of giving a candidate up as worse that is not: it costs speed, never success."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of finished episodes: won by the reference only, by the candidate only, by both or none."""

    lost: int = 0
    gained: int = 0
    same: int = 0

    @property
    def count(self) -> int:
        return self.lost + self.gained + self.same

    @property
    def difference(self) -> float:
        """The candidate's rate minus the reference's; 0 without pairs."""
        return (self.gained - self.lost) / self.count if self.count else 0.0

    def with_pair(self, reference: bool, candidate: bool) -> Pairs:
        """One pair more."""
        name = "same" if reference == candidate else "lost" if reference else "gained"
        return replace(self, **{name: getattr(self, name) + 1})


@dataclass(frozen=True)
class Rule:
    """`margin`: how much worse counts as worse, a share of episodes; `alpha`: the probability, at most, of calling a
    candidate not worse that is worse by the margin or more."""

    margin: float = 0.02
    alpha: float = 0.025

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise ConfigError(f"margin: expected a share of episodes between 0 and 1, got {self.margin}")
        if not 0 < self.alpha < 0.5:
            raise ConfigError(f"alpha: expected a probability between 0 and 0.5, got {self.alpha}")

    def verdict(self, pairs: Pairs) -> Verdict:
        """What is proven so far. The caller stops at the first that is not open."""
        if money(pairs, -self.margin, better=True) >= 1 / self.alpha:
            return "not worse"
        return "worse" if money(pairs, -self.margin, better=False) >= 1 / ALPHA_WORSE else "open"

    @property
    def fewest_pairs(self) -> int:
        """Pairs that it takes if no outcome differs: with fewer nothing can be shown."""
        pairs = 1
        while self.verdict(Pairs(same=pairs)) == "open":
            pairs += 1
        return pairs

    def lower_bound(self, pairs: Pairs) -> float:
        """The difference that is below the true one with probability 1 - alpha at least, at whatever pair one stops."""
        low, high = -1.0, 1.0
        # The money against a smaller difference is more: halve the range in which it passes 1 / alpha.
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if money(pairs, middle, better=True) >= 1 / self.alpha else (low, middle)
        return low


def money(pairs: Pairs, mean: float, *, better: bool) -> float:
    """What 1 has become by betting that E[X] is above `mean` (`better`), or below it."""
    side = 1 if better else -1
    # The largest bet is lost whole at the worst outcome.
    largest = 1 / max(1 + side * mean, 1e-12)
    total = 0.0
    for share, put in BETS:
        bet = share * largest
        log = math.log(put)
        for outcome, times in ((-1, pairs.lost), (1, pairs.gained), (0, pairs.same)):
            log += times * math.log1p(bet * side * (outcome - mean))
        total += math.exp(min(log, 700.0))
    return total


def tango(pairs: Pairs) -> tuple[float, float]:
    """Tango's score interval (95 %) of the difference (candidate minus reference); (-1, 1) without pairs.

    For a number of pairs that was fixed beforehand; after an early stop it is a description, and `lower_bound` the
    proof.
    """
    n, lost, gained = pairs.count, pairs.lost, pairs.gained
    if not n:
        return -1.0, 1.0

    def score(delta: float) -> float:
        # The most likely share of lost pairs if the difference is delta.
        a = 2 * n
        b = -lost - gained + (2 * n - gained + lost) * delta
        c = -lost * delta * (1 - delta)
        q = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        spread = n * (2 * q + delta * (1 - delta))
        return (gained - lost - n * delta) / math.sqrt(spread) if spread > 0 else math.copysign(
            math.inf, gained - lost - n * delta
        )  # fmt: skip

    def root(target: float, low: float, high: float) -> float:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if score(middle) > target else (low, middle)
        return (low + high) / 2

    centre = pairs.difference
    return root(Z_95, -1.0, centre), root(-Z_95, centre, 1.0)
