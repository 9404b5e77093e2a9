"""Statistics of states and actions, the scaling and the ranges that they define, and openpi's JSON file of them.

openpi and lerobot differ in how they avoid a division by zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_accel.errors import CheckpointError

NormKind = Literal["quantile", "mean_std", "identity"]
_ADDED = 2e-6  # spans up to this are zero: openpi adds 1e-6, lerobot 1e-8
DEVIATIONS = 3.0
"""Half the range of statistics that are mean and std, in standard deviations; 0.27 % of a normal distribution lie
outside."""
FAR = 10.0
"""A number this many spans outside the range shows that the statistics belong to another robot or unit."""

_NO_SPAN = 1.2e-5  # spans up to this are zero: openpi adds 1e-6 to a standard deviation, a sixth of a range
_TINY = 1e-4
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Range:
    """The expected range of each number.

    Attributes:
        low: float64 (n,), or (rows, n) with a row for each action of a chunk; -inf where nothing is known.
        high: Of the same shape; inf where nothing is known.
        meaning: What `low` and `high` are, such as "mean ± 3 std".
    """

    low: np.ndarray
    high: np.ndarray
    meaning: str

    @classmethod
    def around(cls, mean: np.ndarray, std: np.ndarray) -> Range:
        """`DEVIATIONS` standard deviations on each side of the mean."""
        return cls(mean - DEVIATIONS * std, mean + DEVIATIONS * std, f"mean ± {DEVIATIONS:g} std")

    @property
    def span(self) -> np.ndarray:
        """float64, as `low`; inf where nothing is known."""
        return self.high - self.low

    @property
    def known(self) -> bool:
        """Whether anything is known."""
        return bool(np.isfinite(self.span).any())

    def widened(self, spans: float) -> Range:
        """The range with so many more spans on each side, and a margin for float32 rounding."""
        known = np.isfinite(self.span)
        low, high = np.where(known, self.low, 0.0), np.where(known, self.high, 0.0)
        more = spans * (high - low) + _ROUNDING * (1.0 + np.maximum(abs(low), abs(high)))
        return Range(self.low - more, self.high + more, self.meaning)

    def outside(self, x: np.ndarray) -> np.ndarray:
        """Which numbers of x (..., n) lie outside; x is (k, n), k at most the rows, if the range has rows."""
        low, high = (self.low, self.high) if self.low.ndim == 1 else (self.low[: len(x)], self.high[: len(x)])
        return (x < low) | (x > high)

    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """`low` and `high` (n,), over all rows."""
        return (self.low, self.high) if self.low.ndim == 1 else (self.low.min(0), self.high.max(0))

    def describe(self, dimension: int) -> str:
        """The range of one number in words."""
        low, high = self.limits()
        return f"{low[dimension]:.4g} to {high[dimension]:.4g}"

    def suspicious(self) -> dict[int, str]:
        """Problems of the statistics by dimension: no span, or one that is tiny compared with the largest span or with
        its distance from zero."""
        low, high = self.limits()
        known = np.isfinite(high - low)
        span = np.where(known, high - low, 0.0)
        largest, found = span.max(initial=0.0), {}
        for i in np.flatnonzero(known):
            offset = max(abs(low[i]), abs(high[i]))
            if span[i] <= _NO_SPAN:
                found[int(i)] = "no span: the training data have one value"
            elif span[i] < _TINY * largest:
                found[int(i)] = f"a span {largest / span[i]:.2g} times smaller than the largest"
            elif span[i] < _TINY * offset:
                found[int(i)] = f"a span {offset / span[i]:.2g} times smaller than its values"
        return found


@dataclass(frozen=True)
class Statistics:
    """One quantity's statistics, float64 (n,) each; None if the checkpoint does not have them."""

    mean: np.ndarray | None
    std: np.ndarray | None
    q01: np.ndarray | None
    q99: np.ndarray | None


