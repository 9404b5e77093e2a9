"""The pages of a server: the live page, its figures, and the metrics for Prometheus, all from the same counts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.remote import wire
from vla_accel.server.dispatch import Dispatcher
from vla_accel.server.gpus import gpus
from vla_accel.server.metrics import CONTENT_TYPE, QUANTILES, Metrics

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every page."""
_ENGINE_KEYS = ("component", "requested", "used", "reason")


class Pages:
    """Responses to GET. `live`: whether to serve the live page and its figures."""

    def __init__(self, metrics: Metrics, dispatcher: Dispatcher, live: bool) -> None:
        self._metrics, self._dispatcher, self._live = metrics, dispatcher, live

    def get(self, path: str) -> tuple[str, str] | None:
        """Content type and text of a page; None for an unknown path."""
        if path == "metrics":
            return CONTENT_TYPE, self._metrics.text()
        if self._live and path == "":
            return "text/html; charset=utf-8", Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        if self._live and path == "status.json":
            return "application/json", json.dumps(self.status())
        return None

    def status(self) -> dict[str, Any]:
        """The figures of the live page; milliseconds are null without a measurement in the last five minutes."""
        m, d = self._metrics, self._dispatcher
        return {
            "policies": self._policies(),
            "clients": m.gauges["clients"](),
            "waiting": d.waiting,
            "running": d.running,
            "replicas_ready": len(d.loaded),
            "replicas": [
                {
                    "name": r.name,
                    "requests": m.counters["replica_requests"][r.name],
                    "deaths": m.counters["replica_deaths"][r.name],
                }
                for r in d.replicas
            ],
            "requests_per_second": m.recent.per_second("request"),
            "requests": m.counters["requests"],
            "errors": m.counters["errors"],
            "refused": m.counters["refused"],
            "keys": m.counters["key_requests"],
            "latency": [
                {"component": name} | {f"p{q * 100:g}_ms": _milliseconds(m.recent.quantile(name, q)) for q in QUANTILES}
                for name in m.recent.names()
            ],
            "gpus": [dataclasses.asdict(gpu) for gpu in gpus()],
        }

    def _policies(self) -> list[dict[str, Any]]:
        """Each policy's name and ledger, from its metadata."""
        frames = self._dispatcher.metadata_frames
        found = [(name, wire.unpack_map(frame)) for name, frame in frames.items() if name or len(frames) == 1]
        return [
            {"policy": name or str(m.get("policy", "")), "engines": _engines(m.get("engines"))} for name, m in found
        ]


def _engines(ledger: Any) -> list[dict[str, str]]:
    rows = [row for row in ledger if isinstance(row, Mapping)] if isinstance(ledger, list) else []
    return [{key: str(row.get(key, "")) for key in _ENGINE_KEYS} for row in rows]


def _milliseconds(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds * 1e3
