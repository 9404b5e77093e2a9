"""What the server counts, as a collector for `prometheus_client`, which writes the page for Prometheus.

Only the event loop writes and reads these counts, so there are no locks.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vla_accel.errors import DependencyError
from vla_accel.server.gpus import gpus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
QUANTILES = (0.5, 0.99)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

COUNTERS = {
    "requests": ("Requests answered, by outcome.", "outcome"),
    "errors": ("Errors reported to clients, by type.", "type"),
    "connections": ("Connections that completed the handshake.", ""),
    "refused": ("Connections refused or ended, by reason.", "reason"),
    "key_requests": ("Requests answered, by the key's name.", "key"),
    "delayed": ("Requests that the rate limit delayed, by the key's name.", "key"),
    "policy_requests": ("Requests answered, by policy.", "policy"),
    "replica_requests": ("Requests computed, by replica.", "replica"),
    "replica_deaths": ("Replicas that died, by replica.", "replica"),
    "retried": ("Requests computed again because a replica died.", ""),
    "received_bytes": ("Bytes of the messages received.", ""),
    "sent_bytes": ("Bytes of the messages sent.", ""),
}
"""Name without the prefix `vla_accel_` -> (help, label)."""
HISTOGRAMS = {
    "request_seconds": ("From a request's arrival until its answer is sent; no bad requests.", _SECONDS, ""),
    "component_seconds": ("Latency by component, as the policy reports it.", _SECONDS, "component"),
    "queue_seconds": ("Time a request waited for its turn.", _SECONDS, ""),
    "batch_size": ("Requests run together.", _SIZES, ""),
}
"""Name -> (help, upper bounds, label)."""
GAUGES = {
    "clients": "Clients connected now.",
    "queue_depth": "Requests waiting for their turn.",
    "running_requests": "Requests that the policy computes now.",
    "replicas": "Replicas that are loaded.",
}


class Histogram:
    """Counts of values in buckets, for each value of one label ("" without a label)."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        self.sums: Counter[str] = Counter()

    def observe(self, value: float, label: str = "") -> None:
        self.counts[label][bisect.bisect_left(self.bounds, value)] += 1
        self.sums[label] += value  # type: ignore[assignment]


class Metrics:
    """Everything that a policy server counts.

    Args:
        gauges: functions that return the current value of each of `GAUGES`.
    """

    def __init__(self, gauges: Mapping[str, Callable[[], int]]) -> None:
        prometheus()  # a missing package is an error at the start
        self.counters = {name: Counter() if label else Counter({"": 0}) for name, (_, label) in COUNTERS.items()}
        self.histograms = {name: Histogram(bounds) for name, (_, bounds, _) in HISTOGRAMS.items()}
        self.recent = Recent()
        """Latency of the last five minutes by component; `request` is the whole request."""
        self.gauges = gauges

    def count(self, name: str, label: str = "", amount: int = 1) -> None:
        """Add to one of `COUNTERS`; without a label its only label is ""."""
        self.counters[name][label] += amount

    def observe_request(self, seconds: float) -> None:
        """Count a request's total time."""
        self.histograms["request_seconds"].observe(seconds)
        self.recent.add("request", seconds)

    def observe_components(self, timing: Mapping[str, Any]) -> None:
        """Count a policy's `policy_timing`: milliseconds under `<component>_ms`."""
        for key, value in timing.items():
            if isinstance(key, str) and key.endswith("_ms") and isinstance(value, (int, float)):
                name, seconds = key.removesuffix("_ms"), float(value) / 1e3
                self.histograms["component_seconds"].observe(seconds, name)
                self.recent.add(name, seconds)

    def text(self) -> str:
        """The page that Prometheus reads."""
        return prometheus().generate_latest(self).decode()

    def collect(self) -> Iterator[Any]:
        """The metric families, as `prometheus_client` asks a registry for them."""
        core = prometheus().core
        for name, (text, label) in COUNTERS.items():
            family = core.CounterMetricFamily(f"vla_accel_{name}", text, labels=[label] if label else [])
            for value, count in self.counters[name].items():
                family.add_metric([value] if label else [], count)
            yield family
        for name, (text, bounds, label) in HISTOGRAMS.items():
            family = core.HistogramMetricFamily(f"vla_accel_{name}", text, labels=[label] if label else [])
            for value, counts in self.histograms[name].counts.items():
                buckets = list(zip((*map("{:g}".format, bounds), "+Inf"), itertools.accumulate(counts), strict=True))
                family.add_metric([value] if label else [], buckets, self.histograms[name].sums[value])
            yield family
        for name, text in GAUGES.items():
            yield core.GaugeMetricFamily(f"vla_accel_{name}", text, value=self.gauges[name]())
        yield core.GaugeMetricFamily(
            "vla_accel_recent_requests_per_second",
            "Requests answered per second over the last seconds; no bad ones.",
            value=self.recent.per_second("request"),
        )
        recent = "vla_accel_recent_seconds", "Latency by component in the last five minutes."
        family = core.GaugeMetricFamily(*recent, labels=["component", "quantile"])
        for name in self.recent.names():
            for q in QUANTILES:
                family.add_metric([name, f"{q:g}"], self.recent.quantile(name, q))
        yield family
        for name, text in (
            ("memory_used_bytes", "Memory used, by GPU."),
            ("memory_total_bytes", "Memory, by GPU."),
            ("clock_hertz", "Clock of the multiprocessors, by GPU."),
        ):
            family = core.GaugeMetricFamily(f"vla_accel_gpu_{name}", text, labels=["gpu"])
            for gpu in gpus():
                family.add_metric([gpu.name], getattr(gpu, name))
            yield family
        yield core.GaugeMetricFamily(
            "process_resident_memory_bytes", "Resident memory of the server process.", value=resident_bytes()
        )


