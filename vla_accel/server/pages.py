"""What a server says over plain HTTP: the live page, its figures, and Prometheus' metrics. Knows no connections.

The page shows the figures of `/metrics`, from the same counters.
"""

from __future__ import annotations

import dataclasses
import json
import math
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
"""Of every page: nothing from elsewhere, nothing kept."""


class Pages:
    """Answers to GET. `live`: whether there is a page for people."""

    def __init__(self, metrics: Metrics, dispatcher: Dispatcher, live: bool) -> None:
        self._metrics, self._dispatcher, self._live = metrics, dispatcher, live

    def get(self, path: str) -> tuple[str, str] | None:
        """Content type and text of a page; None where there is none."""
        if path == "metrics":
            return CONTENT_TYPE, self._metrics.text()
        if self._live and path == "":
            return "text/html; charset=utf-8", Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        if self._live and path == "status.json":
            return "application/json", json.dumps(self.status())
        return None

    def status(self) -> dict[str, Any]:
        """The figures of the live page; milliseconds are null where nothing was measured in the last five minutes."""
        m, d = self._metrics, self._dispatcher
        return {
            "policies": self._policies(),
            "clients": int(m.clients()),
            "waiting": d.waiting,
            "running": d.running,
            "replicas_ready": d.ready,
            "replicas": [
                {
                    "name": r.name,
                    "requests": int(m.replica_requests.values.get(r.name, 0)),
                    "deaths": int(m.replica_deaths.values.get(r.name, 0)),
                }
                for r in d.replicas
            ],
            "requests_per_second": m.recent.per_second("request"),
            "requests": _counts(m.requests),
            "errors": _counts(m.errors),
            "refused": _counts(m.refused),
            "keys": _counts(m.key_requests),
            "latency": [
                {"component": name} | {f"p{q * 100:g}_ms": _milliseconds(m.recent.quantile(name, q)) for q in QUANTILES}
                for name in m.recent.names()
            ],
            "gpus": [dataclasses.asdict(gpu) for gpu in gpus()],
        }

    def _policies(self) -> list[dict[str, Any]]:
        """Each policy's name, and which engines run it and why, as it told when it was loaded."""
        hellos = self._dispatcher.hellos
        told = [(name, wire.unpack_map(hello)) for name, hello in hellos.items() if name or len(hellos) == 1]
        return [{"policy": name or str(m.get("policy", "")), "engines": _engines(m.get("engines"))} for name, m in told]


def _engines(ledger: Any) -> list[dict[str, str]]:
    rows = [row for row in ledger if isinstance(row, dict)] if isinstance(ledger, list) else []
    return [{key: str(row.get(key, "")) for key in ("component", "requested", "used", "reason")} for row in rows]


def _counts(counter: Any) -> dict[str, int]:
    return {label: int(value) for label, value in counter.values.items()}


def _milliseconds(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds * 1e3
