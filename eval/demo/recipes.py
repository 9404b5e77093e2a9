"""The families with a bundled demo: its sizes, and the files of its folder other than the weights.

Knows nothing of simulators or training.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.checkpoints.checkpoint import FORMAT
from vla_accel.checkpoints.writer import save_weights
from vla_accel.errors import ConfigError, unknown
from vla_accel.families.pi0.network import Pi0, pi05_demo
from vla_accel.families.smolvla import checkpoint as lerobot_names
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig, smolvla_demo
from vla_accel.nn.flow import FlowNetwork
from vla_accel.transforms.tokenizer import SmallTokenizer

ASSETS = Path("vla_accel/assets")


class Recipe(ABC):
    """The demo of family `name`. `folder`: of the bundled checkpoint; `limit`: its largest size in bytes."""

    name: str
    folder: Path
    limit: int

    def tokenizer(self, words: SmallTokenizer) -> SmallTokenizer:
        """Its own form of the tokenizer that knows LIBERO's words."""
        return words

    @abstractmethod
    def network(self, vocab_size: int) -> FlowNetwork:
        """The network as torch makes it."""

    @abstractmethod
    def write(self, folder: Path, config: Any, low: np.ndarray, high: np.ndarray) -> None:
        """Sizes, and the scaling of states between these bounds (8,); actions lie in [-1, 1] and stay as they are."""

    def stored(self, config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights under the names that they are stored by."""
        del config
        return dict(state)


class Pi05(Recipe):
    """π0.5 in this package's own form."""

    name, folder, limit = "pi05", ASSETS / "pi05_demo", 25_000_000

    def network(self, vocab_size: int) -> Pi0:
        return Pi0(pi05_demo(vocab_size=vocab_size))

    def write(self, folder: Path, config: Any, low: np.ndarray, high: np.ndarray) -> None:
        """openpi's norm_stats layout, quantiles only."""
        none = {"mean": None, "std": None}
        statistics = {
            "state": {**none, "q01": low.tolist(), "q99": high.tolist()},
            "actions": {**none, "q01": [-1.0] * 7, "q99": [1.0] * 7},
        }
        (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics}, indent=1) + "\n")
        (folder / "config.json").write_text(json.dumps({"format": FORMAT, **asdict(config)}, indent=1) + "\n")


class Smolvla(Recipe):
    """SmolVLA in lerobot's form: its names, its config, its saved pre- and postprocessor."""

    name, folder, limit = "smolvla", ASSETS / "smolvla_demo", 20_000_000

    def tokenizer(self, words: SmallTokenizer) -> SmallTokenizer:
        """The state is no part of the prompt, which is shorter by so much."""
        return replace(words, state_dim=1, fill_to=24)

    def network(self, vocab_size: int) -> SmolVla:
        return SmolVla(smolvla_demo(vocab_size=vocab_size))

    def write(self, folder: Path, config: SmolVlaConfig, low: np.ndarray, high: np.ndarray) -> None:
        side = config.vision.image_size
        image = {"type": "VISUAL", "shape": [3, side, side]}
        modes = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
        inputs = {
            "observation.images.image": image,
            "observation.images.image2": image,
            "observation.state": {"type": "STATE", "shape": [8]},
        }
        outputs = {"action": {"type": "ACTION", "shape": [7]}}
        scaling = {"eps": 1e-8, "features": {**inputs, **outputs}, "norm_map": modes}
        line = {"max_length": config.max_token_len, "tokenizer_name": "tokenizer.json"}
        table = {
            "observation.state.mean": (low + high) / 2, "observation.state.std": (high - low) / 2,
            "action.mean": np.zeros(7), "action.std": np.ones(7),
        }  # fmt: skip
        files: dict[str, Any] = {
            "config": {
                "type": "smolvla",
                "n_obs_steps": 1,
                "input_features": inputs,
                "output_features": outputs,
                "normalization_mapping": modes,
                "chunk_size": config.action_horizon,
                "max_state_dim": config.state_dim,
                "max_action_dim": config.action_dim,
                "resize_imgs_with_padding": [side, side],
                "empty_cameras": 0,
                "adapt_to_pi_aloha": False,
                "tokenizer_max_length": config.max_token_len,
                "use_cache": True,
                "add_image_special_tokens": False,
                "attention_mode": "cross_attn",
                "prefix_length": -1,
                "num_vlm_layers": config.prefix.depth,
                "num_expert_layers": -1,
                "self_attn_every_n_layers": config.self_every,
                "expert_width_multiplier": config.expert.width / config.prefix.width,
                "min_period": 0.004,
                "max_period": 4.0,
            },
            "policy_preprocessor": {"steps": [
                {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
                {"registry_name": "to_batch_processor", "config": {}},
                {"registry_name": "smolvla_new_line_processor", "config": {}},
                {"registry_name": "tokenizer_processor", "config": line},
                {"registry_name": "normalizer_processor", "config": scaling, "state_file": _STATISTICS[0]},
            ]},
            "policy_postprocessor": {"steps": [
                {
                    "registry_name": "unnormalizer_processor",
                    "config": {**scaling, "features": outputs},
                    "state_file": _STATISTICS[1],
                },
            ]},
        }  # fmt: skip
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        for name in _STATISTICS:
            save_weights({k: torch.from_numpy(v).float() for k, v in table.items()}, folder / name)

    def stored(self, config: SmolVlaConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, value in state.items():
            parts = lerobot_names.pieces(name, config)
            rows = [p.rows or len(value) for p in parts]
            tensors |= {p.name: t for p, t in zip(parts, value.split(rows), strict=True)}
        return tensors


_STATISTICS = tuple(
    f"policy_{step}.safetensors"
    for step in ("preprocessor_step_4_normalizer_processor", "postprocessor_step_0_unnormalizer_processor")
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (Pi05(), Smolvla())}


def recipe_of(network: FlowNetwork) -> Recipe:
    """The recipe whose demo a network is shaped as."""
    return RECIPES["smolvla" if isinstance(network, SmolVla) else "pi05"]


def recipe_named(family: str) -> Recipe:
    """Raises ConfigError for a family without a demo."""
    if family not in RECIPES:
        raise ConfigError(unknown("family", family, RECIPES))
    return RECIPES[family]
