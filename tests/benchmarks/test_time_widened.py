"""`benchmarks.time_widened` reports what is wrong with any config, also where another is faster."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.time_widened import joined


def times(us: float, error: float = 0.001, failed: str = "") -> dict[str, Any]:
    config, reasons = f"config of {us}", {failed: "it did not run"} if failed else {}
    right = error < 0.006 and not failed
    return {
        "us": us, "config": config, "error": error, "right": right, "all_us": {config: us}, "failed": reasons,
    }  # fmt: skip


@pytest.mark.parametrize("swapped", [False, True])
def test_the_fastest_config_hides_no_wrong_one(swapped: bool) -> None:
    def both(*found: dict[str, Any]) -> dict[str, Any]:
        return joined(*(reversed(found) if swapped else found))

    good = both(times(1.0), times(2.0))
    assert good["right"] and good["config"] == "config of 1.0"
    assert good["all_us"] == {"config of 1.0": 1.0, "config of 2.0": 2.0}
    wrong, failed = both(times(1.0), times(2.0, error=0.5)), both(times(1.0), times(2.0, failed="other"))
    assert (wrong["us"], wrong["right"], wrong["error"]) == (1.0, False, 0.5)
    assert (failed["us"], failed["right"], failed["failed"]) == (1.0, False, {"other": "it did not run"})
