"""The tables of README and docs/, and their pictures, show what the stored results hold."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import pictures, store
from benchmarks.svg import PUBLISHED, draw_models, sources
from benchmarks.tables import agreement, attach, hardware, registry, shapes, success
from benchmarks.tables import bench as benches
from benchmarks.tables.families import families
from benchmarks.tables.table import OLD, UNKNOWN, doubt, machine, table
from eval import paired
from eval.harness.statistics import smallest_difference
from tests.support.reports import (
    BATCHES,
    CEILINGS,
    CPU,
    GPU,
    bench_report,
    cells,
    ledger,
    libero_result,
    shape_report,
)
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.component import OVERLAP
from vla_accel.families.family import FAMILIES
from vla_accel.ledger import LedgerEntry
from vla_accel.measure import bench
from vla_accel.measure.parity import Agreement, Report
from vla_accel.measure.roofline import add_batch_floors, rates
from vla_accel.report.bench import batch_lines

WEIGHTS = registry.load("training/demo")["weights"]


# -- pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", registry.pages(), ids=lambda p: p.relative_to(registry.ROOT).as_posix())
def test_a_page_is_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert registry.render(text, page) == text, f"{page.name} differs from benchmarks/results: run `make tables`"


def test_the_svg_pictures_are_up_to_date() -> None:
    for path, drawn in registry.drawings().items():
        assert path.read_text() == drawn, "run `make tables`"


def test_every_table_and_every_stored_run_is_on_a_page() -> None:
    shown = "".join(page.read_text() for page in registry.pages())
    assert [name for name in registry.TABLES if f"<!-- table: {name} -->" not in shown] == []
    listed = [s for _, source in registry.TABLES.values() for s in ((source,) if isinstance(source, str) else source)]
    stored = [path for path in registry.RESULTS.glob("*.json")]
    # The count of runs by GPU reads all.
    listed = [source.replace("{gpu}", "*") for source in listed if source != "*"]
    assert [p.name for p in stored if not any(p.match(f"{source}.json") for source in listed)] == []


def test_an_unknown_table_and_an_absent_run_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="nonsense"):
        registry.render("<!-- table: nonsense -->\n<!-- end -->")
    monkeypatch.setattr(registry, "RESULTS", tmp_path)
    (tmp_path / "there.json").write_text("[1]")
    assert registry.load(("there", "th*")) == [[1], [[1]]]
    for name in ("not_there", "not_*"):
        with pytest.raises(FileNotFoundError, match=f"{name[:4]}.*json"):
            registry.load(("there", name))
    with pytest.raises(FileNotFoundError, match="bundled checkpoint other_demo"):
        registry.load("training/other_demo")


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object"])
def test_the_headline_agrees_with_its_episodes(suite: str) -> None:
    result = registry.load(f"{suite}_demo")
    for row in result["summary"]["rows"]:
        mine = [e for e in result["episodes"] if e["steps"] == row["steps"]]
        assert len({(e["task_id"], e["trial"]) for e in mine}) == len(mine) == row["success"]["episodes"] == 500
        assert sum(e["success"] for e in mine) == row["success"]["successes"]


def test_stored_results_hold_no_machine_paths() -> None:
    for path in registry.RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        words = [w for s in content.get("launches", []) for w in s["command"]]
        assert not [w for w in words if w.startswith("/")], path.name


def test_a_stored_run_drops_timings_and_paths() -> None:
    result = {
        "command": ["python", "--output", "/somewhere/x.json"],
        "launches": [{"command": ["/somewhere/y.json"]}],
        "policy": {"name": "mine", "metadata": {"policy": "/somewhere/mine", "dtype": "float32"}},
        "figure": "/somewhere/z.png",
        "videos": [],
        "episodes": [{"steps": 1, "success": True, "timings_ms": {"total": [1.0]}, "video": None, "wall_s": 1.0}],
    }
    kept = store.slim(result, "why")
    assert "/somewhere" not in json.dumps(kept)
    assert kept["episodes"] == [{"steps": 1, "success": True}]
    assert kept["policy"]["metadata"] == {"policy": "mine", "dtype": "float32"}


def test_a_cell_without_a_value_is_a_dash() -> None:
    columns, rows = "a = {a:.1f} ms | b = {b[c]:.0%}", [{"a": 1.25, "b": {"c": 0.5}}, {"a": None, "b": {}}, {"b": None}]
    text = table(columns, rows, "Note.")
    assert cells(text) == [["1.2 ms", "50 %"], ["-", "-"], ["-", "-"]] and text.endswith("\nNote.\n")
    assert table(columns, []) == ""


# -- bench --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", [OVERLAP, "the first step beside the prefix"], ids=["now", "in stored runs"])
def test_a_step_that_overlaps_the_prefix_is_not_in_the_rate_of_the_loop(detail: str) -> None:
    report = bench_report(CEILINGS)
    for row in report["rows"][::2]:
        row["engines"].append(asdict(LedgerEntry("denoise", "native", "native", "", detail)))
        del row["denoise_gb_per_s"]
        row |= rates(row)
    text = benches.bench(report)
    assert " | 5.00 (0.50), 360 GB/s | " in text, "nine steps of ten"
    assert " | 0.50 (0.50) | " in text, "of one step nothing is left to have a rate"
    assert "overlaps the prefix" in text and "overlaps the prefix" not in benches.bench(bench_report(None))


def test_bench_names_what_is_missing_and_what_fell_back() -> None:
    report = bench_report(None, baseline="eager", used="eager")
    report["rows"] = [r for r in report["rows"] if (r["system"], r["steps"]) != ("eager", 1)]
    report["timed_once"] = {"openpi-compile": {"steps": 10, "why": "it takes minutes"}}
    bench.add_speedups(report["rows"], "eager")
    text = benches.bench(report)
    ran = "(kv_cache ran eager)"
    assert cells(text) == [[f"native-bf16 {ran}", "14.00, 4.3×", "5.00"], [f"eager {ran}", "60.00, 1.0×", "-"]]
    assert "| native-bf16 | 1 | 2.00, 500 TFLOP/s | 3.00, 1000 TFLOP/s | 0.50, 4000 GB/s | -0.50 | - | - |" in text
    last = text.splitlines()[-1]
    assert last.startswith("Some CPU, 1 thread, torch 2.13.0;") and "openpi-eager (not installed)" in last
    assert "openpi-compile" in last and "it takes minutes" in last


def test_bench_of_a_checkpoint_with_its_own_components() -> None:
    report = bench_report(None)
    report |= {"model": {"name": "toy", "kind": "toy", "action_horizon": 4}, "parts": ["encoder", "decoder"]}
    for row in report["rows"]:
        row |= {"parts_ms": {"encoder": 1.0, "decoder": 2.0}, "decoder_tflops": 300.0}
    text = benches.bench(report)
    assert "| system | steps | encoder | decoder | the rest | floor | floor / call |" in text
    assert "| native-bf16 | 1 | 1.00 | 2.00, 300 TFLOP/s | 2.00 | - | - |" in text
    report["rows"][0]["engines"] = [
        {"component": c, "requested": "auto", "used": "eager"} for c in ("encoder", "decoder")
    ]
    assert "| native-bf16 (chose eager) | " in benches.bench(report)


def test_the_floor_of_a_batch_reads_the_weights_once() -> None:
    found = [dict(row) for row in BATCHES]
    add_batch_floors(found, shape_report(2, 10, 9.0)["rows"], CEILINGS)
    # Vision: 1 ms of arithmetic per observation; denoise: 1 ms of bytes for any batch.
    assert [row["floors_ms"]["total"] for row in found] == pytest.approx([2.0, 3.0, 9.0])
    per_observation, floors = batch_lines(found)
    assert per_observation == {"native-bf16": [(1, 9.0), (2, 9.0), (8, 9.0)]}
    assert floors["native-bf16"] == [(1, pytest.approx(2.0)), (2, pytest.approx(1.5)), (8, pytest.approx(1.125))]
    found[0]["system"] = "another"
    del found[0]["floors_ms"]
    add_batch_floors(found, shape_report(2, 10, 9.0)["rows"], CEILINGS)
    assert "floors_ms" not in found[0]


# -- shapes, goals, models ----------------------------------------------------------------------------------------


def named(result: dict[str, Any], *systems: tuple[str, float]) -> dict[str, Any]:
    """The same run with these systems and medians."""
    row = result["rows"][0]
    return {**result, "rows": [{**row, "system": name, "median_ms": ms} for name, ms in systems]}


def test_systems_that_were_timed_in_turns_come_from_one_run() -> None:
    batches = named(shape_report(2, 10, 0.0, throughput=BATCHES), ("native-fp8", 8.0), ("native-fp8-vision", 7.0))
    turns = named(shape_report(2, 10, 0.0), ("native-bf16", 9.0), ("native-fp8", 7.5), ("realtime-vla", 21.0))
    row = cells(shapes.shapes([batches, turns]))[0]
    assert row[3:] == ["9.00 (2.00)", "7.50 (2.00)", "21.00 (2.00)", "7.00 (2.00)"]


def lerobot_report() -> dict[str, Any]:
    """What `tests/parity/compare_with_lerobot.py` stores."""
    case = {"case": "batch 3", "batch": 3, "views": 2, "steps": 10, "actions_rms": 1.25}
    low = {"bfloat16_rms_to_float32": 0.012, "lerobot_bfloat16_rms_to_float32": 0.013}
    low["lerobot_autocast_rms_to_float32"] = 0.005
    less = {**case, "case": "a camera less", "views": 1, "float32_max": 1e-6}
    versions = {"lerobot": "0.6.1", "torch": "2.11.0"}
    tiny = {"versions": versions, "parameters": 1_000_000, "size": "small", "cases": [less]}
    cases = [{**case, "float32_max": 2e-6, **low}, less]
    large = {"versions": versions, "parameters": 401_900_000, "size": "published", "cases": cases}
    return {**CPU, "models": {"smolvla": large, "pi0_fast": tiny}}


def comparison(**others: dict[str, Any]) -> dict[str, Any]:
    """Runs at ten steps that are compared with one that lost 2 of 20 episodes."""
    result = paired.compare(libero_result(np.arange(20) > 1, WEIGHTS), others, "eager_fp32")
    result["protocol"]["suite"] = "libero_spatial"
    return {**result, "note": "", "command": [], "rows": [row for row in result["rows"] if row["steps"] == 10]}


@pytest.mark.slow
def test_a_model_has_one_row_from_all_its_stored_runs() -> None:
    smolvla = bench_report(CEILINGS, "lerobot-eager")
    smolvla["model"] = {"kind": "smolvla", "views": 3, "action_horizon": 50}
    smolvla["rows"][0]["memory"] = {"total": 1_100_000_000, "peak_running": 1_260_000_000}
    agreed = {
        "pi0": {"parameters": 3_238_046_480, "batch1": {"float32_max": 1e-6}, "batch3": {"float32_max": 2e-6}},
        "pi05": {"parameters": 3_353_431_824, "batch1": {"float32_max": 4e-6}, "batch3": {"float32_max": 3e-6}},
    }
    lerobot = lerobot_report()
    played = comparison(native=libero_result(np.arange(20) > 3, WEIGHTS))
    first, second, *_ = cells(shapes.models_detail([bench_report(CEILINGS), smolvla, agreed, lerobot, played]))
    assert first[3:] == ["60.00 (openpi, eager)", "14.00, 4.3×", "-", "-", "4.0e-06", "80.0 % of 20"]
    assert second[:2] == ["SmolVLA", "402 M"] and second[-3:] == ["1.3 GB", "2.0e-06", "-"]
    alone = cells(shapes.models_detail([smolvla]))[0]
    assert alone[1] == "403 M" and alone[-2:] == ["-", "-"], "parameters are counted where no run has them"
    small = {**smolvla, "model": {**smolvla["model"], "kind": "pi0_fast"}}
    row = cells(shapes.models_detail([small, lerobot]))[0]
    assert row[:2] == ["π0-FAST", "2.92 B"] and row[-2:] == ["-", "-"], "the figures of a small model do not count"
    small["rows"] = bench_report(CEILINGS, "eager")["rows"]
    assert cells(shapes.models_detail([small]))[0][3] == "60.00 (ours, eager)"
    first, second = cells(shapes.models([bench_report(CEILINGS), smolvla, agreed, lerobot, played]))
    assert first == ["π0.5 (3.35 B)", "14.00", "-", "4.3× over openpi", "80.0 % of 20"]
    assert second[0] == "SmolVLA (402 M)" and second[2:] == ["1.3 GB", "4.3× over lerobot", "-"]


def test_the_reference_of_a_model_may_be_timed_in_a_run_of_its_own() -> None:
    """The speed-up is that of one run, the other figures are the first run's."""
    first, other = bench_report(CEILINGS, "eager"), bench_report(CEILINGS, "lerobot-eager")
    for result in (first, other):
        result["model"] = {"kind": "smolvla", "views": 2, "action_horizon": 50}
    first["rows"].append({**first["rows"][0], "system": "native-fp8", "median_ms": 12.0})
    for row in other["rows"]:
        row["median_ms"] *= 2 if row["system"] == "lerobot-eager" else 0.5
    (row,) = cells(shapes.models([first, other]))
    assert row[1] == "14.00" and row[3] == "17.1× over lerobot"
    row, *_ = cells(shapes.models_detail([first, other]))
    assert row[3].startswith("120.00 (lerobot") and row[4].startswith("7.00") and row[5] == "12.00"


