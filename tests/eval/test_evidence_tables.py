"""Tables and pictures of tuning, late answers, stressed pairs, shapes and attention, from results as their runs write
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, tables
from benchmarks.attention_table import attention
from benchmarks.bench_tables import batches, paced, starts
from benchmarks.goals_table import goals
from benchmarks.late_table import late
from benchmarks.libero_tables import stressed
from benchmarks.shapes_table import shapes
from benchmarks.tune_table import tune
from eval.harness.late import _kind
from vla_accel.measure.roofline import Ceilings, add_batch_floors
from vla_accel.ops.phases import PHASES
from vla_accel.report.bench import batch_lines

GPU = {"hardware": {"gpu": "NVIDIA X", "device": "cuda"}, "software": {"torch": "2.11.0"}}


def tried(name: str, ms: float, cosine: float | None, **more: Any) -> dict[str, Any]:
    agreement = None if cosine is None else {"cosine": cosine}
    row = {"name": name, "latency": {"median_ms": ms}, "agreement": agreement, "success": None, "dropped": None}
    return {**row, "other_policy": False, "front": True, "chosen": False, **more}


TUNED = {
    **GPU, "command": ["vla-accel", "tune", "demo"], "seconds": 300, "chosen": "native fp8", "why": "the fastest",
    "times_as_fast": 20.0, "left_out": {"tensorrt": "not installed"},
    "tried": [
        tried("eager_fp32", 40.0, None, dropped=None),
        tried("native fp8", 2.0, 0.999, chosen=True,
              success={"lost": 3, "gained": 2, "pairs": 336, "lower_bound": -0.018}),
        tried("native int8", 1.5, 0.9, dropped="gate one: cosine"),
    ],
}  # fmt: skip


def rate(won: int, episodes: int) -> dict[str, Any]:
    return {"successes": won, "episodes": episodes, "errors": 0, "rate": won / episodes if episodes else None,
            "wilson_95_low": 0.5, "wilson_95_high": 0.9}  # fmt: skip


def grid(kinds: tuple[str, ...], ticks: tuple[int, ...], won: int) -> dict[str, Any]:
    rows = [
        {"chunking": kind, "latency_ticks": k, "latency_ms": 50.0 * k, "steps": 10, **rate(won, 100)}
        for k in ticks for kind in kinds
    ]  # fmt: skip
    command = ["python", "-m", "eval.libero.late"]
    return {"note": "", "command": command, "control_hz": 20, "policy": GPU, "rows": rows, "protocol": {}}


def bench(views: int, horizon: int, ms: float, **more: Any) -> dict[str, Any]:
    row = {
        "system": "native-bf16", "steps": 10, "median_ms": ms, "p10_ms": ms, "p90_ms": ms, "calls": 9,
        "parts_ms": {"vision": 1.0}, "floors_ms": {"total": 2.0}, "engines": [],
        "work": {"vision": {"flop": 1e12, "bytes": 0.0, "precision": "bf16"},
                 "denoise": {"flop": 1e9, "bytes": 4e9, "precision": "bf16"}},
    }  # fmt: skip
    slow = {**row, "system": "openpi-eager", "median_ms": 306.0, "floors_ms": {}, "parts_ms": {}}
    return {
        **GPU, "schema": "vla_accel.bench/1", "model": {"kind": "pi05", "views": views, "action_horizon": horizon},
        "rows": [row, slow], "throughput": [], "ceilings": CEILINGS.__dict__, "command": "vla-accel bench",
        "left_out": {}, **more,
    }  # fmt: skip


CEILINGS = Ceilings(1e15, 2e15, 4e12)
BATCHES = [
    {"system": "native-bf16", "steps": 10, "batch": n, "median_ms": 9.0 * n, "per_second": 111.0} for n in (1, 2, 8)
]  # fmt: skip


def test_what_tuning_tried_is_told_fastest_first() -> None:
    lines = tune(TUNED).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| native int8", "| **native fp8**", "| eager_fp32"]
    assert lines[2].endswith("| 1.50 | 0.900000 | - | gate one: cosine |")
    assert "3 / 2 of 336, above -1.8 points | chosen |" in lines[3] and lines[4].endswith("| the reference |")
    assert "Not tried: tensorrt: not installed." in lines[6]


def test_late_answers_stand_beside_who_would_be_so_late() -> None:
    both = [grid(("plain", "rtc"), (1, 8), 80), grid(("trained",), (8,), 95)]
    lines = late([both, bench(2, 10, 9.0)]).splitlines()
    assert lines[0] == ("| ticks late | ms | plain chunks | real-time chunking | trained chunking | so late would be |")
    assert lines[2].startswith("| 1 | 50 | 80.0 % (50.0 to 90.0) of 100 |") and "| - | native-bf16 (9 ms) |" in lines[2]
    assert lines[3] == "| 7 | 350 | - | - | - | openpi-eager (306 ms) |", "nobody played what openpi's code needs"
    assert lines[4].endswith("| 95.0 % (50.0 to 90.0) of 100 | - |")
    assert "openpi-eager (306 ms)" in late([[grid(("plain",), (7,), 1)], bench(2, 10, 9.0)])


def test_shapes_are_rows_and_each_system_is_there_once() -> None:
    again = bench(2, 10, 9.5)
    lines = shapes([again, bench(3, 50, 13.0), bench(2, 10, 9.0, throughput=BATCHES), {"schema": "other"}]).splitlines()
    assert lines[0] == "| call | steps | rows | native-bf16 |", "openpi has tables of its own"
    assert lines[2] == "| π0.5, 2 views, 10 actions | 10 | 10 | 9.00 (2.00) |", "the report with batches counts"
    assert lines[3] == "| π0.5, 3 views, 50 actions | 10 | 50 | 13.00 (2.00) |"
    prompt = bench(2, 10, 9.2, prompt_tokens=180)
    assert "| π0.5, 2 views, 10 actions, prompt of 180 tokens | 10 | 10 | 9.20 (2.00) |" in shapes([again, prompt])


def named(result: dict[str, Any], *systems: tuple[str, float]) -> dict[str, Any]:
    """The same run with these systems, of such ms."""
    row = result["rows"][0]
    return {**result, "rows": [{**row, "system": name, "median_ms": ms} for name, ms in systems]}


def test_what_was_timed_in_turns_stands_side_by_side() -> None:
    batches = named(bench(2, 10, 0.0, throughput=BATCHES), ("native-fp8", 8.0), ("native-fp8-vision", 7.0))
    turns = named(bench(2, 10, 0.0), ("native-bf16", 9.0), ("native-fp8", 7.5), ("realtime-vla", 21.0))
    found = "| π0.5, 2 views, 10 actions | 10 | 10 | 9.00 (2.00) | 7.50 (2.00) | 21.00 (2.00) | 7.00 (2.00) |"
    assert shapes([batches, turns]).splitlines()[2] == found


def test_goals_stand_beside_the_times_of_their_calls_and_parts() -> None:
    base = named(bench(2, 10, 0.0), ("native-fp8", 8.0), ("portable-fp8", 9.0), ("portable-int8", 10.0))
    large = named(bench(3, 50, 0.0), ("native-bf16", 12.6), ("portable-int8", 10.0))
    prompt = named(bench(2, 10, 0.0, prompt_tokens=60), ("native-fp8", 9.5))
    camera = named(bench(2, 10, 0.0, camera=[480, 640]), ("portable-bf16", 9.5))
    batch = {**BATCHES[2], "system": "native-fp8"}
    many = {**base, "throughput": [batch, {**batch, "batch": 3}]}
    lines = goals([many, prompt, camera, large]).splitlines()[2:-2]
    cells = "1.00 | - | - | {} | 2.00 | {} % |"
    assert lines == [
        "| π0.5, 2 views, 10 actions | portable-fp8 | 9.00 | 10.0, met | " + cells.format("8.00", 22),
        "| π0.5, 2 views, 10 actions | portable-int8 | 10.00 | 9.5, missed by 6 % | " + cells.format("9.00", 20),
        # 1.1 x (512 + 60) / (512 + 20) x 8
        "| π0.5, 2 views, 10 actions, prompt of 60 tokens | native-fp8 | 9.50 | 9.5, missed by 0 % | "
        + cells.format("8.50", 21),
        "| π0.5, 3 views, 50 actions | native-bf16 | 12.60 | 10.5, missed by 20 % | " + cells.format("11.60", 16),
        # 280 observations a second
        "| π0.5, 2 views, 10 actions, batch 8 | native-fp8 | 72.00 | 28.6, missed by 152 % "
        "| - | - | - | - | 9.00 | 12 % |",
    ]
    assert "met" not in goals([named(bench(2, 10, 0.0), ("portable-int8", 10.0))]), "there is no FP8 to hold it against"


def test_a_start_has_a_row_without_and_with_what_the_one_before_left() -> None:
    names = ("import", *PHASES, "other", "first_action")
    cold, warm = (dict.fromkeys(names, seconds) for seconds in (3.0, 1.0))
    told = bench(2, 10, 9.0)
    told["rows"] = [{**told["rows"][0], "calls": 20, "start": {"cold": cold, "warm": warm, "file_read": 2.0}},
                    {**told["rows"][1], "calls": 20}]  # fmt: skip
    lines = starts(told).splitlines()
    assert lines[2] == "| native-bf16 | first | " + "3.0 | " * len(names) + "2.0 | 5.0 |"
    assert lines[3] == "| native-bf16 | second | " + "1.0 | " * len(names) + "2.0 | 5.0 |"
    assert lines[4] == "", "another project's start is not timed"


def test_calls_at_a_rate_stand_beside_calls_without_pauses() -> None:
    slow = {"hz": 20.0, "calls": 60, "late": 2, "power_w": 203.4, "median_ms": 9.444, "p90_ms": 9.667, "max_ms": 10.3}
    told = bench(2, 10, 8.66)
    told["rows"][0]["paced"], told["rows"][1]["paced"] = slow, {**slow, "late": 60, "power_w": None}
    told["rows"].append({**told["rows"][1], "steps": 3})
    del told["rows"][2]["paced"]
    lines = paced({**told, "rows": [{**row, "calls": 60} for row in told["rows"]]}).splitlines()
    assert lines[0] == "| system | steps | without pauses | at 20 Hz | 90 % within | longest | late | W |"
    assert lines[2:5] == [
        "| native-bf16 | 10 | 8.66 | 9.44 | 9.67 | 10.30 | 2 of 60 | 203 |",
        "| openpi-eager | 10 | 306.00 | 9.44 | 9.67 | 10.30 | 60 of 60 | - |",
        "",
    ]


def test_a_batchs_floor_reads_the_weights_once() -> None:
    found = [dict(row) for row in BATCHES]
    add_batch_floors(found, bench(2, 10, 9.0)["rows"], CEILINGS)
    # Vision: 1 ms of arithmetic an observation; denoise: 1 ms of bytes, whatever the batch.
    assert [row["floors_ms"]["total"] for row in found] == pytest.approx([2.0, 3.0, 9.0])
    assert found[2]["floors_ms"]["vision"] == pytest.approx(8.0) and found[2]["floors_ms"]["denoise"] == 1.0
    per_observation, floors = batch_lines(found)
    assert per_observation == {"native-bf16": [(1, 9.0), (2, 9.0), (8, 9.0)]}
    assert floors["native-bf16"] == [(1, pytest.approx(2.0)), (2, pytest.approx(1.5)), (8, pytest.approx(1.125))]
    found[0]["system"] = "another"
    del found[0]["floors_ms"]
    add_batch_floors(found, bench(2, 10, 9.0)["rows"], CEILINGS)
    assert "floors_ms" not in found[0]


def test_batches_have_parts_and_floors_where_a_run_keeps_them() -> None:
    """Runs before that have neither; of those the whole call's floor is computed."""
    before = batches(bench(2, 10, 9.0, throughput=BATCHES)).splitlines()
    assert before[0] == "| system | steps | batch | median ms | observations/s | floor ms |"
    assert before[4] == "| native-bf16 | 10 | 8 | 72.00 | 111 | 9.00 |"
    parts = {"vision": 9.0, "kv_cache": 2.5, "denoise": 1.25, "transfer": 0.1}
    kept = [{**row, "parts_ms": parts} for row in BATCHES[2:]]
    lines = batches(bench(2, 10, 9.0, throughput=kept)).splitlines()
    assert lines[0].endswith("| observations/s | vision | KV cache | denoise | the rest | floor | of the floor |")
    cells = "9.00 (8.00) | 2.50 | 1.25 (1.00) | 59.25 | 9.00 | 12 % |"
    assert lines[2] == f"| native-bf16 | 10 | 8 | 72.00 | 111 | {cells}"


