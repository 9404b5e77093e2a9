"""The pages of a server: Prometheus' metrics, the live page, the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.contrast import LEAST, least_contrast
from tests.support.server_support import EchoPolicy, get, local, observation, served
from tests.support.waiting import PATIENCE_S
from vla_accel.client import PolicyClient
from vla_accel.errors import ServerError
from vla_accel.server import background, metrics, pages

CHROMIUM = shutil.which("chromium")
DASHBOARD = Path(__file__).parents[2] / "docs" / "deploy" / "grafana" / "dashboard.json"
LEDGER = {"component": "vision", "requested": "auto", "used": "native", "reason": "Hopper"}


@pytest.fixture
def page_policy(monkeypatch: pytest.MonkeyPatch) -> EchoPolicy:
    """A policy with a ledger, on a machine with one GPU."""
    gpu = metrics.GpuState("0 H200", 10 * 2**30, 140 * 2**30, 1.98e9)
    for module in (pages, metrics):
        monkeypatch.setattr(module, "gpus", lambda: [gpu])
    return EchoPolicy(engines=[LEDGER | {"detail": "", "fell_back": False}])


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The values of a metrics page by name and labels, as Prometheus' own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(page)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def test_prometheus_and_the_live_page_read_the_same_metrics(page_policy: EchoPolicy) -> None:
    with served(page_policy) as (server, client):
        for index in range(3):
            client.infer(observation(index))
        with PolicyClient(server.address) as other, pytest.raises(ServerError):
            other.infer({"x": 1})
        status, kind, page = get(server.address, "/metrics")
        assert status == 200 and kind.startswith("text/plain; version=0.0.4")
        status, kind, text = get(server.address, "/status.json")
        assert status == 200 and kind == "application/json"
    found, shown = samples(page), json.loads(text)
    for name, labels, value in (
        ("requests_total", {"outcome": "ok"}, shown["requests"]["ok"]),
        ("requests_total", {"outcome": "bad request"}, shown["requests"]["bad request"]),
        ("errors_total", {"type": "ObservationError"}, shown["errors"]["ObservationError"]),
        ("connections_total", {}, 2),
        ("retried_total", {}, 0),
        ("replica_requests_total", {"replica": "here"}, shown["replicas"][0]["requests"]),
        ("component_seconds_bucket", {"component": "vision", "le": "0.001"}, 3),
        ("component_seconds_bucket", {"component": "denoise", "le": "0.001"}, 0),
        ("component_seconds_bucket", {"component": "denoise", "le": "0.0025"}, 3),
        ("component_seconds_bucket", {"component": "denoise", "le": "+Inf"}, 3),
        ("component_seconds_sum", {"component": "denoise"}, pytest.approx(0.006)),
        ("component_seconds_count", {"component": "infer"}, 3),
        ("request_seconds_count", {}, 3),  # a bad request is not counted
        ("batch_size_bucket", {"le": "1"}, 3),
        ("queue_depth", {}, shown["waiting"]),
        ("replicas", {}, shown["replicas_ready"]),
        ("gpu_clock_hertz", {"gpu": "0 H200"}, 1.98e9),
        ("gpu_memory_used_bytes", {"gpu": "0 H200"}, shown["gpus"][0]["memory_used_bytes"]),
    ):
        assert found[f"vla_accel_{name}", tuple(sorted(labels.items()))] == value, (name, labels)
    assert shown["requests"] == {"ok": 3, "bad request": 1} and shown["replicas"][0]["requests"] == 4
    assert found["process_resident_memory_bytes", ()] > 1e6
    assert "# TYPE vla_accel_errors_total counter" in page and "# TYPE vla_accel_batch_size histogram" in page
    assert not any(name.endswith("_created") for name, _ in found)
    rows = {row["component"]: row for row in shown["latency"]}
    assert rows.keys() == {"infer", "vision", "denoise", "request"}
    for name, row in rows.items():
        for share, key in (("0.5", "p50_ms"), ("0.99", "p99_ms")):
            seconds = found["vla_accel_recent_seconds", (("component", name), ("quantile", share))]
            assert seconds == pytest.approx(row[key] / 1e3, rel=1e-12)
    assert rows["vision"]["p99_ms"] == pytest.approx(1.0)
    assert shown["policies"] == [{"policy": "echo", "engines": [LEDGER]}]


@pytest.mark.parametrize("page", [True, False])
def test_the_live_page_can_be_disabled(page: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vla_accel.server")
    with background(EchoPolicy(), local(page=page)) as server:
        expected = [200, 200, 200] if page else [426, 426, 200]
        assert [get(server.address, path)[0] for path in ("/", "/status.json", "/metrics")] == expected
    assert (server.address.replace("ws", "http", 1) in caplog.text) == page


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = Path(pages.__file__).with_name("page.html").read_text()
    assert set(re.findall(r"https?://[^\"\s]*", text)) == {"http://www.w3.org/2000/svg"}  # a name that nobody fetches
    assert not re.search(r"<link|<img|src=|@import|url\(|innerHTML", text)
    assert "default-src 'none'" in pages.HEADERS["Content-Security-Policy"]


def test_quantiles_of_the_last_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    window = metrics.Recent()
    for value in range(1, 101):
        window.add("x", value / 1e3)
    assert [window.quantile("x", q) for q in (0.5, 0.99)] == pytest.approx([0.050, 0.099], rel=0.02)
    assert np.isnan(window.quantile("none", 0.5)) and window.per_second("x") == 10
    now[0] += 290
    window.add("x", 7.0)
    assert window.quantile("x", 1) == 7.0 and window.per_second("x") == 0.1
    now[0] += 20
    assert window.quantile("x", 0.5) == 7.0, "the first hundred have expired"
    now[0] += 400
    assert window.names() == []
    for _ in range(10_000):
        now[0] += 1e-4
        window.add("x", 1.0)
    assert window.per_second("x") == pytest.approx(10_000, rel=0.01) and len(window._samples["x"]) <= 2000


def test_the_dashboard_uses_only_metrics_and_labels_that_exist() -> None:
    every = metrics.Metrics(dict.fromkeys(metrics.GAUGES, int))
    labels = {f"vla_accel_{name}": {label} for name, (_, label) in metrics.COUNTERS.items()}
    labels |= {f"vla_accel_{name}": {label, "le"} for name, (_, _, label) in metrics.HISTOGRAMS.items()}
    labels |= {"vla_accel_recent_seconds": {"component", "quantile"}, "vla_accel_gpu": {"gpu"}}
    names = set(re.findall(r"^# TYPE (\S+)", every.text(), re.MULTILINE))
    names |= {f"{name}_{part}" for name in names for part in ("bucket", "sum", "count")}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    assert len(targets) >= 10 and len({panel["id"] for panel in panels}) == len(panels)
    for target in targets:
        assert set(re.findall(r"\b(?:vla_accel|process)_\w+", target["expr"])) <= names, target
        used = set(re.findall(r"by \((\w+)\)", target["expr"]) + re.findall(r"{{(\w+)}}", target["legendFormat"]))
        owners = [name for name in labels if re.search(rf"\b{name}", target["expr"])]
        assert used <= {label for name in owners for label in labels[name]}, target


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="NOT RUN: needs chromium")
def test_a_browser_shows_the_page_under_load() -> None:
    api = pytest.importorskip("playwright.sync_api", reason="NOT RUN: needs playwright (pip install '.[browser]')")
    done = threading.Event()

    def load(address: str, index: int) -> None:
        with PolicyClient(address, api_key="secret") as client:
            while not done.is_set():
                client.infer(observation(index, image=True))

    policy = EchoPolicy(engines=[LEDGER | {"detail": "", "fell_back": False}])
    with (
        background(policy, local(api_key="secret")) as server,
        api.sync_playwright() as play,
        ThreadPoolExecutor(4) as pool,
    ):
        for index in range(4):
            pool.submit(load, server.address, index)
        try:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            context = browser.new_context(http_credentials={"username": "me", "password": "secret"})
            context.set_default_timeout(PATIENCE_S * 1e3)
            page: Any = context.new_page()
            problems: list[str] = []
            requests: list[str] = []
            page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda e: problems.append(str(e)))
            page.on("request", lambda r: requests.append(r.url))
            home = server.address.replace("ws://", "http://")
            page.goto(home)
            page.wait_for_selector("#state:has-text('live')")
            page.wait_for_selector("[data-name=clients] b:text-is('4')")
            first = int(page.inner_text("[data-name=answers] b"))
            for _ in range(900):  # the page's security policy forbids waiting for a function
                page.wait_for_timeout(100)
                if int(page.inner_text("[data-name=answers] b")) > first > 0:
                    break
            else:
                raise AssertionError(f"the page still shows {first} answers")
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                ratio, words, _ = least_contrast(page)
                assert ratio >= LEAST, (scheme, words)
            # The text of cells, because the page may replace a row meanwhile.
            cells = "rows => rows.map(row => Array.from(row.cells, cell => cell.textContent))"
            shown = {name: rest for name, *rest in page.locator("#latency tr").evaluate_all(cells)}
            assert {"vision", "denoise", "request"} <= shown.keys() and float(shown["vision"][0]) == 1.0
            assert "native\tauto\tHopper" in page.inner_text("#engines")
            assert problems == [] and {url.removeprefix(home).strip("/") for url in requests} == {"", "status.json"}
        finally:
            done.set()
        server.stop_soon()
        page.wait_for_selector("#state.lost")
        browser.close()