def test_an_encoder_of_instructions_has_its_times() -> None:
    rows = [
        {"encoder": "ours", "p50_ms": 7.5, "p90_ms": 7.75},
        {"encoder": "transformers", "p50_ms": 30.0, "p90_ms": 31.0},
    ]
    result = {**CPU, "tokens": 40, "calls": 30, "rows": rows, "command": ["python", "-m", "benchmarks.time_prompts"]}
    first, second = cells(attach.prompts(result))
    assert first[1:] == ["7.50", "7.75"] and second[1:] == ["30.00", "31.00"]
    assert "40 tokens" in attach.prompts(result) and "30 calls each" in attach.prompts(result)


def test_an_attached_policy_has_its_speed_up_and_a_refused_one_has_none() -> None:
    timed = {"lerobot": {"p50_ms": 100.0, "p95_ms": 110.0}, "first_call_s": 20.4}
    done = {"attached": {"p50_ms": 5.0, "p95_ms": 5.5}, "difference": 0.0123, "speed_up": 20.0}
    memory = {"memory": {"lerobot": 14e9, "attached": 7e9, "detached": 14e9}}
    rows = [{"model": "pi05_fp32", **timed, **done, **memory}, {"model": "smolvla", **timed, "reason": "unknown"}]
    settings = {"calls": 30, "steps": 10, "horizon": 50, "cameras": 2}
    result = {**CPU, "settings": settings, "rows": rows, "command": ["python", "-m", "benchmarks.time_attach"]}
    first, second = cells(attach.attach(result))
    assert first == ["π0.5, float32", "100.00", "5.00, 20.0×", "1.2e-02", "20 s", "14.0 GB", "7.0 GB"]
    assert second == ["SmolVLA", "100.00", "-", "-", "20 s", "-", "-"]
    assert "30 calls each" in attach.attach(result) and "10 steps, 50 actions, 2 cameras" in attach.attach(result)


