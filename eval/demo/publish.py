"""From a training run to the bundled checkpoint: its newest checkpoint, and the record of how it was trained.

`python -m eval.demo.publish --run DIR --states DIR`. The record holds the manifest of the start states, which
shows that no shipped evaluation state was trained on.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from eval.demo.assets import DEMOS, EARLIER
from eval.demo.train import RECORD, newest
from eval.script import replacing_files, run_script
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.checkpoints.writer import save_weights
from vla_accel.cli.options import OutputFolder
from vla_accel.errors import CheckpointError
from vla_accel.families.loading import load
from vla_accel.fp8 import FILE
from vla_accel.policy.agreement import weights_of

# Settings with paths of the training machine, which are left out of the record.
_PLACES = ("start", "states", "held_out", "out", "resume", "devices")


@dataclass(frozen=True)
class Arguments:
    """Publish a run, finished or not, as a demo checkpoint."""

    run: Path
    """Folder that `train` wrote."""
    states: Path
    """Folder that has one of each suite, which `states` wrote: their manifests go into the record."""
    output: OutputFolder = None
    """Where to, instead of the bundled checkpoint of the family. FP8 scales of former weights are removed there."""


def main(arguments: Arguments) -> None:
    """Write the checkpoint and training.json, all files or none; refuse what does not load or is too large."""
    found = newest(arguments.run)
    # Before anything is written: a run that is not whole must not take the place of the shipped checkpoint.
    loaded = load(found)
    name, limit = DEMOS[loaded.family.name]
    output, log = arguments.output or NAMED[name], json.loads((found / RECORD).read_text())
    suites = log["config"]["suites"]
    earlier = found / EARLIER
    manifests = {suite: json.loads((arguments.states / suite / "manifest.json").read_text()) for suite in suites}
    record = {
        "complete": bool(log["done"]),
        "weights": weights_of(loaded.model),
        "settings": {k: v for k, v in log["config"].items() if k not in _PLACES},
        "earlier": json.loads(earlier.read_text()) if earlier.is_file() else [],
        "gpus": log["world"],
        **{key: log[key] for key in ("gpu", "steps", "seconds", "history")},
        "start_states": manifests,
    }
    inside = (RECORD, EARLIER)  # of the record
    rest = [path for path in found.iterdir() if path.name not in inside and not path.match("model-*.safetensors")]
    text = json.dumps(record, indent=1) + "\n"
    stored = SafetensorsWeights(found)
    weights = {name: stored.read(name) for name in stored.shapes}
    size = sum(t.nbytes for t in weights.values()) + sum(p.stat().st_size for p in rest) + len(text)
    if size > limit:
        raise CheckpointError(f"demo checkpoint: expected at most {limit} bytes, got {size}")
    with replacing_files(output) as folder:
        for path in rest:
            shutil.copy(path, folder)
        save_weights(weights, folder / "model.safetensors")
        (folder / "training.json").write_text(text)
    (output / FILE).unlink(missing_ok=True)
    print(json.dumps({"output": str(output), "bytes": size, "steps": record["steps"]}))


if __name__ == "__main__":
    sys.exit(run_script("eval.demo.publish", Arguments, main, None))
