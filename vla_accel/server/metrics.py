"""What the server counts, as a collector for `prometheus_client`, which writes the page for Prometheus.

Only the event loop writes and reads these counts, so there are no locks.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_accel.errors import DependencyError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
QUANTILES = (0.5, 0.99)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_WINDOW_S, _RATE_S = 300.0, 10.0

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


class Metrics:
    """Everything that a policy server counts. `gauges`: functions that return the current value of each of `GAUGES`."""

    def __init__(self, gauges: Mapping[str, Callable[[], int]]) -> None:
        prometheus()  # a missing package is an error at the start
        self.gauges = gauges
        self.counters = {name: Counter() if label else Counter({"": 0}) for name, (_, label) in COUNTERS.items()}
        # By label: the number of values in each bucket, and their sum.
        self._histograms: dict[str, dict[str, Any]] = {name: {} for name in HISTOGRAMS}
        self.recent = Recent()

    def count(self, name: str, label: str = "", amount: int = 1) -> None:
        """Add to one of `COUNTERS`; without a label its only label is ""."""
        self.counters[name][label] += amount

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Add a value to one of `HISTOGRAMS`."""
        bounds = HISTOGRAMS[name][1]
        histogram = self._histograms[name].setdefault(label, [[0] * (len(bounds) + 1), 0.0])
        histogram[0][bisect.bisect_left(bounds, value)] += 1
        histogram[1] += value

    def observe_request(self, seconds: float) -> None:
        """Count a request's total time."""
        self.observe("request_seconds", seconds)
        self.recent.add("request", seconds)

    def observe_components(self, timing: Mapping[str, Any]) -> None:
        """Count a policy's `policy_timing`: milliseconds under `<component>_ms`."""
        for key, value in timing.items():
            if isinstance(key, str) and key.endswith("_ms") and isinstance(value, (int, float)):
                name, seconds = key.removesuffix("_ms"), float(value) / 1e3
                self.observe("component_seconds", seconds, name)
                self.recent.add(name, seconds)

    def text(self) -> str:
        """The page that Prometheus reads."""
        return prometheus().generate_latest(self).decode()

    def collect(self) -> Iterator[Any]:
        """The metric families, as `prometheus_client` asks a registry for them."""
        core = prometheus().core

        def gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Any:
            family = core.GaugeMetricFamily(name, text, labels=labels)
            for label, value in values.items():
                family.add_metric(label, value)
            return family

        for name, (text, label) in COUNTERS.items():
            family = core.CounterMetricFamily(f"vla_accel_{name}", text, labels=[label] if label else [])
            for value, count in self.counters[name].items():
                family.add_metric([value] if label else [], count)
            yield family
        for name, (text, bounds, label) in HISTOGRAMS.items():
            family = core.HistogramMetricFamily(f"vla_accel_{name}", text, labels=[label] if label else [])
            for value, (counts, total) in self._histograms[name].items():
                buckets = list(zip((*map("{:g}".format, bounds), "+Inf"), itertools.accumulate(counts), strict=True))
                family.add_metric([value] if label else [], buckets, total)
            yield family
        for name, text in GAUGES.items():
            yield gauge(f"vla_accel_{name}", text, (), {(): self.gauges[name]()})
        text = "Requests answered per second over the last seconds; no bad ones."
        yield gauge("vla_accel_recent_requests_per_second", text, (), {(): self.recent.per_second("request")})
        quantiles = {(n, f"{q:g}"): self.recent.quantile(n, q) for n in self.recent.names() for q in QUANTILES}
        text = "Latency by component in the last five minutes."
        yield gauge("vla_accel_recent_seconds", text, ("component", "quantile"), quantiles)
        for name, text in (
            ("memory_used_bytes", "Memory used, by GPU."),
            ("memory_total_bytes", "Memory, by GPU."),
            ("clock_hertz", "Clock of the multiprocessors, by GPU."),
        ):
            yield gauge(f"vla_accel_gpu_{name}", text, ("gpu",), {(gpu.name,): getattr(gpu, name) for gpu in gpus()})
        text = "Resident memory of the server process."
        yield gauge("process_resident_memory_bytes", text, (), {(): resident_bytes()})


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
    """Durations in seconds of the last five minutes, by component; the newest 2,000 of each, because the event loop
    reads them. `request` is the whole request."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=2000))

    def add(self, name: str, seconds: float) -> None:
        """Record a duration that ends now."""
        self._samples[name].append((time.monotonic(), seconds))

    def names(self) -> list[str]:
        """Names with durations in the window."""
        return [name for name in self._samples if self._since(name, _WINDOW_S)]

    def quantile(self, name: str, q: float) -> float:
        """A quantile of the durations in the window, in seconds; NaN without any."""
        durations = [seconds for _, seconds in self._since(name, _WINDOW_S)]
        return float(np.quantile(durations, q)) if durations else math.nan

    def per_second(self, name: str) -> float:
        """Durations recorded per second, over the last seconds."""
        samples = self._since(name, _RATE_S)
        full = len(samples) == self._samples[name].maxlen
        return len(samples) / (time.monotonic() - samples[0][0] if full else _RATE_S)

    def _since(self, name: str, window_s: float) -> list[tuple[float, float]]:
        oldest = time.monotonic() - window_s
        return [sample for sample in self._samples.get(name, ()) if sample[0] >= oldest]


@dataclass(frozen=True)
class GpuState:
    """One GPU now; `clock_hertz` is the clock of its multiprocessors."""

    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    clock_hertz: float


def gpus() -> list[GpuState]:
    """Every GPU that NVIDIA's driver reports, without a CUDA context; none without a driver or nvidia-ml-py."""
    nvml, found = _nvml(), []
    if nvml is None:
        return found
    with contextlib.suppress(nvml.NVMLError):  # a MIG slice has no clock: leave out what is unknown
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle)
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            name = name.decode() if isinstance(name, bytes) else name
            found.append(GpuState(f"{index} {name}", int(memory.used), int(memory.total), clock * 1e6))
    return found


@functools.cache
def _nvml() -> Any:
    """The module `pynvml`, initialised; None without it or without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError or NVMLError
        return None
    return pynvml