PAIRED = {
    **{"note": "", "command": ["python"], "reference": "eager_fp32", "policies": {"native": {**GPU, "engines": []}}},
    "protocol": {"suite": "libero_spatial,libero_spatial_object", "stress": {"noise": 0.3}},
    "rows": [{
        "name": "native", "steps": 10, "pairs": 1000, "reference": rate(600, 1000), "other": rate(580, 1000),
        "lost": 60, "gained": 40, "mcnemar_exact_p": 0.05, "smallest_difference": 0.03,
    }],
}  # fmt: skip


def test_stressed_pairs_name_the_stress() -> None:
    lines = stressed(PAIRED).splitlines()
    assert "| 60 / 40 | 0.050 |" in lines[2]
    assert "Stress: noise 0.3, on libero_spatial and libero_spatial_object." in lines


def test_attention_says_which_way_is_wrong_or_missing() -> None:
    ways = [
        {"way": "own", "worst": 0.01, "mean": 0.001, "right": True, "us": 12.0},
        {"way": "sdpa", "worst": 0.5, "mean": 0.1, "right": False, "us": 30.0},
        {"way": "flash_attn", "error": "DependencyError: attention flash_attn: it needs"},
    ]
    sizes = {"batch": 1, "tokens": 544, "source": 544, "heads": 8, "kv_heads": 1, "head_dim": 256}
    text = attention({**GPU, "command": ["python"], "shapes": [{"name": "prefix", **sizes, "ways": ways}]})
    cells = "| 12.0 (0.010) | 30.0 (0.500), **wrong** | DependencyError |"
    assert f"| prefix | 1 x 544, 8 heads of 256 {cells}" in text


def test_pictures_are_drawn_where_there_are_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    stored = {
        "tune_demo_h100": TUNED, "libero_late_plain": grid(("plain", "rtc"), (0, 8), 80), "libero_stress": PAIRED,
        "bench_record_h200": bench(2, 10, 9.0, throughput=BATCHES),
    }  # fmt: skip
    for name, result in stored.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert pictures.main(["--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == set(pictures.PICTURES)
    for path in tmp_path.iterdir():
        path.unlink()
    assert pictures.main(["--output", str(tmp_path)]) == 0, "no run is no error"
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"drawn": [], "absent": list(pictures.PICTURES)}


def test_chunks_of_a_policy_that_was_trained_for_them_are_called_so() -> None:
    trained = {"policy": {"config": {"rtc": {"trained": True}}}}
    assert (_kind(trained, "rtc"), _kind(trained, "plain")) == ("trained", "plain")
    assert _kind({"policy": {"config": None}}, "rtc") == "rtc", "a server does not tell"
