"""The sequential test of paired episodes: its error rate holds, its interval is Tango's, clear cases stop early."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vla_accel.tune.noninferiority import ALPHA_WORSE, Pairs, Rule, Verdict, tango
from vla_accel.tune.search import Settings

RULE = Rule(margin=0.02, alpha=0.025)


def verdicts(rule: Rule, differing: float, difference: float, *, searches: int, pairs: int, seed: int) -> list[Verdict]:
    """How searches end that look after every tenth pair. `differing`: share of pairs whose outcomes differ."""
    rng = np.random.default_rng(seed)
    lost, gained = (differing - difference) / 2, (differing + difference) / 2
    found: list[Any] = []
    for _ in range(searches):
        draws = rng.multinomial(10, [lost, gained, 1 - differing], size=pairs // 10).cumsum(axis=0)
        looks = [rule.verdict(Pairs(*map(int, row))) for row in draws]
        found.append(next((v for v in looks if v != "open"), looks[-1]))
    return found


def most(rate: float, searches: int) -> float:
    """A count above which a probability of at most `rate` is refuted: 4 standard deviations, 1 in 30,000."""
    return searches * rate + 4 * math.sqrt(searches * rate * (1 - rate))


# The worst that still counts as worse: exactly by the margin. Rare and frequent differences.
@pytest.mark.parametrize(
    ("differing", "searches"),
    [(0.05, 100), *(pytest.param(d, 2000, marks=pytest.mark.slow) for d in (0.02, 0.03, 0.1, 0.4))],
)
def test_the_error_rate_holds(differing: float, searches: int) -> None:
    found = verdicts(RULE, differing, -0.02, searches=searches, pairs=1000, seed=0)
    assert found.count("not worse") <= most(RULE.alpha, searches)
    assert found.count("worse") <= most(ALPHA_WORSE, searches)


def test_clear_cases_stop_early() -> None:
    assert Settings().each().fewest_pairs == 305, "docs/tuning.md says so"
    assert RULE.verdict(Pairs(same=RULE.fewest_pairs)) == "not worse"
    assert RULE.verdict(Pairs(same=RULE.fewest_pairs - 1)) == "open"
    # Fewer than one exact test of a fixed number of pairs would need, times one and a half.
    assert RULE.fewest_pairs < 1.5 * math.log(RULE.alpha) / math.log(1 - RULE.margin)
    assert RULE.verdict(Pairs(regressions=20, same=40)) == "worse"
    assert RULE.verdict(Pairs(regressions=5, improvements=5, same=90)) == "open"


def test_order_and_looks_do_not_matter() -> None:
    pairs = Pairs()
    for reference, candidate in [(True, False), (False, True), (True, True), (False, False), (True, False)]:
        pairs = pairs.with_pair(reference, candidate)
    assert pairs == Pairs(regressions=2, improvements=1, same=2) and pairs.difference == pytest.approx(-0.2)


def test_what_is_proven_is_below_what_was_seen() -> None:
    for pairs in (Pairs(5, 2, 493), Pairs(0, 0, 300), Pairs(30, 10, 60), Pairs(0, 9, 0)):
        bound = RULE.lower_bound(pairs)
        assert -1 <= bound < pairs.difference + 1e-9
        assert (bound >= -RULE.margin) == (RULE.verdict(pairs) == "not worse")


def score_by_search(pairs: Pairs, delta: float) -> float:
    """Tango's score from its definition: the constrained likelihood is maximised by trying."""
    n, lost, gained = pairs.count, pairs.regressions, pairs.improvements
    p = np.linspace(max(0.0, -delta) + 1e-9, (1 - delta) / 2 - 1e-9, 400_001)  # share of lost pairs
    likelihood = lost * np.log(p) + gained * np.log(p + delta) + (n - lost - gained) * np.log1p(-2 * p - delta)
    best = float(p[np.argmax(likelihood)])
    return (gained - lost - n * delta) / math.sqrt(n * (2 * best + delta - delta**2))


@pytest.mark.parametrize("pairs", [Pairs(12, 4, 34), Pairs(5, 2, 493), Pairs(1, 9, 20)])
def test_tangos_interval_is_where_its_score_is_196(pairs: Pairs) -> None:
    low, high = tango(pairs)
    assert low < pairs.difference < high
    assert score_by_search(pairs, low) == pytest.approx(1.96, abs=2e-3)
    assert score_by_search(pairs, high) == pytest.approx(-1.96, abs=2e-3)


def test_tangos_interval_mirrors_and_needs_pairs() -> None:
    low, high = tango(Pairs(3, 8, 40))
    assert tango(Pairs(8, 3, 40)) == pytest.approx((-high, -low))
    assert tango(Pairs()) == (-1.0, 1.0)
    assert tango(Pairs(same=200))[0] == pytest.approx(-tango(Pairs(same=200))[1]) != 0