def test_a_model_has_the_run_of_the_gpu_that_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And, in the detailed table, a row that says so where no GPU has one."""
    monkeypatch.setattr(registry, "RESULTS", tmp_path)
    for kind, gpu in (("act", "h100"), ("evo1", "h100"), ("evo1", "h200")):
        report = bench_report(CEILINGS, "eager")
        report["model"]["kind"], report["hardware"] = kind, {"gpu": gpu.upper()}
        report["rows"][0]["step_ms"] = 0.5
        (tmp_path / f"bench_{kind}_{gpu}.json").write_text(json.dumps(report))
    assert benches.benches(registry.load(("bench_xvla_{gpu}",))) == "No run is stored.\n"
    results = registry.load(registry.OTHERS)
    detail, short, full = shapes.models_detail(results), shapes.models(results), benches.benches(results)
    rows = {row[0]: row[2:5] for row in cells(detail)}
    assert len(rows) == len(registry.OTHERS)
    assert rows["ACT"] == ["2 views, 10 actions, one pass", "60.00 (ours, eager)", "14.00, 4.3×"]
    assert {kind for kind, row in rows.items() if row != ["not measured", "-", "-"]} == {"ACT", "Evo-1"}
    assert "ACT: H100, torch" in detail and "ACT: H100; Evo-1: H200." in short
    assert [row[0] for row in cells(short)] == ["ACT (34 M)", "Evo-1 (775 M)"]
    assert [line for line in full.splitlines() if line.startswith("### ")] == ["### ACT", "### Evo-1"]
    assert "| a step |" in full and "a one pass" not in full


def test_the_headline_has_the_medians_of_its_run() -> None:
    report = bench_report(CEILINGS)
    first = report["rows"][0]
    report["rows"] += [{**first, "system": "native-fp8", "median_ms": 10.0}]
    report["rows"] += [{**first, "system": "realtime-vla", "median_ms": 28.0}]
    played = {"name": "native", "pairs": 500, "other": {"rate": 0.99}, "reference": {"rate": 0.994}}
    text = shapes.headline([report, {"rows": [{**played, "name": "native_fp8"}, played]}])
    assert "14.0 ms on an X in BF16 and 10.0 ms with the prefix in FP8" in text
    assert "realtime-vla, takes 28.0 ms, 2.0 times as long" in text
    assert "99.0 % of 500 LIBERO episodes, and 99.4 % in FP32" in text


def test_a_link_of_a_table_is_relative_to_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.TABLES, "linked", (lambda _: "[a](docs/x.md#b) ![p](benchmarks/p.png)\n", ()))
    text = "<!-- table: linked -->\n<!-- end -->"
    deep = registry.render(text, registry.ROOT / "docs/results/latency.md")
    assert "[a](../x.md#b) ![p](../../benchmarks/p.png)" in deep
    assert "[a](docs/x.md#b) ![p](benchmarks/p.png)" in registry.render(text)


def test_a_family_has_a_row_with_what_it_declares() -> None:
    rows = {row[1]: row for row in cells(families(()))}
    assert [f"`{name}`" for name in FAMILIES] == [*rows]
    assert rows["`pi05`"][2:] == ["denoise", "vision, prefix", "yes", "yes"]
    assert rows["`act`"][2:] == ["-"] * 4


# -- agreement and success ----------------------------------------------------------------------------------------


def parity_report(name: str, cosine: float, *, steps: int = 10, used: str = "native", **more: Any) -> dict[str, Any]:
    alike = Agreement(
        cosine=cosine, median_cosine=cosine - 1e-5, worst_cosine=cosine - 1e-4, max_error=0.01, mean_error=0.001
    )
    report = Report(name, cosine >= 0.998, 0.998, 64, steps, alike, alike, [], {"keys": alike}, ledger(used),
                    rest_cosine=cosine)  # fmt: skip
    return {**report.as_dict(), "model": {}, "weights": "demo", "fingerprint": WEIGHTS,
            "recorded": "observations.npz", **GPU, **more}  # fmt: skip


def test_a_note_names_the_commit_of_each_run() -> None:
    reports = [parity_report(name, 0.9999) for name in ("native", "native_fp8")]
    for report, commit in zip(reports, ("0123456789ab", "fedcba987654+"), strict=True):
        report["software"] = {**report["software"], "commit": commit}
    text = agreement.parity(reports)
    assert "native (demo): NVIDIA X, torch 2.11.0, commit 0123456;" in text and ", commit fedcba9+" in text
    launched = {**GPU, "git": {"commit": "abcdef0123", "modified": True}}
    assert machine(launched) == "NVIDIA X, torch 2.11.0, commit abcdef0+"


def test_quality_has_agreement_and_success_of_each_configuration() -> None:
    pairs = comparison(native=libero_result(np.arange(20) > 3, WEIGHTS))
    reports = [parity_report("native", 0.9999), parity_report("native_fp8", 0.5)]
    random = parity_report("x", 1.0, weights="pi05")
    assert cells(agreement.quality([[*reports, random], pairs])) == [
        ["`eager_fp32`", "1", "0", "90.0 % (69.9 to 97.2)", "-", "-", "-"],
        ["`native`", "0.9999, 0.998 needed", "0 of 64", "80.0 % (58.4 to 91.9)", "2 / 0 of 20", "-", "-"],
        ["`native_fp8`", "0.5000, 0.998 needed, **too little**", "0 of 64", "-", "-", "-", "-"],
    ]
    other, hard = copy.deepcopy(pairs), copy.deepcopy(pairs)
    other["rows"][0]["name"], hard["protocol"]["stress"], hard["rows"][0]["lost"] = "native_fp8", {"noise": 0.38}, 7
    text = agreement.quality([reports, pairs, other, hard])
    rows = cells(text)
    assert rows[1][4:] == ["2 / 0 of 20", "80.0 % (58.4 to 91.9)", "7 / 0 of 20"] and "noise 0.38" in text
    assert rows[2][3:] == ["80.0 % (58.4 to 91.9)", "2 / 0 of 20", "-", "-"]


def test_runs_of_older_weights_are_named() -> None:
    """As after a new training of the bundled checkpoint, until every run is measured again."""
    now, before = parity_report("native", 0.9999), parity_report("native_fp8", 0.9999, fingerprint="of others")
    without = {k: v for k, v in parity_report("old", 0.9999).items() if k != "fingerprint"}
    other = parity_report("native", 0.9999, weights="pi05", fingerprint="of others")
    assert "older weights" not in agreement.parity([now, other]), "those weights are not bundled"
    text = agreement.parity([now, before, without])
    assert "older weights" in text and ": native_fp8.**" in text and "fingerprint: old.**" in text
    result = comparison(native=libero_result(np.ones(20, bool), "of others"))
    assert success.paired(result).endswith(": native.**\n")
    assert agreement.quality([[now, before], result]).endswith(": agreement, success.**\n")
    assert cells(shapes.models([bench_report(CEILINGS), result]))[0][-1] == f"100.0 % of 20 ({OLD})"
    stored = registry.load("libero_spatial_quick_cpu")
    for name, weights, warned in (("demo", WEIGHTS, False), ("demo", None, True), ("published", None, True)):
        stored["policy"] |= {"name": name, "weights": weights}
        assert success.latency(stored).endswith(": libero_spatial.**\n") is warned


def test_another_bundled_checkpoint_has_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not doubt("other_demo", "of others"), "it is not bundled"
    monkeypatch.setitem(NAMED, "other_demo", tmp_path)
    assert not doubt("other_demo", "of others"), "it has no record"
    record = {**registry.load("training/demo"), "weights": "these", "gpu": "NVIDIA X", "gpus": 3, "earlier": []}
    (tmp_path / "training.json").write_text(json.dumps(record))
    assert doubt("other_demo", "of others") == OLD and not doubt("other_demo", "these")
    assert not doubt("demo", WEIGHTS) and doubt("demo", "these") == OLD and doubt("demo", None) == UNKNOWN
    assert "; 3 NVIDIA X, " in success.training(registry.load("training/other_demo"))


def test_paired_runs_are_rows() -> None:
    won = np.arange(20) > 1

    def sees(pairs: int, discordant: int) -> str:
        return f"{100 * (smallest_difference(pairs, discordant) or 0):.1f} %"

    result = comparison(
        fp8=libero_result(np.arange(20) > 3, WEIGHTS),
        fallback=libero_result(won, WEIGHTS, errors=1, used="eager"),
        bad=libero_result(~won, WEIGHTS),
        crashed=libero_result(won, WEIGHTS, errors=20),
    )
    fp8, fallback, bad, crashed = cells(success.paired({**result, "note": "Why."}))
    rates = ["80.0 % (58.4 to 91.9)", "90.0 % (69.9 to 97.2)"]
    assert fp8 == ["fp8", "10", *rates, "20", "2 / 0", "0.500", sees(20, 2), "0, 0"]
    assert fallback[0] == "fallback (kv_cache ran eager)" and fallback[4:6] == ["19", "0 / 0"]
    assert fallback[-1] == "1, 0" and bad[5:7] == ["18 / 2", "< 0.001"]
    assert crashed[2:] == ["-", "-", "0", "0 / 0", "1.000", "-", "20, 0"]
    assert success.paired({**result, "note": "Why."}).endswith(" Why.\n")


# -- kernels and engines ------------------------------------------------------------------------------------------


def test_attention_marks_what_is_wrong_or_missing() -> None:
    ways = [
        {"way": "own", "worst": 0.01, "mean": 0.001, "right": True, "us": 12.0},
        {"way": "sdpa", "worst": 0.5, "mean": 0.1, "right": False, "us": 30.0},
        {"way": "flash_attn", "error": "DependencyError: attention flash_attn: it needs"},
    ]
    sizes = {"batch": 1, "tokens": 544, "source": 544, "heads": 8, "kv_heads": 1, "head_dim": 256}
    report = {**GPU, "command": ["python"], "shapes": [{"name": "prefix", **sizes, "ways": ways}]}
    row = ["prefix", "1 x 544, 8 heads of 256", "12.0 (0.010)", "30.0 (0.500), **wrong**", "DependencyError"]
    assert cells(hardware.attention(report)) == [row]


def test_engines_whose_names_differ_in_a_number_are_one_row() -> None:
    common: dict[str, Any] = {
        "target": "sm89+sm120",
        "precision": "fp8",
        "library": "TensorRT-RTX 1.4",
        "torch_tensorrt": "2.11.0",
    }
    common["seconds"] = {"export": 1.0, "verify": 50.0, "build": 2.0}
    parts = (("mlp0", 10, 101e6, None), ("mlp11", 9, 105e6, None), ("vision", 10, 831.4e6, 0.99995))
    engines = [
        {**common, "name": name, "coverage": {"operators": 10, "in_engine": n}, "bytes": size, "similarity": cosine}
        for name, n, size, cosine in parts
    ]
    about = {"machine": {"gpu": "NVIDIA X"}, "software": {"torch": "2.11.0"}, "checkpoint": "random pi05"}
    assert cells(hardware.builds({"engines": engines, **about})) == [
        ["mlps", "8.9, 12.0", "fp8", "19/20", "-", "2", "101 to 105", "6"],
        ["vision", "8.9, 12.0", "fp8", "10/10", "0.999950", "1", "831", "3"],
    ]


# -- pictures -----------------------------------------------------------------------------------------------------


def test_the_models_picture_has_our_fastest_and_other_projects_code() -> None:
    report = bench_report(CEILINGS)
    report["rows"].append({**report["rows"][0], "system": "native-fp8", "median_ms": 10.0})
    elsewhere = copy.deepcopy(report)
    elsewhere["rows"] = [{**report["rows"][0], "system": "openpi-max-autotune", "median_ms": 35.0}]
    drawn, theirs = draw_models([report, elsewhere]), PUBLISHED["pi05"]
    assert ">14.00 ms<" in drawn and ">10.00 ms<" in drawn and ">60.00 ms, 4.3 times BF16<" in drawn
    assert ">35.00 ms, 2.5 times BF16<" in drawn, "a later report of the same shape"
    assert f">{theirs.ms:.2f} ms, published for {theirs.how}<" in drawn and theirs.page in sources([report])
    elsewhere["hardware"]["gpu"] = "Y"
    elsewhere["rows"].append({**report["rows"][0]})
    assert "2.5 times BF16" not in draw_models([report, elsewhere]).split(", Y<")[0], "another GPU is another group"
    report["rows"][-1]["median_ms"] = 15.0
    assert "15.00 ms" not in draw_models([report]), "a system slower than BF16 is left out"
    report["model"]["views"] = 3
    assert theirs.how not in draw_models([report]), "the published figure is of two views"


def test_a_long_bar_is_cut_off_and_keeps_its_figure() -> None:
    report = bench_report(CEILINGS)
    longest = next(row for row in report["rows"] if row["system"] == "openpi-eager")
    assert 'stroke="#ffffff"' not in draw_models([report])
    longest["median_ms"] = 293.0
    drawn = draw_models([report])
    assert drawn.count('stroke="#ffffff"') == 1 and ">293.00 ms, " in drawn


@pytest.mark.slow
def test_pictures_are_drawn_where_there_are_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pictures.main(["--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == set(pictures.PICTURES)
    monkeypatch.setattr(registry, "RESULTS", tmp_path)
    assert pictures.main(["--output", str(tmp_path)]) == 0, "a missing run is no error"
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"drawn": [], "absent": list(pictures.PICTURES)}
