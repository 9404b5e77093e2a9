"""From a training run to the bundled checkpoint: weights in FP16, config, and the record of how it was trained.

`python -m eval.libero.demo.publish --run DIR --states DIR --output vla_accel/assets/pi05_demo`. The record holds the
manifest of the start states, which shows that no shipped evaluation state was trained on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eval.libero.demo.train import load_shards
from vla_accel.checkpoints.checkpoint import save_checkpoint
from vla_accel.checkpoints.pi0 import load_tensors
from vla_accel.errors import CheckpointError
from vla_accel.models.pi0 import pi05_demo
from vla_accel.transforms.tokenizer import SmallTokenizer

LIMIT_BYTES = 25_000_000


@dataclass(frozen=True)
class Arguments:
    """Publish a finished run as the demo checkpoint."""

    run: Path
    """Folder that `train` wrote."""
    states: Path
    """Folder that `states` wrote, or that has one of each suite: the manifest goes into the record."""
    output: Path = Path("vla_accel/assets/pi05_demo")


def main(arguments: Arguments) -> None:
    """Write model.safetensors, config.json and training.json; refuse what does not load or is too large."""
    log = json.loads((arguments.run / "log.json").read_text())
    suites = log.get("config", {}).get("suites", ["libero_spatial"])
    manifests = {
        suite: json.loads((arguments.states / (suite if len(suites) > 1 else "") / "manifest.json").read_text())
        for suite in suites
    }
    # Where the run lay on the training machine says nothing to a reader.
    settings = {k: v for k, v in log.get("config", {}).items() if k not in ("states", "out", "assets", "resume")}
    config = pi05_demo(vocab_size=SmallTokenizer.load(arguments.output / "tokenizer.json").vocab_size)
    weights = load_shards(arguments.run)
    # Before anything is written: a run that is not whole must not take the place of the shipped checkpoint.
    load_tensors(weights, config, str(arguments.run))
    save_checkpoint(weights, config, arguments.output)
    record = {
        "complete": bool(log.get("done")),
        "settings": settings,
        "gpus": log.get("world"),
        "steps": log.get("steps"),
        "seconds": log.get("seconds"),
        "history": log["history"],
        "start_states": manifests if len(suites) > 1 else manifests[suites[0]],
    }
    (arguments.output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    size = sum(p.stat().st_size for p in arguments.output.iterdir())
    if size > LIMIT_BYTES:
        raise CheckpointError(f"demo checkpoint: expected at most {LIMIT_BYTES} bytes, got {size}")
    print(json.dumps({"output": str(arguments.output), "bytes": size, "steps": record["steps"]}))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Arguments))
