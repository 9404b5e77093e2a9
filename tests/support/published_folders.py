"""Folders as openpi and lerobot publish them, with small random weights under the real key names; and the published
sizes as names and shapes alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.lerobot_saved import Change, saved, write_saved
from tests.support.openpi_dialect import ROOT, openpi_names, to_openpi
from tests.support.tiny import TOKENIZER, random_state, statistics, tiny_config
from vla_accel.families.pi0.network import Kind, Pi0, Pi0Config
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.network import Network
from vla_accel.nn.siglip import SiglipConfig

KINDS: tuple[Kind, ...] = ("pi0", "pi05")
LIBERO_ASSET = "physical-intelligence/libero"


def real_config(kind: Kind, **changes: Any) -> Pi0Config:
    """Tiny, but with what every real checkpoint shares: one key/value head, heads of 72 in the tower."""
    config = tiny_config(
        kind,
        vision=SiglipConfig(width=72, depth=2, mlp_dim=20, heads=1, image_size=28, patch_size=14),
        prefix=GemmaConfig(width=18, depth=3, mlp_dim=22, heads=4, head_dim=6),
        expert=GemmaConfig(width=14, depth=3, mlp_dim=26, heads=4, head_dim=6),
        vocab_size=TOKENIZER.vocab_size,
        action_dim=16,
        max_token_len=200 if kind == "pi05" else 48,
    )
    return replace(config, **changes)


def write_openpi(folder: Path, kind: Kind, asset: str = LIBERO_ASSET, **config: Any) -> Pi0Config:
    """A folder as openpi's converter leaves it."""
    made = real_config(kind, discrete_state_input=False)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in to_openpi(random_state(made), made).items()}, folder / "model.safetensors")
    content = {"action_dim": 16, "action_horizon": 5, "precision": "float32", **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    place = folder / "assets" / asset
    place.mkdir(parents=True, exist_ok=True)
    table = {name: {k: (v * 3)[: made.action_dim] for k, v in d.items()} for name, d in statistics().items()}
    (place / "norm_stats.json").write_text(json.dumps({"norm_stats": table}))
    TOKENIZER.save(folder / "tokenizer.json")
    return made


def write_lerobot(
    folder: Path, kind: Kind, change: Change = lambda files: None, *, release: str = "0.4.4", **model: Any
) -> Pi0Config:  # fmt: skip
    """A folder as a release of lerobot saves it; `change` may edit the JSON files before they are written; `model`:
    other sizes."""
    made = real_config(kind, **model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{k}": v.contiguous() for k, v in to_openpi(random_state(made), made).items()}
    save_file(weights, folder / "model.safetensors")
    camera, mode = {"type": "VISUAL", "shape": [3, 256, 256]}, "QUANTILES" if kind == "pi05" else "MEAN_STD"
    features = {
        "observation.images.image": camera,
        "observation.images.image2": camera,
        "observation.images.empty_camera_0": camera,
        "observation.state": {"type": "STATE", "shape": [8]},
        "action": {"type": "ACTION", "shape": [7]},
    }
    files = saved(
        kind, release, features, {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}, chunk_size=5, n_action_steps=5,
        max_state_dim=16, max_action_dim=16, image_resolution=[28, 28], tokenizer_max_length=made.max_token_len,
        paligemma_variant=None, action_expert_variant=None, empty_cameras=1,
    )  # fmt: skip
    table = statistics()
    ends = {"min": np.array(table["actions"]["q01"]) - 1, "max": np.array(table["actions"]["q99"]) + 1}
    write_saved(folder, files, {"observation.state": table["state"], "action": {**table["actions"], **ends}}, change)
    TOKENIZER.save(folder / "tokenizer.json")
    return made


def same_weights(model: Network, config: Pi0Config) -> None:
    state = random_state(config)
    assert model.config == config
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


class Shapes:
    """Weights that are names and shapes alone."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.sizes = dict.fromkeys(shapes, 0)
        self.integers: dict[str, str] = {}

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


def stored_shapes(network: type[Network], config: Any, pieces: Callable[..., Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the stored tensors of a network of this size."""
    state = network.empty(config).state_dict()
    return {p.name: (p.rows or len(v), *v.shape[1:]) for name, v in state.items() for p in pieces(name, config)}


@functools.cache
def meta_state(config: Pi0Config) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return Pi0(config).state_dict()


def shapes_of(config: Pi0Config, prefix: str, without: str = "", extra: str = "") -> Shapes:
    """What a saver writes for this size, from the names written down in openpi_dialect."""
    state = meta_state(config)
    shapes: dict[str, tuple[int, ...]] = {}
    c = config.prefix
    for name, value in state.items():
        names = openpi_names(name)
        if len(names) == 3 and not name.startswith("vision."):
            rows = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        else:
            rows = [value.shape[0] // len(names)] * len(names)
        shapes |= {prefix + n: (r, *value.shape[1:]) for n, r in zip(names, rows, strict=True)}
    shapes[prefix + ROOT + "gemma_expert.lm_head.weight"] = (config.vocab_size, config.expert.width)
    shapes[prefix + ROOT + "paligemma.model.language_model.norm.weight"] = (config.prefix.width,)
    if extra:
        shapes[extra] = (1,)
    return Shapes({k: v for k, v in shapes.items() if k != without})
