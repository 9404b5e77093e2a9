"""README's tables are what the stored results say."""

from __future__ import annotations

import json

import pytest

from eval import store, tables


def test_readme_is_up_to_date() -> None:
    text = (tables.ROOT / "README.md").read_text()
    assert tables.render(text) == text, "README differs from eval/results: run `make tables`"


def test_a_changed_result_changes_the_table() -> None:
    result = tables.load("libero_spatial_demo_h200")
    before = tables.success(result)
    result["summary"]["rows"][0]["success"]["successes"] -= 1
    assert tables.success(result) != before


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        tables.render("<!-- table: nonsense -->\n<!-- end -->")


def test_the_headline_agrees_with_its_episodes() -> None:
    result = tables.load("libero_spatial_demo_h200")
    for row in result["summary"]["rows"]:
        mine = [e for e in result["episodes"] if e["steps"] == row["steps"]]
        assert len({(e["task_id"], e["trial"]) for e in mine}) == len(mine) == row["success"]["episodes"] == 500
        assert sum(e["success"] for e in mine) == row["success"]["successes"]


def test_stored_results_hold_no_machine_paths() -> None:
    for path in tables.RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        words = [w for s in content["launches"] for w in s["command"]]
        assert not [w for w in words if w.startswith("/")], path.name


def test_slim_drops_timings_and_paths() -> None:
    result = {
        "command": ["python", "--output", "/somewhere/x.json"],
        "launches": [{"command": ["/somewhere/y.json"]}],
        "figure": "/somewhere/z.png",
        "videos": [],
        "episodes": [{"steps": 1, "success": True, "timings_ms": {"total": [1.0]}, "video": None, "wall_s": 1.0}],
    }
    kept = store.slim(result, "why")
    assert "/somewhere" not in json.dumps(kept)
    assert kept["episodes"] == [{"steps": 1, "success": True}]
