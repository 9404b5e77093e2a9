"""Small checkpoints of starVLA with the settings and tensor names of its own code, which it left in
tests/nn/starvla_reference.json (tests/references/make_starvla_reference.py), and the folders they are converted to."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from tests.references.groot_weights import draw, weight
from tests.support.vla_jepa_folders import TASKS
from vla_accel.families.starvla.convert import convert

REFERENCE = json.loads((Path(__file__).parents[1] / "nn" / "starvla_reference.json").read_text())
Change = Callable[[dict[str, Any]], object]


def tensors(variant: str) -> dict[str, Tensor]:
    """starVLA's tensors of a variant; the head of the language model is its table once more."""
    found = {n: torch.from_numpy(weight(n, tuple(s))) for n, s in REFERENCE[variant]["shapes"].items()}
    start = "qwen_vl_interface.model."
    return {**found, start + "lm_head.weight": found[start + "model.language_model.embed_tokens.weight"]}


def write_run(folder: Path, variant: str, change: Change = lambda config: None, stored: Any = None) -> Path:
    """Write a run's folder and return its checkpoint. `change` edits config.yaml before, whose `statistics`, if it adds
    them, become the run's; `stored`: other weights."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    kept = copy.deepcopy(REFERENCE[variant])
    change(kept["config"])
    kept["statistics"] = kept["config"].pop("statistics", kept["statistics"])
    (folder / "config.yaml").write_text(yaml.safe_dump(kept["config"], allow_unicode=True))
    (folder / "dataset_statistics.json").write_text(json.dumps(kept["statistics"]))
    path = folder / "checkpoints" / "steps_1_pytorch_model.pt"
    torch.save(tensors(variant) if stored is None else stored, path)
    return path


def write(folder: Path, variant: str = "groot", change: Change = lambda config: None, stored: Any = None) -> Path:
    """Write a converted folder."""
    convert(write_run(folder / "run", variant, change, stored), folder / "converted")
    (folder / "converted" / "tokenizer.json").write_text(json.dumps(REFERENCE[variant]["tokenizer"]))
    return folder / "converted"


def given(variant: str) -> list[dict[str, Any]]:
    """The three observations that the script gave starVLA."""
    keys = {"image": "observation/image", "wrist": "observation/wrist_image"}
    images = {
        k: (128 + 60 * draw(f"starvla.{n}", 3, 256, 256, 3)).clip(0, 255).astype(np.uint8) for n, k in keys.items()
    }
    state = draw("starvla.state", 3, 8)
    return [
        {**{k: v[i] for k, v in images.items()}, "observation/state": state[i], "prompt": task}
        for i, task in enumerate(TASKS)
    ]


def observation(seed: int = 0) -> dict[str, Any]:
    """One of them, of a checkpoint without a state."""
    return given("groot")[seed % 3]


def noise(variant: str) -> np.ndarray | None:
    """The noise (3, H, 7) of the three."""
    horizon = REFERENCE[variant]["config"]["framework"]["action_model"]["action_horizon"]
    return None if variant == "oft" else draw("starvla.noise", 3, horizon, 7)


def answers(variant: str) -> dict[str, np.ndarray]:
    """starVLA's normalized actions, by case."""
    return {name: np.asarray(value) for name, value in REFERENCE[variant]["answers"].items()}
