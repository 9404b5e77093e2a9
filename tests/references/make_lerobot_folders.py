"""Write the JSON files that lerobot saves for each of its policy classes into tests/support/lerobot_saved.json.

    python tests/references/make_lerobot_folders.py [RELEASE]

Run it with the Python of an environment that has lerobot. It replaces the entry of its release, or RELEASE ("main").
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lerobot_frame as frame
import numpy as np

SAVED = Path(__file__).parents[1] / "support" / "lerobot_saved.json"
CLASSES = {
    "pi0": "PI0Config", "pi05": "PI05Config", "pi0_fast": "PI0FastConfig", "smolvla": "SmolVLAConfig",
    "act": "ACTConfig", "diffusion": "DiffusionConfig", "multi_task_dit": "MultiTaskDiTConfig",
}  # fmt: skip
FILES = ("config", "policy_preprocessor", "policy_postprocessor")


class _Tokenizer:
    """Takes the place of a tokenizer of the hub, which lerobot's main branch saves with the pipeline."""

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)


def saved(kind: str) -> dict[str, Any]:
    """The three files of a policy of this class with two cameras, a state of 6 and actions of 6."""
    configuration = importlib.import_module(f"lerobot.policies.{kind}.configuration_{kind}")
    cameras = {f"observation.images.{camera}": (480, 640) for camera in ("front", "wrist")}
    config = getattr(configuration, CLASSES[kind])(**frame.features(cameras, 6, 6), device="cpu")
    values = {"mean": 0.0, "std": 1.0, "min": -3.0, "max": 3.0, "q01": -2.0, "q99": 2.0}
    one = {name: np.full(6, value, np.float32) for name, value in values.items()}
    stats = {"observation.state": one, "action": one}
    parts = frame.processors_of(kind, config, stats, _Tokenizer(), _Tokenizer())
    with tempfile.TemporaryDirectory() as folder:
        config._save_pretrained(Path(folder))
        for part in parts:
            part.save_pretrained(folder)
        return {name: json.loads((Path(folder) / f"{name}.json").read_text()) for name in FILES}


if __name__ == "__main__":
    release = (sys.argv[1:] or [importlib.metadata.version("lerobot")])[0]
    table = json.loads(SAVED.read_text()) if SAVED.is_file() else {}
    known = [kind for kind in CLASSES if importlib.util.find_spec(f"lerobot.policies.{kind}")]
    table[release] = {kind: saved(kind) for kind in known}
    # A line for each file.
    lines = []
    for name, kinds in table.items():
        entries = []
        for kind, files in kinds.items():
            body = ",\n".join(f"   {json.dumps(f)}: {json.dumps(content)}" for f, content in files.items())
            entries.append(f"  {json.dumps(kind)}: {{\n{body}\n  }}")
        lines.append(f" {json.dumps(name)}: {{\n{(chr(44) + chr(10)).join(entries)}\n }}")
    SAVED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