@dataclass(frozen=True)
class Normaliser:
    """(x - low) / span * 2 - 1 for quantiles (low is q01), (x - low) / span otherwise (low is the mean).

    The order of operations is openpi's: x == q01 must give exactly -1, the edge of the first state bin. For the same
    reason `single` rounds x to float32 first if the statistics are float32 (lerobot). "identity" has low 0 and span 1.
    The numbers at `unscaled` stay as they are, and nothing is known of their range.
    """

    kind: NormKind
    low: np.ndarray
    span: np.ndarray
    single: bool = False
    unscaled: tuple[int, ...] = ()

    @classmethod
    def of(cls, statistics: Statistics, kind: NormKind, name: str) -> Normaliser:
        """Return openpi's scaling, which adds 1e-6 to q99 - q01 or std. Raises CheckpointError if `kind` needs other
        statistics."""
        if kind == "quantile":
            low, high, needed = statistics.q01, statistics.q99, "q01 and q99"
        else:
            low, high, needed = statistics.mean, statistics.std, "mean and std"
        if low is None or high is None:
            raise CheckpointError(f"norm_stats.{name}: expected {needed} for {kind} normalisation, got none")
        if low.shape != high.shape:
            raise CheckpointError(
                f"norm_stats.{name}: expected {needed} of one length, got {low.shape} and {high.shape}"
            )
        span = high - low if kind == "quantile" else high
        if (span < 0).any():
            raise CheckpointError(f"norm_stats.{name}: expected q01 <= q99 and std >= 0, got a span of {span.min():g}")
        return cls(kind, low, span + 1e-6)

    @classmethod
    def identity(cls, count: int) -> Normaliser:
        """Return a scaling that leaves `count` numbers unchanged."""
        return cls("identity", np.zeros(count), np.ones(count))

    @property
    def _plain(self) -> tuple[float, float]:
        """`low` and `span` of numbers that stay as they are."""
        return (-1.0, 2.0) if self.kind == "quantile" else (0.0, 1.0)

    def only(self, scaled: np.ndarray) -> Normaliser:
        """Return a scaling that leaves numbers unchanged where `scaled` (n,) bool is false."""
        low, span = (np.where(scaled, own, x) for own, x in zip((self.low, self.span), self._plain, strict=True))
        return replace(self, low=low, span=span, unscaled=tuple(np.flatnonzero(~scaled).tolist()))

    def extended(self, count: int) -> Normaliser:
        """Return the scaling of `count` more numbers, which stay as they are."""
        low, span = self._plain
        lows, spans = (np.append(own, np.full(count, x)) for own, x in ((self.low, low), (self.span, span)))
        added = range(len(self.low), len(self.low) + count)
        return replace(self, low=lows, span=spans, unscaled=(*self.unscaled, *added))

    @property
    def range(self) -> Range:
        """The expected range of each number before it is normalised; infinite without statistics."""
        if self.kind == "identity":
            return Range(np.full(len(self.low), -np.inf), np.full(len(self.low), np.inf), "no statistics")
        found = Range(self.low, self.low + self.span, "quantiles, or minimum and maximum")
        found = Range.around(self.low, self.span) if self.kind == "mean_std" else found
        unknown = np.isin(np.arange(len(self.low)), self.unscaled)
        low, high = np.where(unknown, -np.inf, found.low), np.where(unknown, np.inf, found.high)
        return Range(low, high, found.meaning)

    def cut(self, count: int, padded: int, name: str) -> Normaliser:
        """Return the scaling of the first `count` numbers: openpi computes some statistics after padding, to the
        model's `padded` numbers or with zeros.

        Raises CheckpointError for fewer numbers, for more that are no padding, or if no number varies."""
        beyond = np.abs([self.low[count:], self.span[count:]])
        if len(self.low) < count or (len(self.low) != padded and (beyond > 1e-5).any()):
            its = f"{count} numbers ({name.removesuffix('s')}_dim)"
            raise CheckpointError(f"norm_stats.{name}: expected the preset's {its}, got {len(self.low)}")
        if (self.span[:count] <= _ADDED).all():
            raise CheckpointError(
                f"norm_stats.{name}: expected statistics that vary in at least one of {count} dimensions, got a span "
                "of 0 in each"
            )
        return replace(self, low=self.low[:count], span=self.span[:count])

    def normalise(self, x: np.ndarray) -> np.ndarray:
        """Scale x (..., n) to float64 (..., n)."""
        if x.shape[-1] != len(self.low):
            raise CheckpointError(f"norm_stats: expected {x.shape[-1]} values, got {len(self.low)}")
        scaled = ((x.astype(np.float32) if self.single else x) - self.low) / self.span
        return scaled * 2.0 - 1.0 if self.kind == "quantile" else scaled

    def restore(self, x: np.ndarray) -> np.ndarray:
        """Invert `normalise` on the first n numbers of the last axis and drop the others."""
        x = x[..., : len(self.low)]
        return (x + 1.0) / 2.0 * self.span + self.low if self.kind == "quantile" else x * self.span + self.low

    def invert(self, x: np.ndarray) -> np.ndarray:
        """Invert `restore`: x (..., n) to float64 (..., n); 0 where the span is 0."""
        # Not `normalise`, which rounds as the training data were rounded.
        scaled = np.divide(x - self.low, self.span, out=np.zeros(x.shape), where=self.span != 0)
        return np.where(self.span != 0, scaled * 2.0 - 1.0, 0.0) if self.kind == "quantile" else scaled


