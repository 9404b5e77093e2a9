"""The tables of README and docs/, and their pictures in SVG, are what the stored results say."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import markdown, store, tables
from benchmarks.latency_picture import draw
from benchmarks.markdown import machine
from benchmarks.models_picture import PUBLISHED, draw_models, sources
from eval import paired
from eval.harness.statistics import smallest_difference
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.cli.options import read
from vla_accel.component import BESIDE
from vla_accel.ledger import Ledger, LedgerEntry
from vla_accel.measure import bench
from vla_accel.measure.parity import Agreement, Report
from vla_accel.measure.roofline import Ceilings, floors_ms, rates
from vla_accel.models.family import Work


@pytest.mark.parametrize("page", tables.pages(), ids=lambda p: p.name)
def test_a_page_is_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert tables.render(text) == text, f"{page.name} differs from benchmarks/results: run `make tables`"


def test_the_command_line_may_check_alone() -> None:
    assert read(tables.Arguments, ["--check"], "python -m benchmarks.tables").check
    assert not read(tables.Arguments, [], "python -m benchmarks.tables").check


def test_the_pictures_are_up_to_date() -> None:
    for path, drawn in tables.drawings().items():
        assert path.read_text() == drawn, "run `make tables`"


def test_every_table_stands_on_a_page() -> None:
    shown = "".join(page.read_text() for page in tables.pages())
    assert [name for name in tables.TABLES if f"<!-- table: {name} -->" not in shown] == []


def test_every_stored_run_is_shown() -> None:
    sources = [s for _, source in tables.TABLES.values() for s in ((source,) if isinstance(source, str) else source)]
    for path in tables.RESULTS.glob("*.json"):
        assert any(path.match(f"{source}.json") for source in sources), f"no table shows {path.name}"


def test_a_changed_result_changes_the_table() -> None:
    result = tables.load("libero_spatial_demo")
    before = tables.success([result])
    result["summary"]["rows"][0]["success"]["successes"] -= 1
    assert tables.success([result]) != before


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        tables.render("<!-- table: nonsense -->\n<!-- end -->")


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object"])
def test_the_headline_agrees_with_its_episodes(suite: str) -> None:
    result = tables.load(f"{suite}_demo")
    for row in result["summary"]["rows"]:
        mine = [e for e in result["episodes"] if e["steps"] == row["steps"]]
        assert len({(e["task_id"], e["trial"]) for e in mine}) == len(mine) == row["success"]["episodes"] == 500
        assert sum(e["success"] for e in mine) == row["success"]["successes"]


def test_stored_results_hold_no_machine_paths() -> None:
    for path in tables.RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        words = [w for s in content.get("launches", []) for w in s["command"]]
        assert not [w for w in words if w.startswith("/")], path.name


def test_slim_drops_timings_and_paths() -> None:
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


def test_parts_of_one_name_are_one_row_of_the_builds() -> None:
    def part(name: str, inside: int, size: float, similarity: float | None = None) -> dict[str, Any]:
        return {
            "name": name,
            "target": "sm89+sm120",
            "precision": "fp8",
            "coverage": {"operators": 10, "in_engine": inside},
            "similarity": similarity,
            "bytes": size * 1e6,
            "seconds": {"export": 1.0, "verify": 50.0, "build": 2.0},
            "library": "TensorRT-RTX 1.4",
            "torch_tensorrt": "2.11.0",
        }

    result = {
        "engines": [
            part("kv_cache-mlp0", 10, 101.0),
            part("kv_cache-mlp11", 9, 105.0),
            part("vision", 10, 831.4, 0.99995),
        ],
        "machine": {"gpu": None, "cpu_threads": 1},
        "software": {"torch": "2.11.0"},
        "checkpoint": "random pi05",
    }
    lines = tables.builds(result).splitlines()
    assert lines[2] == "| kv_cache-mlps | 8.9, 12.0 | fp8 | 19/20 | - | 2 | 101 to 105 | 6 |"
    assert lines[3] == "| vision | 8.9, 12.0 | fp8 | 10/10 | 0.999950 | 1 | 831 | 3 |"
    assert (
        "TensorRT-RTX 1.4 through torch-tensorrt 2.11.0, torch 2.11.0, no GPU, 1 CPU thread; random pi05." in lines[-1]
    )


WEIGHTS = tables.load("training/demo")["weights"]
GPU = {"hardware": {"device": "cuda", "gpu": "NVIDIA X"}, "software": {"torch": "2.11.0"}}
CPU = {"hardware": {"device": "cpu", "cpu": "Some CPU", "threads": 1}, "software": {"torch": "2.13.0"}}


def ledger(used: str) -> list[dict[str, object]]:
    kept = Ledger()
    kept.record(LedgerEntry("vision", "native", "native"))
    kept.record(LedgerEntry("kv_cache", "native", used, "" if used == "native" else "no GPU"))
    return kept.as_list()


def bench_report(ceilings: Ceilings | None, baseline: str = "openpi-eager", used: str = "native") -> dict[str, Any]:
    """What `vla-accel bench` stores, from its own functions, with times put in place of the measured ones."""
    work = {"vision": Work(1e12), "kv_cache": Work(3e12), "denoise": Work(1e9, bytes=2e9)}
    listed: list[dict[str, Any]] = []
    for steps in (10, 1):
        for name, ms in (("native-bf16", 4.0 + steps), (baseline, 50.0 + steps)):
            ours = name != "openpi-eager"
            system = bench.System(name, lambda _, own=ours: {"policy_timing": {"vision_ms": 1.0} if own else {}}, steps)
            if ours:
                system.notes = {"engines": ledger(used), "work": {n: asdict(w) for n, w in work.items()}}
                if ceilings:
                    system.floors = floors_ms(work, ceilings)
            (row,) = bench.run([system], lambda _: {}, calls=1, warmup=1)
            row["median_ms"] = ms
            if ours:
                row["parts_ms"] = {"vision": 2.0, "kv_cache": 3.0, "denoise": 0.5 * steps, "transfer": 0.1}
                row |= rates(row)
                row["share_of_floor"] = row["floors_ms"]["total"] / ms if ceilings else None
            listed.append(row)
    bench.add_speedups(listed, baseline)
    return {
        "command": "vla-accel bench --output " + "/somewhere" + "/out.json",
        **(GPU if ceilings else CPU),
        "model": {"kind": "pi05", "views": 2, "action_horizon": 10} if ceilings else {},
        "ceilings": None if ceilings is None else ceilings.__dict__,
        "left_out": {} if ceilings else {"openpi-eager": "openpi is not installed"},
        "rows": listed,
        "throughput": [],
    }


def test_bench_on_a_gpu() -> None:
    report = bench_report(Ceilings(1e15, 2e15, 4e12))
    report["throughput"] = [
        {"system": "native-bf16", "steps": 10, "batch": 4, "median_ms": 20.004, "per_second": 199.9}
    ]
    lines = tables.bench(report).splitlines()
    assert lines[0] == "| system | 10 steps | 1 step |"
    assert lines[2:4] == ["| native-bf16 | 14.00, 4.3× | 5.00, 10.2× |", "| openpi-eager | 60.00, 1.0× | 51.00, 1.0× |"]
    assert "times as fast as openpi-eager." in lines[5]
    row = "| 2.00 (1.00), 500 TFLOP/s | 3.00 (3.00), 1000 TFLOP/s | 5.00 (0.50), 400 GB/s | 4.00 | 4.50 | 32 % |"
    assert "| native-bf16 | 10 " + row in lines
    assert not [line for line in lines if line.startswith("| openpi-eager | 10 ")], "it has no parts"
    assert "| native-bf16 | 10 | 4 | 20.00 | 200 | 16.50 |" in lines
    assert lines[-1] == (
        "pi05, 2 views, 10 actions, random weights; NVIDIA X, torch 2.11.0; 1 calls of each system, in turns; "
        "`vla-accel bench --output out.json`. Ceilings measured on the same GPU: 1000 TFLOP/s in BF16, 2000 in FP8, "
        "4000 GB/s copied."
    )


def test_a_step_beside_the_prefix_is_not_in_the_loop_s_rate() -> None:
    report = bench_report(Ceilings(1e15, 2e15, 4e12))
    for row in report["rows"][::2]:
        row["engines"].append(asdict(LedgerEntry("denoise", "native", "native", "", BESIDE)))
        del row["denoise_gb_per_s"]
        row |= rates(row)
    text = tables.bench(report)
    assert " | 5.00 (0.50), 360 GB/s | " in text, "nine steps of ten"
    assert " | 0.50 (0.50) | " in text, "of one step nothing is left to have a rate"
    assert "is in the time of the KV cache" in text
    assert "is in the time of" not in tables.bench(bench_report(None))


@pytest.mark.parametrize(("kind", "header"), [("pi05", "a step"), ("pi0_fast", "a token")])
def test_bench_says_what_a_step_takes(kind: str, header: str) -> None:
    report = bench_report(Ceilings(1e15, 2e15, 4e12))
    report["model"]["kind"] = kind
    report["rows"][0]["step_ms"] = 0.345
    lines = tables.bench(report).splitlines()
    assert any(line.endswith(f"| of the floor | {header} |") for line in lines)
    assert any(line.startswith("| native-bf16 | 10 |") and line.endswith("| 32 % | 0.34 |") for line in lines)
    assert any(line.startswith("| native-bf16 | 1 |") and line.endswith(" % | - |") for line in lines)


def test_bench_says_what_was_timed_once() -> None:
    report = bench_report(Ceilings(1e15, 2e15, 4e12))
    report["timed_once"] = {"openpi-compile": {"steps": 10, "why": "it takes minutes"}}
    assert " openpi-compile was timed at 10 steps alone: it takes minutes." in tables.bench(report)


def test_bench_says_what_is_missing_and_what_fell_back() -> None:
    report = bench_report(None, baseline="eager", used="eager")
    report["rows"] = [r for r in report["rows"] if (r["system"], r["steps"]) != ("eager", 1)]
    bench.add_speedups(report["rows"], "eager")
    lines = tables.bench(report).splitlines()
    assert lines[2] == "| native-bf16 (kv_cache ran eager) | 14.00, 4.3× | 5.00 |"
    assert lines[3] == "| eager (kv_cache ran eager) | 60.00, 1.0× | - |"
    assert "| native-bf16 | 1 | 2.00, 500 TFLOP/s | 3.00, 1000 TFLOP/s | 0.50, 4000 GB/s | -0.50 | - | - |" in lines
    assert lines[-1].startswith("Some CPU, 1 thread, torch 2.13.0; 1 calls")
    assert lines[-1].endswith("Left out: openpi-eager (not installed).")


def test_bench_of_a_checkpoint_with_components_of_its_own() -> None:
    report = bench_report(None)
    report |= {"model": {"name": "toy", "kind": "toy", "action_horizon": 4}, "parts": ["encoder", "decoder"]}
    for row in report["rows"]:
        row |= {"parts_ms": {"encoder": 1.0, "decoder": 2.0}, "decoder_tflops": 300.0}
    lines = tables.bench(report).splitlines()
    assert "| system | steps | encoder | decoder | the rest | floor | of the floor |" in lines
    assert "| native-bf16 | 1 | 1.00 | 2.00, 300 TFLOP/s | 2.00 | - | - |" in lines
    assert lines[-1].startswith("checkpoint toy (toy), 4 actions; Some CPU")
    report["rows"][0]["engines"] = [
        {"component": c, "requested": "auto", "used": "eager"} for c in ("encoder", "decoder")
    ]
    assert "| native-bf16 (chose eager) | " in tables.bench(report)


def parity_report(name: str, cosine: float, *, steps: int = 10, used: str = "native", **more: Any) -> dict[str, Any]:
    alike = Agreement(
        cosine=cosine, median_cosine=cosine - 1e-5, worst_cosine=cosine - 1e-4, max_error=0.01, mean_error=0.001
    )
    report = Report(name, cosine >= 0.998, 0.998, 64, steps, alike, alike, [], {"keys": alike}, ledger(used),
                    rest_cosine=cosine)  # fmt: skip
    return {**report.as_dict(), "model": {}, "weights": "demo", "fingerprint": WEIGHTS,
            "recorded": "observations.npz", **GPU, **more}  # fmt: skip


def test_parity_reports_are_rows() -> None:
    reports = [
        parity_report("native_fp8", 0.99912),
        parity_report("native", 0.9999, steps=3, used="eager"),
        parity_report("native", 0.99995),
        parity_report("native", 0.5, weights="pi05", recorded=None, **CPU),
    ]
    lines = tables.parity(reports).splitlines()
    rest = "1.0e-02 | - | - | 0 (0.0 to 5.7 %) |"
    assert lines[2:6] == [
        f"| native | demo | 64 recorded | 10 | 0.999950 | 0.998 | 0.999950 | 0.999940 | 0.999850 | {rest} yes |",
        "| native (kv_cache ran eager) | demo "
        f"| 64 recorded | 3 | 0.999900 | 0.998 | 0.999900 | 0.999890 | 0.999800 | {rest} yes |",
        f"| native_fp8 | demo | 64 recorded | 10 | 0.999120 | 0.998 | 0.999120 | 0.999110 | 0.999020 | {rest} yes |",
        f"| native | pi05 | 64 random | 10 | 0.500000 | 0.998 | 0.500000 | 0.499990 | 0.499900 | {rest} **no** |",
    ]
    assert lines[-1].endswith(
        "native_fp8 (demo), native (demo): NVIDIA X, torch 2.11.0; native (pi05): Some CPU, 1 thread, torch 2.13.0."
    )
    drawn = {**reports[0], "draws": 8, "flipped": 3, "rest_cosine": 0.99991}
    (line,) = tables.parity([drawn]).splitlines()[2:3]
    assert " | 64 recorded × 8 | " in line and line.endswith(" | - | - | 3 (0.2 to 1.7 %) | yes |")
    assert " | 0.999910 | 0.998 | 0.999120 | 0.999110 | " in line
    judged = {**drawn, "sensitivity": 0.4, "relative_error": 0.031}
    assert " | 40.0 % | 3.1 % | 3 (0.2 to 1.7 %) | " in tables.parity([judged])


def test_a_table_says_of_which_commit_its_runs_are() -> None:
    reports = [parity_report(name, 0.9999) for name in ("native", "native_fp8")]
    for report, commit in zip(reports, ("0123456789ab", "fedcba987654+"), strict=True):
        report["software"] = {**report["software"], "commit": commit}
    assert tables.parity(reports[:1]).endswith("NVIDIA X, torch 2.11.0, commit 0123456.\n")
    assert tables.parity(reports).endswith(
        "native (demo): NVIDIA X, torch 2.11.0, commit 0123456; "
        "native_fp8 (demo): NVIDIA X, torch 2.11.0, commit fedcba9+.\n"
    )
    launched = {**GPU, "git": {"commit": "abcdef0123", "modified": True}}
    assert machine(launched) == "NVIDIA X, torch 2.11.0, commit abcdef0+"


def test_a_model_has_a_row_of_all_that_is_stored_of_it() -> None:
    ceilings = Ceilings(1e15, 2e15, 4e12)
    smolvla = bench_report(ceilings, "lerobot-eager")
    smolvla["model"] = {"kind": "smolvla", "views": 3, "action_horizon": 50}
    smolvla["rows"][0]["memory"] = {"total": 1_100_000_000, "peak_running": 1_260_000_000}
    agreed = {
        "pi0": {"parameters": 3_238_046_480, "batch1": {"float32_max": 1e-6}, "batch3": {"float32_max": 2e-6}},
        "pi05": {"parameters": 3_353_431_824, "batch1": {"float32_max": 4e-6}, "batch3": {"float32_max": 3e-6}},
    }
    lerobot = lerobot_report()
    won = np.arange(20) > 1
    played = paired.compare(libero(won), {"native": libero(np.arange(20) > 3), "native_fp8": libero(won)}, "eager")
    played["rows"] = [r for r in played["rows"] if r["steps"] == 10]
    reports = [bench_report(ceilings), smolvla, agreed, lerobot, played]
    lines = tables.models(reports).splitlines()
    case = "2 views, 10 actions, 10 steps | 60.00 (openpi, eager)"
    assert lines[2] == f"| π0.5 | 3.35 B | {case} | 14.00, 4.3× | - | - | 4.0e-06 | 80.0 % of 20 |"
    case = "3 views, 50 actions, 10 steps | 60.00 (lerobot, eager)"
    assert lines[3] == f"| SmolVLA | 402 M | {case} | 14.00, 4.3× | - | 1.3 GB | 2.0e-06 | - |"
    assert len(lines) == 6 and lines[-1].endswith("in BF16. NVIDIA X, torch 2.11.0.")
    alone = tables.models([smolvla]).splitlines()[2]
    assert alone.startswith("| SmolVLA | 403 M | ") and alone.endswith(" | - | - |"), (
        "what no run says is counted, or not there"
    )
    small = {**smolvla, "model": {**smolvla["model"], "kind": "pi0_fast"}}
    row = tables.models([small, lerobot]).splitlines()[2]
    assert row.startswith("| π0-FAST | 2.92 B | ") and row.endswith(" | - | - |"), "a small model's are not its"
    small["rows"] = bench_report(ceilings, "eager")["rows"]
    assert " | 60.00 (ours, eager) | 14.00, 4.3× | " in tables.models([small]).splitlines()[2], "beside no other code"


def lerobot_report() -> dict[str, Any]:
    """What `tests/parity/compare_with_lerobot.py` stores."""
    case = {"case": "batch 3", "batch": 3, "views": 2, "steps": 10, "actions_rms": 1.25}
    low = {"bfloat16_rms_to_float32": 0.012, "lerobot_bfloat16_rms_to_float32": 0.013}
    low["lerobot_autocast_rms_to_float32"] = 0.005
    less = {**case, "case": "a camera less", "views": 1, "float32_max": 1e-6}
    cases = [{**case, "float32_max": 2e-6, **low}, less]
    versions = {"lerobot": "0.6.1", "torch": "2.11.0"}
    tiny = {"versions": versions, "parameters": 1_000_000, "size": "small", "cases": [less]}
    large = {"versions": versions, "parameters": 401_900_000, "size": "published", "cases": cases}
    return {**CPU, "models": {"smolvla": large, "pi0_fast": tiny}}


def test_agreement_with_lerobot_has_a_row_a_case() -> None:
    lines = tables.lerobot_agreement(lerobot_report()).splitlines()
    assert lines[2:5] == [
        "| SmolVLA | batch 3 | 3 | 2 | 10 | 1.25 | 2.0e-06 | 1.2e-02 | 1.3e-02 | 5.0e-03 |",
        "| SmolVLA | a camera less | 3 | 1 | 10 | 1.25 | 1.0e-06 | - | - | - |",
        "| π0-FAST, small | a camera less | 3 | 1 | 10 | 1.25 | 1.0e-06 | - | - | - |",
    ]
    told = "Beside lerobot 0.6.1, torch 2.11.0. Ours: Some CPU, 1 thread, torch 2.13.0."
    assert lines[-1].endswith(f"rms difference from lerobot's FP32. {told}")


def test_a_run_that_is_absent_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "there.json").write_text("[1]")
    assert tables.load(("there", "th*")) == [[1], [[1]]]
    for name in ("not_there", "not_*"):
        with pytest.raises(FileNotFoundError, match=f"{name[:4]}.*json"):
            tables.load(("there", name))


def test_quality_has_agreement_and_success_of_a_configuration() -> None:
    won = np.arange(20) > 1
    pairs = {"note": "", **paired.compare(libero(won), {"native": libero(np.arange(20) > 3)}, "eager_fp32")}
    pairs["protocol"]["suite"] = "libero_spatial"
    pairs["rows"] = [r for r in pairs["rows"] if r["steps"] == 10]
    reports = [
        parity_report("native", 0.9999),
        parity_report("native_fp8", 0.5),
        parity_report("x", 1.0, weights="pi05"),
    ]
    lines = tables.quality([reports, pairs]).splitlines()
    assert lines[2] == "| `eager_fp32` | 1 | 0 | 90.0 % (69.9 to 97.2) | - | - | - |"
    assert lines[3] == "| `native` | 0.9999, 0.998 needed | 0 of 64 | 80.0 % (58.4 to 91.9) | 2 / 0 of 20 | - | - |"
    assert lines[4] == "| `native_fp8` | 0.5000, 0.998 needed, **too little** | 0 of 64 | - | - | - | - |"
    assert len(lines) == 7, "random weights say little"
    assert "lost: those that only eager_fp32 won" in lines[6] and not re.search("portable|stress:", lines[6])
    other, hard = copy.deepcopy(pairs), copy.deepcopy(pairs)
    other["rows"][0]["name"], hard["protocol"]["stress"], hard["rows"][0]["lost"] = "native_fp8", {"noise": 0.38}, 7
    lines = tables.quality([reports, pairs, other, hard]).splitlines()
    assert lines[3].endswith("| 2 / 0 of 20 | 80.0 % (58.4 to 91.9) | 7 / 0 of 20 |")
    assert lines[4].endswith("| 80.0 % (58.4 to 91.9) | 2 / 0 of 20 | - | - |") and "; stress: noise 0.38" in lines[6]


def test_runs_of_other_weights_are_named() -> None:
    """As after a new training of the bundled checkpoint, until all is measured again."""
    said = "**Made with the weights that the bundled checkpoint had before: {}.**"
    untold = "**Nothing tells which weights these runs had, which carry no fingerprint: {}.**"
    now, before = parity_report("native", 0.9999), parity_report("native_fp8", 0.9999, fingerprint="of others")
    without = {k: v for k, v in parity_report("old", 0.9999).items() if k != "fingerprint"}
    other = parity_report("native", 0.9999, weights="pi05", fingerprint="of others")
    assert "had before" not in tables.parity([now, other])
    told = f" {said.format('native_fp8')} {untold.format('old')}\n"
    assert tables.parity([now, before, without]).endswith(told)
    run = {"eager": libero(np.ones(4, bool)), "native": libero(np.ones(4, bool))}
    run["native"]["policy"]["weights"] = "of others"
    result = {"note": "", "command": [], **paired.compare(run["eager"], {"native": run["native"]}, "eager")}
    result["protocol"]["suite"] = "libero_spatial"
    result["rows"] = [r for r in result["rows"] if r["steps"] == 10]
    assert tables.paired(result).endswith(f" {said.format('native')}\n")
    assert tables.quality([[now, before], result]).endswith(f" {said.format('agreement, success')}\n")
    assert tables.quality([[now], result]).endswith(f" {said.format('success')}\n")
    models = tables.models([bench_report(Ceilings(1e15, 2e15, 4e12)), result]).splitlines()
    assert models[2].endswith("| 100.0 % of 4 (its former weights) |")
    stored = tables.load("libero_spatial_quick_cpu")
    stored["policy"] |= {"name": "demo", "weights": WEIGHTS}
    assert "had before" not in tables.latency(stored)
    for name in ("demo", "published"):
        stored["policy"] |= {"name": name, "weights": None}
        assert tables.latency(stored).endswith(f" {untold.format('libero_spatial')}\n")


def test_another_bundled_checkpoint_has_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = "its former weights"
    assert not markdown.doubt("other_demo", "of others"), "it is not bundled"
    with pytest.raises(FileNotFoundError, match="record of a bundled checkpoint other_demo, found none"):
        tables.load("training/other_demo")
    monkeypatch.setitem(NAMED, "other_demo", tmp_path)
    assert not markdown.doubt("other_demo", "of others"), "nothing is known of how it was trained"
    record = {**tables.load("training/demo"), "weights": "these", "gpu": "NVIDIA X", "gpus": 3, "earlier": []}
    (tmp_path / "training.json").write_text(json.dumps(record))
    assert markdown.doubt("other_demo", "of others") == former and not markdown.doubt("other_demo", "these")
    assert not markdown.doubt("demo", WEIGHTS) and markdown.doubt("demo", "these") == former
    lines = tables.training(tables.load("training/other_demo")).splitlines()
    assert "; 3 NVIDIA X, " in lines[2]
    assert "; 2 NVIDIA H200, " in tables.training(tables.load("training/demo")), "a record that does not tell"


def test_the_picture_shows_what_the_report_says() -> None:
    report = bench_report(Ceilings(1e15, 2e15, 4e12))
    before = draw([report])
    assert "π0.5, 2 views, 10 actions, 10 steps" in before and "14.00 ms, 71 Hz, 4.3× openpi" in before
    assert before.count("<title>kv_cache: 3.00 ms</title>") == 2, "one bar a step count"
    assert before == draw([report]), "the same bytes each time"
    report["rows"][0]["parts_ms"]["kv_cache"] = 3.5
    assert "<title>kv_cache: 3.50 ms</title>" in draw([report])
    # A run with more of our systems has more bars.
    (row,) = (r for r in report["rows"] if r["system"] == "native-bf16" and r["steps"] == 10)
    for name, label in (("native-fp8-vision", "FP8 prefix, vision"), ("native-int8-denoise", "INT8 expert")):
        assert label not in draw([report])
        report["rows"].append({**row, "system": name, "median_ms": 13.0})
        assert f">{label}<" in draw([report])


def test_the_models_picture_has_the_fastest_of_ours_and_of_others() -> None:
    report = bench_report(Ceilings(1e15, 2e15, 4e12))
    report["hardware"] = {"gpu": "NVIDIA X"}
    (row,) = (r for r in report["rows"] if r["system"] == "native-bf16" and r["steps"] == 10)
    report["rows"].append({**row, "system": "native-fp8", "median_ms": 10.0})
    told = draw_models([report])
    theirs = PUBLISHED["pi05"]
    assert ">14.00 ms, X, 4.3× openpi<" in told and ">10.00 ms, X, 6.0× openpi<" in told
    assert f">{theirs.ms:.2f} ms, {theirs.how}<" in told and theirs.page in sources([report])
    report["rows"][-1]["median_ms"] = 15.0
    assert "15.00 ms" not in draw_models([report]), "what is slower than BF16 is left out"
    report["model"]["views"] = 3
    assert theirs.how not in draw_models([report]), "theirs is of two views"


def test_several_stored_results_make_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"at least one parity_\*\.json"):
        tables.load("parity_*")
    for name in ("native_fp8", "native"):
        (tmp_path / f"parity_{name}.json").write_text(json.dumps(parity_report(name, 0.9999)))
    (tmp_path / "other.json").write_text("{}")
    text = tables.render("<!-- table: parity_demo -->\n<!-- end -->")
    assert text.count("| yes |") == 2


def libero(won: np.ndarray, errors: int = 0, used: str = "native") -> dict[str, Any]:
    return {
        "protocol": {},
        "policy": {"name": "demo", "weights": WEIGHTS, "metadata": {"engines": ledger(used)}},
        "launches": [GPU],
        "episodes": [
            {"steps": s, "task_id": 0, "trial": i, "success": bool(w), "error": "crash" if i < errors else None}
            for s in (10, 3)
            for i, w in enumerate(won)
        ],
    }


def seen(pairs: int, discordant: int) -> str:
    return f"{100 * (smallest_difference(pairs, discordant) or 0):.1f} %"


def test_paired_runs_are_rows() -> None:
    won = np.arange(20) > 1
    others = {"fp8": libero(np.arange(20) > 3), "fallback": libero(won, errors=1, used="eager"), "bad": libero(~won)}
    result = {"note": "Why.", "command": ["python"], **paired.compare(libero(won), others, "eager")}
    lines = tables.paired(result).splitlines()
    assert lines[0].startswith("| run | steps | success (95 %) | eager (95 %) | pairs |")
    assert (
        lines[2]
        == f"| fp8 | 3 | 80.0 % (58.4 to 91.9) | 90.0 % (69.9 to 97.2) | 20 | 2 / 0 | 0.500 | {seen(20, 2)} | 0, 0 |"
    )
    assert lines[3].startswith("| fallback (kv_cache ran eager) | 3 | 94.7 % ")
    assert lines[3].endswith(f" | 19 | 0 / 0 | 1.000 | {seen(19, 0)} | 1, 0 |")
    assert lines[4].endswith(f" | 20 | 18 / 2 | < 0.001 | {seen(20, 20)} | 0, 0 |")
    assert lines[5].startswith("| fp8 | 10 |")
    assert lines[-1].endswith("NVIDIA X, torch 2.11.0; `python`. Why.")


def test_a_paired_run_of_crashes_has_no_rate() -> None:
    run = libero(np.ones(2, bool), errors=2)
    result = {"note": "", "command": [], **paired.compare(run, {"other": run}, "eager")}
    assert tables.paired(result).splitlines()[2] == "| other | 3 | - | - | 0 | 0 / 0 | 1.000 | - | 2, 2 |"
