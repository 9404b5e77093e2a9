"""Tiny π0 and π0.5 for the unit tests: every weight random, norms and adaptive norms included, so no term is zero.

Sizes are all different where the architecture allows it, so that a swapped axis cannot go unnoticed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.checkpoint import save_checkpoint
from vla_accel.families.pi0.network import Kind, Pi0, Pi0Config
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.siglip import SiglipConfig
from vla_accel.transforms.tokenizer import SmallTokenizer

WORDS = ("task", "state", "action", "pick", "up", "the", "bowl", "place", "it", "on", "plate", ":", ",", ";", "\n")
TOKENIZER = SmallTokenizer(WORDS, state_dim=8, fill_to=0)
PARTS = ("vision", "kv_cache", "denoise")
EAGER, NATIVE = (
    PolicyConfig(num_steps=3, precision="fp32", device="cpu").with_specs(dict.fromkeys(PARTS, EngineSpec(engine)))
    for engine in ("eager", "native")
)


def tiny_config(kind: Kind, **changes: Any) -> Pi0Config:
    """28-pixel views of four tokens; two key/value heads of two query heads each; 17 and 14 wide MLPs and so on."""
    config = Pi0Config(
        kind=kind,
        vision=SiglipConfig(width=12, depth=2, mlp_dim=20, heads=3, image_size=28, patch_size=14),
        prefix=GemmaConfig(width=18, depth=3, mlp_dim=22, heads=4, kv_heads=2, head_dim=6),
        expert=GemmaConfig(width=14, depth=3, mlp_dim=26, heads=4, kv_heads=2, head_dim=6),
        vocab_size=40,
        action_dim=8,
        action_horizon=5,
        max_token_len=48,
        discrete_state_input=kind == "pi05",
    )
    return dataclasses.replace(config, **changes)


def random_state(config: Pi0Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A canonical state dict of normal numbers, matrices scaled to keep activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {k: v.shape for k, v in Pi0.empty(config).state_dict().items()}

    def draw(name: str, shape: torch.Size) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        matrix = len(shape) > 1 and name not in ("embed.weight", "vision.position_embedding")
        return (values / shape[1:].numel() ** 0.5 if matrix else 0.5 * values).to(dtype)

    return {name: draw(name, shape) for name, shape in shapes.items()}


def random_model(config: Pi0Config, seed: int = 0) -> Pi0:
    """The model with `random_state`, float32, in eval mode."""
    model = Pi0.empty(config)
    model.load_state_dict(random_state(config, seed), assign=True)
    return model.requires_grad_(False)


def write_tiny_checkpoint(folder: Path, kind: Kind = "pi05", seed: int = 0, **changes: Any) -> Pi0Config:
    """A whole checkpoint folder: weights, config, statistics of both kinds, tokenizer."""
    config = tiny_config(kind, vocab_size=TOKENIZER.vocab_size, **changes)
    save_checkpoint(random_state(config, seed), config, folder)
    TOKENIZER.save(folder / "tokenizer.json")
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics()}))
    return config


def write_tiny_checkpoints(root: Path) -> dict[Kind, Path]:
    """The folders of a whole checkpoint of each kind."""
    kinds: tuple[Kind, ...] = ("pi0", "pi05")
    for kind in kinds:
        write_tiny_checkpoint(root / kind, kind)
    return {kind: root / kind for kind in kinds}


def statistics() -> dict[str, dict[str, list[float]]]:
    """Unequal for every entry and not symmetric; the state's quantiles hold [0, 1]."""
    state, actions = np.arange(8), np.arange(7)
    return {
        "state": {
            "mean": (0.1 * state).tolist(),
            "std": (0.5 + 0.1 * state).tolist(),
            "q01": (-0.5 - 0.1 * state).tolist(),
            "q99": (1.5 + 0.05 * state).tolist(),
        },
        "actions": {
            "mean": (0.2 - 0.1 * actions).tolist(),
            "std": (1.0 + 0.2 * actions).tolist(),
            "q01": (-1.0 - 0.1 * actions).tolist(),
            "q99": (2.0 + 0.3 * actions).tolist(),
        },
    }


def tiny_observation(seed: int = 0, prompt: str = "pick up the bowl") -> dict[str, Any]:
    """An observation for the tiny policies: 28-pixel images."""
    rng = np.random.default_rng(seed)
    return {
        "observation/image": rng.integers(0, 256, (28, 28, 3), dtype=np.uint8),
        "observation/wrist_image": rng.integers(0, 256, (28, 28, 3), dtype=np.uint8),
        "observation/state": rng.random(8),
        "prompt": prompt,
    }


def draw(policy: OptimizedPolicy, seed: int, *batch: int) -> np.ndarray:
    """Noise (*batch, H, A) float32."""
    return np.random.default_rng(seed).standard_normal((*batch, *policy.action_shape)).astype(np.float32)


def write_robot(path: Path) -> Path:
    """A robot's file with LIBERO's sizes and keys of its own: front, wrist, joints and gripper."""
    path.write_text("base: libero\nimages: [front, wrist]\nstate: [joints, gripper]\n")
    return path
