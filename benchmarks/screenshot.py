"""README's picture of a report. `python -m benchmarks.screenshot` takes it with Debian's chromium."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eval.script import run_script
from vla_accel.errors import DependencyError
from vla_accel.files import replacing
from vla_accel.report import bench
from vla_accel.report.page import write

RESULTS = Path(__file__).parent / "results"
WIDTH, HEIGHT = 1000, 660


@dataclass(frozen=True)
class Arguments:
    """Take the picture of a stored `vla-accel bench` as a report shows it."""

    result: Path = RESULTS / "bench_record_h200.json"
    """What `vla-accel bench --output` wrote."""
    output: Path = RESULTS / "report.png"
    """The picture."""


def run(arguments: Arguments) -> None:
    """Raises DependencyError without chromium or playwright."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise DependencyError(f"a screenshot needs playwright ({error}); pip install '.[browser]'") from error
    if chromium is None:
        raise DependencyError("a screenshot needs chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        report = write(bench.page(json.loads(arguments.result.read_text())), Path(folder) / "report.html")
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(report.as_uri())
        picture = page.screenshot(type="png")
        browser.close()
    with replacing(arguments.output) as temporary:
        temporary.write_bytes(picture)
    print(json.dumps({"stored": arguments.output.name, "bytes": len(picture)}))


if __name__ == "__main__":
    sys.exit(run_script("benchmarks.screenshot", Arguments, run, None))
