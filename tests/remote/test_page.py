"""The live page: its figures are those of `/metrics`, its door is the server's, and a browser shows it under load."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.server_support import EchoPolicy, get, local, metric, observation
from tests.support.waiting import PATIENCE_S
from vla_accel.client import PolicyClient
from vla_accel.errors import ServerError
from vla_accel.server import background, gpus, metrics, pages, recent

CHROMIUM = shutil.which("chromium")
DASHBOARD = Path(__file__).parents[2] / "docs" / "deploy" / "grafana" / "dashboard.json"


class Told(EchoPolicy):
    """An echo policy with a ledger."""

    def __init__(self) -> None:
        super().__init__()
        entry = {"component": "vision", "requested": "auto", "used": "native", "reason": "Hopper", "detail": ""}
        self.metadata["engines"] = [entry | {"fell_back": False}]


def with_key(kind: str, value: str) -> dict[str, str]:
    return {"Authorization": f"{kind} {value}"}


@pytest.mark.parametrize("page", [True, False])
def test_the_log_says_where_the_page_is(page: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vla_accel.server")
    with background(EchoPolicy(), local(page=page)) as server:
        at = server.address.removeprefix("ws://")
        assert get(server.address, "/")[0] == (200 if page else 426)
    assert f"serving on ws://{at}{f' (live page: http://{at})' if page else ''}" in caplog.messages


def test_the_pages_figures_are_those_of_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpus.GpuState("0 H200", 10 * 2**30, 140 * 2**30, 1.98e9)
    for module in (pages, metrics):
        monkeypatch.setattr(module, "gpus", lambda: [gpu])
    with background(Told(), local()) as server:
        with PolicyClient(server.address) as client:
            for index in range(5):
                client.infer(observation(index))
            with pytest.raises(ServerError):
                client.infer({})
        status, kind, text = get(server.address, "/status.json")
        told = json.loads(text)
        assert status == 200 and kind == "application/json"
        for name, value in (
            ('vla_accel_requests_total{outcome="ok"}', told["requests"]["ok"]),
            ('vla_accel_requests_total{outcome="bad request"}', told["requests"]["bad request"]),
            ('vla_accel_errors_total{type="ObservationError"}', told["errors"]["ObservationError"]),
            ("vla_accel_queue_depth", told["waiting"]),
            ("vla_accel_replicas", told["replicas_ready"]),
            ('vla_accel_replica_requests_total{replica="here"}', told["replicas"][0]["requests"]),
            ('vla_accel_gpu_memory_used_bytes{gpu="0 H200"}', told["gpus"][0]["memory_used_bytes"]),
            ('vla_accel_gpu_clock_hertz{gpu="0 H200"}', told["gpus"][0]["clock_hertz"]),
        ):
            assert metric(server.address, name) == value, name
        rows = {row["component"]: row for row in told["latency"]}
        assert rows.keys() == {"infer", "vision", "denoise", "request"}
        assert metric(server.address, "vla_accel_request_seconds_count") == 5, "a bad request's time is no latency"
        for name in rows:
            for share, key in (("0.5", "p50_ms"), ("0.99", "p99_ms")):
                line = f'vla_accel_recent_seconds{{component="{name}",quantile="{share}"}}'
                assert metric(server.address, line) == pytest.approx(rows[name][key] / 1e3, rel=1e-12)
        assert rows["vision"]["p99_ms"] == pytest.approx(1.0, rel=0.02)
        assert told["policies"] == [
            {
                "policy": "echo",
                "engines": [{"component": "vision", "requested": "auto", "used": "native", "reason": "Hopper"}],
            }
        ]


def test_the_page_asks_for_the_key_and_can_be_left_out() -> None:
    with background(EchoPolicy(), local(api_key="secret")) as server:
        basic = base64.b64encode(b"anyone:secret").decode()
        for path in ("/", "/status.json", "/metrics"):
            assert get(server.address, path)[0] == 401
            assert get(server.address, path, with_key("Api-Key", "secret"))[0] == 200
            assert get(server.address, path, with_key("Basic", basic))[0] == 200
            for wrong in (base64.b64encode(b"secret:wrong").decode(), "%%%", "/w=="):
                assert get(server.address, path, with_key("Basic", wrong))[0] == 401
        with pytest.raises(ServerError, match="HTTP 401"):  # a browser would send it along from any site
            PolicyClient(server.address.replace("//", "//anyone:secret@"))
    with background(EchoPolicy(), local(page=False)) as server:
        assert [get(server.address, path)[0] for path in ("/", "/status.json", "/metrics")] == [426, 426, 200]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = Path(pages.__file__).with_name("page.html").read_text()
    assert set(re.findall(r"https?://[^\"\s]*", text)) == {"http://www.w3.org/2000/svg"}  # the name of SVG, not fetched
    assert not re.search(r"<link|<img|src=|@import|url\(|innerHTML", text)
    assert "default-src 'none'" in pages.HEADERS["Content-Security-Policy"]


def test_quantiles_of_the_last_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(recent.time, "monotonic", lambda: now[0])
    window = recent.Recent()
    for value in range(1, 101):
        window.add("x", value / 1e3)
    assert window.quantile("x", 0.5) == pytest.approx(0.050, rel=0.02)
    assert window.quantile("x", 0.99) == pytest.approx(0.099, rel=0.02)
    assert window.quantile("none", 0.5) != window.quantile("none", 0.5), "not a number"
    now[0] += 5
    assert window.per_second("x") == pytest.approx(100 / 15)
    now[0] += 290
    window.add("x", 7.0)
    assert window.quantile("x", 0.5) == pytest.approx(0.051, rel=0.02) and window.quantile("x", 1) > 6
    now[0] += 10
    assert window.quantile("x", 0.5) == pytest.approx(7.0, rel=0.02), "the first hundred are out"
    now[0] += 400
    assert window.names() == []


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    with background(Told(), local(api_key="k")) as server:
        with PolicyClient(server.address, api_key="k") as client:
            client.infer(observation(1))
        page = get(server.address, "/metrics", with_key("Api-Key", "k"))[2]
    there = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    there |= {f"{name}_{part}" for name in there for part in ("bucket", "sum", "count")}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    named = {name for text in asked for name in re.findall(r"\b(?:vla_accel|process)_\w+", text)}
    assert len(asked) >= 10 and named - there == set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_the_dashboard_asks_for_labels_that_its_metrics_have() -> None:
    none = dict.fromkeys(("clients", "waiting", "running", "replicas"), lambda: 0)
    counted = [m for m in vars(metrics.Metrics(**none)).values() if isinstance(m, metrics.Counter | metrics.Histogram)]
    labels = {m.name: {m.label, "le"} for m in counted}
    labels |= {"vla_accel_recent_seconds": {"component", "quantile"}, "vla_accel_gpu": {"gpu"}}
    for target in (t for panel in json.loads(DASHBOARD.read_text())["panels"] for t in panel["targets"]):
        asked = set(re.findall(r"by \((\w+)\)", target["expr"]) + re.findall(r"{{(\w+)}}", target["legendFormat"]))
        owners = [name for name in labels if re.search(rf"\b{name}", target["expr"])]
        assert asked <= {label for name in owners for label in labels[name]}, target


def answers(page: Any) -> int:
    return int(page.inner_text("[data-name=answers] b"))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="NOT RUN: needs chromium")
def test_a_browser_shows_the_page_under_load() -> None:
    api = pytest.importorskip("playwright.sync_api", reason="NOT RUN: needs playwright (pip install '.[browser]')")
    done = threading.Event()

    def load(address: str, index: int) -> None:
        with PolicyClient(address, api_key="secret") as client:
            while not done.is_set():
                client.infer(observation(index, image=True))

    with background(Told(), local(api_key="secret")) as server, api.sync_playwright() as play:
        threads = [threading.Thread(target=load, args=(server.address, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            context = browser.new_context(http_credentials={"username": "me", "password": "secret"})
            context.set_default_timeout(PATIENCE_S * 1e3)
            page: Any = context.new_page()
            problems: list[str] = []
            asked: list[str] = []
            page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda e: problems.append(str(e)))
            page.on("request", lambda r: asked.append(r.url))
            here = server.address.replace("ws://", "http://")
            page.goto(here)
            page.wait_for_selector("#state:has-text('live')")
            page.wait_for_selector("[data-name=clients] b:text-is('4')")
            first = answers(page)
            for _ in range(900):  # the page's own policy forbids to wait for a function
                page.wait_for_timeout(100)
                if answers(page) > first > 0:
                    break
            else:
                raise AssertionError(f"the page stands still at {first} answers")
            assert float(page.inner_text("[data-name='requests / s'] b")) > 0
            rows = page.locator("#latency tr").all_inner_texts()
            shown = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
            assert {"vision", "denoise", "request"} <= shown.keys() and float(shown["vision"][0]) == 1.0
            assert "native\tauto\tHopper" in page.inner_text("#engines")
            assert problems == [] and {url.removeprefix(here).strip("/") for url in asked} == {"", "status.json"}
        finally:
            done.set()
            for thread in threads:
                thread.join()
        server.stop_soon()
        page.wait_for_selector("#state.lost")
        browser.close()