def statistics_by_asset(root: Path) -> dict[str, Path]:
    """Map each asset below openpi's `assets` folder to its norm_stats.json; a base checkpoint has several robots."""
    return {str(p.parent.relative_to(root)): p for p in sorted(root.rglob("norm_stats.json"))}


def load_statistics(path: Path) -> dict[str, Statistics]:
    """Read openpi's `norm_stats.json`: statistics of `state` and `actions`. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"statistics: expected {path}, found no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"statistics {path}: expected JSON, got: {error}") from error
    table = content.get("norm_stats", content) if isinstance(content, dict) else None
    if not isinstance(table, dict):
        raise CheckpointError(f"statistics {path}: expected a mapping, got {type(content).__name__}")
    result = {}
    for name in ("state", "actions"):
        if not isinstance(table.get(name), dict):
            raise CheckpointError(f"statistics {path}: expected norm_stats.{name}, found {sorted(table)}")
        values = {k: finite_array(table[name].get(k), f"{path}: {name}.{k}") for k in ("mean", "std", "q01", "q99")}
        result[name] = Statistics(**values)
    return result


def load_scales(path: Path, kind: NormKind) -> tuple[Normaliser, Normaliser]:
    """Read openpi's `norm_stats.json` as the scaling of state and actions. Raises CheckpointError."""
    found = load_statistics(path)
    return Normaliser.of(found["state"], kind, "state"), Normaliser.of(found["actions"], kind, "actions")


def scale_between(
    statistics: Any, ends: tuple[str, str], span: Callable[[np.ndarray], np.ndarray], where: str
) -> Normaliser:
    """Return the scaling between two entries of a table of statistics, of the numbers in its `mask`: all without one.

    Args:
        statistics: The table as JSON has it.
        ends: The entries' names, such as "q01" and "q99".
        span: Keeps the difference (n,) of the two from zero.
        where: Begins the CheckpointError for a table that does not have them.
    """
    if not isinstance(statistics, Mapping):
        raise CheckpointError(f"{where}: expected statistics, got {statistics!r:.60}")
    low, high = (finite_array(statistics.get(name), f"{where}: {name}") for name in ends)
    if low is None or high is None or low.shape != high.shape or (high < low).any():
        raise CheckpointError(f"{where}: expected {' <= '.join(ends)} of one length")
    mask = statistics.get("mask")
    mask = [True] * len(low) if mask is None else mask
    if not isinstance(mask, list) or len(mask) != len(low) or any(scaled not in (0, 1) for scaled in mask):
        raise CheckpointError(f"{where}: mask: expected {len(low)} times true or false, got {mask!r:.120}")
    return Normaliser("quantile", low, span(high - low)).only(np.array(mask, bool))


def finite_array(value: Any, where: str) -> np.ndarray | None:
    """Convert to float64 (n,) of finite numbers; None stays None. Raises CheckpointError that names `where`."""
    if value is None:
        return None
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"statistics {where}: expected a list of finite numbers, got {value!r}") from error
    if array.ndim != 1 or not np.isfinite(array).all():
        raise CheckpointError(f"statistics {where}: expected a list of finite numbers, got {value!r}")
    return array