def prometheus() -> Any:
    """The package `prometheus_client`. Raises DependencyError if it is missing."""
    try:
        import prometheus_client.core
    except ImportError as error:
        raise DependencyError(
            f"the server needs prometheus_client: pip install 'vla_accel[serve]' ({error})"
        ) from error
    return prometheus_client


def resident_bytes() -> float:
    """Resident memory of this process; NaN on a system without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.nan


class Recent:
    """Quantiles and rates of the last five minutes in bounded memory, because the event loop reads them.

    Durations are counted in buckets that grow by 4 %, so quantiles are exact to 2 %. Counts are kept for slots of ten
    seconds, of which the oldest expire, and for the whole window.
    """

    _WINDOW_S, _SLOT_S, _GROWTH, _FINEST_S = 300.0, 10.0, 1.04, 1e-6

    def __init__(self) -> None:
        self._slots: deque[tuple[int, defaultdict[str, Counter[int]]]] = deque()
        self._window: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, name: str, seconds: float) -> None:
        """Count a duration."""
        bucket = round(math.log(max(seconds, self._FINEST_S) / self._FINEST_S, self._GROWTH))
        for counts in (self._slot(), self._window):
            counts[name][bucket] += 1

    def names(self) -> list[str]:
        """Names with durations in the window."""
        self._slot()
        return list(self._window)

    def quantile(self, name: str, q: float) -> float:
        """A quantile of the durations in the window, in seconds; NaN without any."""
        self._slot()
        counts = self._window.get(name, Counter())
        left = math.ceil(q * counts.total())
        for bucket in sorted(counts):
            left -= counts[bucket]
            if left <= 0:
                return self._FINEST_S * self._GROWTH**bucket
        return math.nan

    def per_second(self, name: str) -> float:
        """Durations counted per second, over the last complete slot and the current one."""
        self._slot()
        now = time.monotonic()
        first = int(now / self._SLOT_S) - 1
        count = sum(slot[name].total() for number, slot in self._slots if number >= first and name in slot)
        return count / (now - first * self._SLOT_S)

    def _slot(self) -> defaultdict[str, Counter[int]]:
        """The current slot; expired slots are removed from the window."""
        number = int(time.monotonic() / self._SLOT_S)
        while self._slots and self._slots[0][0] <= number - self._WINDOW_S / self._SLOT_S:
            for name, counts in self._slots.popleft()[1].items():
                self._window[name] -= counts  # Counter subtraction drops what falls to zero
                if not self._window[name]:
                    del self._window[name]
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, defaultdict(Counter)))
        return self._slots[-1][1]
