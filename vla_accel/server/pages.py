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
from vla_accel.server.metrics import CONTENT_TYPE, QUANTILES, Metrics, gpus

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every page."""


def page(path: str, metrics: Metrics, dispatcher: Dispatcher, *, live: bool) -> tuple[str, str] | None:
    """Content type and text of a page; None for an unknown path. `live`: whether the live page is enabled."""
    if path == "metrics":
        return CONTENT_TYPE, metrics.text()
    if live and path == "":
        return "text/html; charset=utf-8", Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    if live and path == "status.json":
        return "application/json", json.dumps(_status(metrics, dispatcher))
    return None


def _status(m: Metrics, d: Dispatcher) -> dict[str, Any]:
    """The figures of the live page; milliseconds are null without a measurement in the last five minutes."""
    return {
        "policies": _policies(d.metadata_frames),
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


def _policies(frames: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Each policy's name and ledger, from its metadata."""
    found = [(name, wire.unpack_map(frame)) for name, frame in frames.items() if name or len(frames) == 1]
    return [{"policy": name or str(m.get("policy", "")), "engines": _engines(m.get("engines"))} for name, m in found]


def _engines(ledger: Any) -> list[dict[str, str]]:
    rows = [row for row in ledger if isinstance(row, Mapping)] if isinstance(ledger, list) else []
    return [{key: str(row.get(key, "")) for key in ("component", "requested", "used", "reason")} for row in rows]


def _milliseconds(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds * 1e3
