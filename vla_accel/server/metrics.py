"""Counters, gauges and histograms in Prometheus' text format (version 0.0.4).

Written and read on the server's event loop only, so there are no locks. Knows the names of what is counted, not how it
comes about.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vla_accel.server.gpus import gpus
from vla_accel.server.recent import Recent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


QUANTILES = (0.5, 0.99)
Labelled = tuple[dict[str, str], float]
"""Labels, and the value that they have."""


class Counter:
    """Counts, one for each value of one label ("" without a label)."""

    def __init__(self, name: str, help_line: str, label: str = "") -> None:
        self.name, self.help_line, self.label = name, help_line, label
        self.values: dict[str, float] = {} if label else {"": 0.0}

    def add(self, label: str = "", amount: float = 1.0) -> None:
        self.values[label] = self.values.get(label, 0.0) + amount

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help_line, "counter")
        for label, value in self.values.items():
            yield f"{self.name}{_labels({self.label: label} if self.label else {})} {value:.15g}"


class Gauge:
    """A value that is asked for when it is read, or one for each value of some labels."""

    def __init__(self, name: str, help_line: str, read: Callable[[], float | list[Labelled]]) -> None:
        self.name, self.help_line, self.read = name, help_line, read

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help_line, "gauge")
        value = self.read()
        for labels, one in value if isinstance(value, list) else [({}, value)]:
            yield f"{self.name}{_labels(labels)} {one:.15g}"


class Histogram:
    """Observations in buckets, one histogram for each value of one label ("" without a label)."""

    def __init__(self, name: str, help_line: str, bounds: tuple[float, ...], label: str = "") -> None:
        self.name, self.help_line, self.bounds, self.label = name, help_line, bounds, label
        self.counts: dict[str, list[int]] = {}
        self.sums: dict[str, float] = {}

    def observe(self, value: float, label: str = "") -> None:
        counts = self.counts.setdefault(label, [0] * (len(self.bounds) + 1))
        counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sums[label] = self.sums.get(label, 0.0) + value

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help_line, "histogram")
        for label, counts in self.counts.items():
            own = {self.label: label} if self.label else {}
            running = 0
            for bound, count in zip((*map("{:g}".format, self.bounds), "+Inf"), counts, strict=True):
                running += count
                yield f"{self.name}_bucket{_labels({**own, 'le': bound})} {running}"
            yield f"{self.name}_sum{_labels(own)} {self.sums[label]:.9g}"
            yield f"{self.name}_count{_labels(own)} {running}"


class Metrics:
    """Everything a policy server counts."""

    def __init__(
        self,
        *,
        clients: Callable[[], int],
        waiting: Callable[[], int],
        running: Callable[[], int],
        replicas: Callable[[], int],
    ) -> None:
        self.requests = Counter("vla_accel_requests_total", "Requests answered, by outcome.", "outcome")
        self.errors = Counter("vla_accel_errors_total", "Errors reported to clients, by type.", "type")
        self.connections = Counter("vla_accel_connections_total", "Connections that completed the handshake.")
        self.refused = Counter("vla_accel_refused_total", "Connections refused or ended, by reason.", "reason")
        self.key_requests = Counter("vla_accel_key_requests_total", "Requests answered, by the key's name.", "key")
        self.delayed = Counter(
            "vla_accel_delayed_total", "Requests that the rate limit held back, by the key's name.", "key"
        )
        self.policy_requests = Counter("vla_accel_policy_requests_total", "Requests answered, by policy.", "policy")
        self.replica_requests = Counter("vla_accel_replica_requests_total", "Requests computed, by replica.", "replica")
        self.replica_deaths = Counter("vla_accel_replica_deaths_total", "Replicas that ended unasked.", "replica")
        self.retried = Counter("vla_accel_retried_total", "Requests computed again because a replica died.")
        self.received = Counter("vla_accel_received_bytes_total", "Bytes of the messages received.")
        self.sent = Counter("vla_accel_sent_bytes_total", "Bytes of the messages sent.")
        self.request_seconds = Histogram(
            "vla_accel_request_seconds", "From a request's arrival to its answer, sent; of no bad request.", SECONDS
        )
        self.component_seconds = Histogram(
            "vla_accel_component_seconds", "Latency by component, as the policy reports it.", SECONDS, "component"
        )
        self.queue_seconds = Histogram("vla_accel_queue_seconds", "Time a request waited for its turn.", SECONDS)
        self.batch_size = Histogram("vla_accel_batch_size", "Requests run together.", SIZES)
        self.recent = Recent()
        """The last five minutes, by component, and `request` for the whole."""
        self.clients = clients
        self._gauges = (
            Gauge("vla_accel_clients", "Clients connected now.", clients),
            Gauge("vla_accel_recent_seconds", "Latency by component in the last five minutes.", self._recent_seconds),
            Gauge(
                "vla_accel_recent_requests_per_second",
                "Requests answered a second, of late; no bad ones.",
                lambda: self.recent.per_second("request"),
            ),
            Gauge("vla_accel_gpu_memory_used_bytes", "Memory used, by GPU.", _of_gpus("memory_used_bytes")),
            Gauge("vla_accel_gpu_memory_total_bytes", "Memory, by GPU.", _of_gpus("memory_total_bytes")),
            Gauge("vla_accel_gpu_clock_hertz", "Clock of the multiprocessors, by GPU.", _of_gpus("clock_hertz")),
            Gauge("vla_accel_queue_depth", "Requests waiting for their turn.", waiting),
            Gauge("vla_accel_running_requests", "Requests that the policy computes now.", running),
            Gauge("vla_accel_replicas", "Replicas that are loaded.", replicas),
            Gauge("process_resident_memory_bytes", "Resident memory of the server process.", resident_bytes),
        )

    def request(self, seconds: float) -> None:
        """Take in a request's whole time."""
        self.request_seconds.observe(seconds)
        self.recent.add("request", seconds)

    def components(self, timing: Any) -> None:
        """Take in a policy's `policy_timing`: milliseconds under `<component>_ms`."""
        if not isinstance(timing, Mapping):
            return
        for key, value in timing.items():
            if isinstance(key, str) and key.endswith("_ms") and isinstance(value, (int, float)):
                name, seconds = key.removesuffix("_ms"), float(value) / 1e3
                self.component_seconds.observe(seconds, name)
                self.recent.add(name, seconds)

    def _recent_seconds(self) -> list[Labelled]:
        return [
            ({"component": name, "quantile": f"{q:g}"}, self.recent.quantile(name, q))
            for name in self.recent.names()
            for q in QUANTILES
        ]

    def text(self) -> str:
        """The page that Prometheus reads."""
        own = [v for v in vars(self).values() if isinstance(v, (Counter, Histogram))]
        return "\n".join(line for one in (*own, *self._gauges) for line in one.lines()) + "\n"


def _of_gpus(attribute: str) -> Callable[[], list[Labelled]]:
    return lambda: [({"gpu": gpu.name}, float(getattr(gpu, attribute))) for gpu in gpus()]


def resident_bytes() -> float:
    """Resident memory of this process; NaN where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return float("nan")


def _head(name: str, help_line: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help_line}"
    yield f"# TYPE {name} {kind}"


def _labels(labels: Mapping[str, str]) -> str:
    def escape(value: str) -> str:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

    return "{" + ",".join(f'{k}="{escape(v)}"' for k, v in labels.items()) + "}" if labels else ""
