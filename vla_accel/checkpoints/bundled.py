"""The checkpoints that the package brings, by name. Imports nothing."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"


def bundled(assets: Path) -> dict[str, Path]:
    """The checkpoints in a folder by name: π0.5's is "demo", any other has its folder's."""
    demo = {"demo": assets / "pi05_demo"}
    return demo | {p.parent.name: p.parent for p in sorted(assets.glob("*/config.json")) if p.parent != demo["demo"]}


NAMED = bundled(ASSETS)
"""The folders of the bundled checkpoints."""
