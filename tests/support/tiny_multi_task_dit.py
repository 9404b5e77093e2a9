"""A small Multi-task DiT with random weights, and its folders as lerobot saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.lerobot_saved import Change, saved, write_saved
from vla_accel.families.multi_task_dit.bench import DrawnMultiTaskDit
from vla_accel.families.multi_task_dit.checkpoint import Names
from vla_accel.families.multi_task_dit.network import MultiTaskDit, MultiTaskDitConfig
from vla_accel.nn.clip import ClipTextConfig, ClipVisionConfig
from vla_accel.nn.random_weights import drawn_model
from vla_accel.nn.resnet import Camera

CAMERAS = ("observation.images.wrist", "observation.images.front")
FRAME, STATE, ACTIONS, HISTORY = (20, 28), 6, 5, 2
TOKENS = 12
"""The longest prompt."""
TASKS = ("pick up the bowl", "open the drawer", "stop")
WORDS = ("<start>", *" ".join(TASKS).split(), "<unknown>", "<end>")
MODES = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}
STATISTICS: dict[str, dict[str, Any]] = {
    CAMERAS[0]: {"mean": [[[0.2]], [[0.3]], [[0.4]]], "std": [[[0.1]], [[0.2]], [[0.3]]]},
    CAMERAS[1]: {"mean": [[[0.7]], [[0.6]], [[0.5]]], "std": [[[0.4]], [[0.3]], [[0.5]]]},
    "observation.state": {"min": -np.arange(1.0, 7.0), "max": np.arange(2.0, 8.0)},
    "action": {"min": -np.arange(1.0, 6.0), "max": np.arange(3.0, 8.0)},
}
SETTINGS: dict[str, Any] = {
    "n_obs_steps": HISTORY, "horizon": 8, "n_action_steps": 4, "image_crop_shape": [16, 16], "hidden_dim": 48,
    "num_layers": 2, "num_heads": 4, "timestep_embed_dim": 16, "num_inference_steps": 4, "num_integration_steps": 4,
}  # fmt: skip
"""Of config.json."""


def config_of(tokens: int = TOKENS, **changes: Any) -> MultiTaskDitConfig:
    scales = [[np.ravel(STATISTICS[key][name]).tolist() for name in ("mean", "std")] for key in CAMERAS]
    fields: dict[str, Any] = {
        "vision": ClipVisionConfig(64, 2, 96, 1, 16, 8), "text": ClipTextConfig(64, 2, 96, 1, len(WORDS), tokens),
        "cameras": tuple(Camera(*FRAME, tuple(mean), tuple(deviation)) for mean, deviation in scales),
        "crop": (16, 16), "state_dim": STATE, "action_dim": ACTIONS, "action_horizon": 8, "width": 48, "depth": 2,
        "heads": 4, "time_dim": 16, "num_steps": 4, "max_token_len": tokens,
    }  # fmt: skip
    return MultiTaskDitConfig(**(fields | changes))


def tiny_model(config: MultiTaskDitConfig | None = None) -> MultiTaskDit:
    return drawn_model(
        MultiTaskDit, config or config_of(), seed=0, device="cpu", dtype=torch.float32, drawn=DrawnMultiTaskDit
    ).whole()


def observation(seed: int = 0, moments: int | None = None) -> dict[str, Any]:
    """One moment, or several, oldest first."""
    rng, lead = np.random.default_rng(seed), () if moments is None else (moments,)
    images = {key: rng.integers(0, 256, (*lead, *FRAME, 3), dtype=np.uint8) for key in CAMERAS}
    return {**images, "observation.state": rng.uniform(-1, 2, (*lead, STATE)), "task": TASKS[seed % len(TASKS)]}


def tokenizer_content() -> dict[str, Any]:
    """A tokenizer of whole words, which starts and ends a prompt as CLIP's does."""
    ids = {word: index for index, word in enumerate(WORDS)}
    return {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "<unknown>"}, "decoder": None,
        "post_processor": {
            "type": "TemplateProcessing", "pair": [], "single": [
                {"SpecialToken": {"id": "<start>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<end>", "type_id": 0}},
            ],
            "special_tokens": {w: {"id": w, "ids": [ids[w]], "tokens": [w]} for w in ("<start>", "<end>")},
        },
    }  # fmt: skip


def write_lerobot(
    folder: Path,
    change: Change = lambda files: None,
    *,
    release: str = "0.6.1",
    prefixed: bool = True,
    tokens: int = TOKENS,
    **changes: Any,
) -> Path:
    """Write a folder. `change` edits the JSON files, `changes` are fields of the network's sizes; `prefixed`: whether
    names of CLIP's weights have `vision_model` and `text_model`; `tokens`: of the longest prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    features: dict[str, Any] = {key: {"type": "VISUAL", "shape": [3, *FRAME]} for key in CAMERAS}
    features |= {
        "observation.state": {"type": "STATE", "shape": [STATE]},
        "action": {"type": "ACTION", "shape": [ACTIONS]},
    }
    settings = {**SETTINGS, "tokenizer_max_length": tokens}
    write_saved(folder, saved("multi_task_dit", release, features, MODES, **settings), STATISTICS, change)
    save_file(stored_tensors(tiny_model(config_of(tokens, **changes)), prefixed=prefixed), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_content()))
    return folder


def stored_tensors(model: MultiTaskDit, *, prefixed: bool = True) -> dict[str, torch.Tensor]:
    """A model's weights under lerobot's names, with those that nothing reads."""
    config, state = model.config, model.state_dict()
    marks = [".model.vision_model.", ".text_encoder.text_model."] if prefixed else []
    marks += [] if config.shared_encoder else ["observation_encoder.vision_encoders.0."]
    marks += [] if config.rope_base is None else [".attn.qkv_proj."]
    names = Names({mark: () for mark in marks})
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        pieces = names.pieces(name, config)
        parts = value.split([piece.rows or len(value) for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            if piece.start is not None:  # the class token's position comes first
                other = found[piece.name] if piece.name in found else part[:0]
                part = torch.cat((part, other) if piece.start == 0 else (other, part))
            found[piece.name] = (part[None] if piece.frame else part).clone()
    start = names.encoder(0)
    return {**found, f"{start}post_layernorm.weight": torch.ones(config.vision.width)}
