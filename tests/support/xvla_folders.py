"""Small X-VLA folders with the files and tensor names of lerobot's own code, which it left in tests/nn:
xvla_reference.json and, of release 0.5.1, xvla_old_reference.json (tests/references/make_xvla_reference.py)."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.references import groot_weights
from tests.references.groot_weights import draw
from tests.support.lerobot_saved import write_reference

# The script runs without this package, and finds its neighbours by their plain names.
sys.modules.setdefault("groot_weights", groot_weights)

from tests.references.xvla_weights import weight  # noqa: E402

TASKS = ("pick up the black bowl", "open it", "put the wine bottle on the rack")
_START = "observation.images."
_KEPT = {"0.6.1": "xvla_reference.json", "0.5.1": "xvla_old_reference.json"}


@functools.cache
def reference(release: str = "0.6.1") -> Mapping[str, Any]:
    """What lerobot left."""
    return json.loads((Path(__file__).parents[1] / "nn" / _KEPT[release]).read_text())


VARIANTS = [(release, variant) for release in _KEPT for variant in reference(release)["variants"]]


def tensors(variant: str = "plain", release: str = "0.6.1") -> dict[str, Tensor]:
    """lerobot's tensors."""
    kept = reference(release)
    shapes = {**kept["shapes"], **kept["variants"][variant]["shapes"]}
    made = {n: torch.from_numpy(weight(n, tuple(s))) for n, s in shapes.items() if s is not None}
    for name in [n for n in made if n.endswith("pos_idx_to_embed")]:
        made[name] = _sinusoids(*made[name].shape)
    return made


def _sinusoids(rows: int, width: int) -> Tensor:
    """A buffer that lerobot computes."""
    angles = torch.arange(rows)[:, None] * torch.exp(torch.arange(width // 2) * -(np.log(10000) / (width // 2)))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1).float()


def write(
    folder: Path, variant: str = "plain", change: Callable[[dict[str, Any]], object] = lambda files: None,
    stored: dict[str, Tensor] | None = None, release: str = "0.6.1",
) -> Path:  # fmt: skip
    """Write a folder. `change` may edit its JSON files, by name, before; `stored`: instead of `tensors()`."""
    kept = reference(release)
    its = {**kept, "statistics": kept["variants"][variant]["statistics"]}
    write_reference(folder, its, variant, change, tensors(variant, release) if stored is None else stored)
    return folder


def write_original(folder: Path) -> Path:
    """Write a folder as X-VLA's own project saves it: lerobot's old names without `model.`, and another config."""
    start, stored = "model.", tensors("plain", "0.5.1")

    def change(files: dict[str, Any]) -> None:
        config = files["config.json"]
        kept = ("florence_config", "action_mode", "num_domains", "len_soft_prompts", "use_hetero_proj", "max_len_seq")
        sizes = {name: config[name] for name in (*kept, "hidden_size", "depth", "num_heads", "dim_time", "mlp_ratio")}
        files["config.json"] = {"model_type": "xvla", "num_actions": config["chunk_size"], **sizes}
        files["preprocessor_config.json"] = {
            "size": {"height": 64, "width": 64}, "image_mean": [0.485, 0.456, 0.406], "do_normalize": True
        }  # fmt: skip

    write(folder, change=change, stored={n.removeprefix(start): t for n, t in stored.items()}, release="0.5.1")
    for file in folder.glob("policy_*"):
        file.unlink()
    return folder


def given(variant: str = "plain", release: str = "0.6.1") -> list[dict[str, Any]]:
    """The three observations that the script gave lerobot."""
    inputs = reference(release)["variants"][variant]["files"]["config.json"]["input_features"]
    images = {}
    names = [n for n in inputs if n.startswith(_START) and "empty" not in n]
    for shift, name in zip((0, 50), names, strict=True):
        drawn = draw(f"xvla.{name.removeprefix(_START)}", 3, *inputs[name]["shape"][1:], 3)
        images[name] = np.uint8((128 + 60 * drawn + shift).clip(0, 255))
    state = draw("xvla.state", 3, inputs["observation.state"]["shape"][0])
    return [
        {**{n: image[i] for n, image in images.items()}, "observation.state": state[i], "task": task}
        for i, task in enumerate(TASKS)
    ]


def observation(seed: int = 0) -> dict[str, Any]:
    """One of them."""
    return given()[seed % 3]


def noise(numbers: int = 20) -> np.ndarray:
    """The noise (3, 8, numbers) of the three."""
    return draw("xvla.noise", 3, 8, numbers)


def answers(variant: str = "plain", release: str = "0.6.1") -> dict[str, np.ndarray]:
    """lerobot's actions, by case."""
    return {n: np.asarray(v) for n, v in reference(release)["variants"][variant]["answers"].items()}


def domain_tables(stored: Mapping[str, Tensor]) -> list[str]:
    """The tensors that have a row for each domain."""
    return [n for n in stored if re.search(r"soft_prompt_hub|action_(en|de)coder", n)]
