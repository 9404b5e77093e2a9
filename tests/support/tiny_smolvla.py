"""A tiny SmolVLA whose every weight is random, in this package's form and in lerobot's, and its formulas written down a
second time: one observation, no padding, nothing hoisted, float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support import reference_pi0 as slow
from tests.support.lerobot_saved import Change, lerobot_tensors, saved, write_saved
from tests.support.tiny import TOKENIZER
from vla_accel.families.smolvla.checkpoint import DEAD, pieces
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig, expert_mlp_dim
from vla_accel.nn.gemma import SmolLmConfig
from vla_accel.nn.siglip import SiglipConfig

CAMERAS = ("observation.images.front", "observation.images.wrist")
LIBERO_CAMERAS = ("observation.images.image", "observation.images.image2")
VOCABULARY = TOKENIZER.vocab_size


def tiny_config(**changes: Any) -> SmolVlaConfig:
    """32-pixel views of four tokens, four query heads of 64 on two key heads: heads are as wide as in every checkpoint,
    because no weight shows it."""
    sizes = {"depth": 3, "heads": 4, "kv_heads": 2}
    config = SmolVlaConfig(
        vision=SiglipConfig(width=64, depth=2, mlp_dim=20, heads=1, image_size=32, patch_size=8),
        prefix=SmolLmConfig(width=48, mlp_dim=26, **sizes),
        expert=SmolLmConfig(width=36, mlp_dim=expert_mlp_dim(36), **sizes),
        vocab_size=VOCABULARY,
        shuffle=2,
        state_dim=10,
        action_dim=9,
        action_horizon=5,
    )
    return replace(config, **changes)


def libero_config() -> SmolVlaConfig:
    """Shaped as the LIBERO checkpoints: every layer crosses, the expert is half as wide."""
    config = tiny_config(self_every=0)
    return replace(config, expert=replace(config.expert, width=24, mlp_dim=expert_mlp_dim(24)))


@torch.no_grad()
def tiny_model(config: SmolVlaConfig, seed: int = 0) -> SmolVla:
    """Random weights, float32, in eval mode; activations stay of order one."""
    model, generator = SmolVla(config), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + 0.2 * drawn)
        elif name.endswith("bias") or name == "vision.position_embedding":
            parameter.copy_(0.3 * drawn)
        elif name == "embed.weight":
            parameter.copy_(drawn / config.prefix.width**0.5)
        else:
            scale = config.image_scale if name == "projector.weight" else 1.0
            parameter.copy_(drawn / parameter[0].numel() ** 0.5 / scale)
    return model.requires_grad_(False).eval()


# -- lerobot's folder -------------------------------------------------------------------------------------------------


def tensors_of(model: SmolVla) -> dict[str, Tensor]:
    """The weights under lerobot's names, with what the model never reads."""
    config = model.config
    shapes = (config.vocab_size, config.prefix.width), (config.prefix.width,)
    dead = {name: torch.ones(shape) for name, shape in zip(DEAD, shapes, strict=True)}
    return {**lerobot_tensors(model, pieces), **dead}


def statistics(count: int) -> dict[str, np.ndarray]:
    """Unequal for every number."""
    steps = np.arange(count, dtype=np.float32)
    return {"mean": 0.1 * steps - 0.2, "std": 0.5 + 0.1 * steps}


def write_lerobot(
    folder: Path, config: SmolVlaConfig | None = None, *, libero: bool = False,
    change: Change = lambda files: None, release: str = "0.6.1",
) -> SmolVla:  # fmt: skip
    """A folder as a release of lerobot saves it, and its model; `change` may edit the JSON files before they are
    written."""
    config = config or (libero_config() if libero else tiny_config())
    model = tiny_model(config)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(model), folder / "model.safetensors")
    cameras, state, action = (LIBERO_CAMERAS, 8, 7) if libero else (CAMERAS, 6, 6)
    side, prefix = config.vision.image_size, config.prefix
    features = {c: {"type": "VISUAL", "shape": [3, side, side]} for c in cameras}
    features["observation.state"] = {"type": "STATE", "shape": [state]}
    features["action"] = {"type": "ACTION", "shape": [action]}
    files = saved(
        "smolvla", release, features, {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        chunk_size=config.action_horizon, n_action_steps=config.action_horizon, max_state_dim=config.state_dim,
        max_action_dim=config.action_dim, resize_imgs_with_padding=[side, side],
        tokenizer_max_length=config.max_token_len, num_expert_layers=0 if libero else -1,
        num_vlm_layers=0 if libero else prefix.depth, self_attn_every_n_layers=config.self_every,
        expert_width_multiplier=config.expert.width / prefix.width,
    )  # fmt: skip
    write_saved(folder, files, {"observation.state": statistics(state), "action": statistics(action)}, change)
    TOKENIZER.save(folder / "tokenizer.json")
    return model


def observation(
    seed: int = 0, *, libero: bool = False, size: int = 32, prompt: str = "pick up the bowl"
) -> dict[str, Any]:
    """An observation for the folders of `write_lerobot`."""
    rng = np.random.default_rng(seed)
    keys = ("observation/image", "observation/wrist_image") if libero else CAMERAS
    state = ("observation/state", 8) if libero else ("observation.state", 6)
    images = {k: rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for k in keys}
    return {**images, state[0]: rng.random(state[1]), "prompt" if libero else "task": prompt}


# -- the formulas a second time ---------------------------------------------------------------------------------------


def expected_actions(
    weights: Mapping[str, Tensor], config: SmolVlaConfig, pixels: Tensor, tokens: Tensor, state: Tensor, noise: Tensor,
    steps: int,
) -> Tensor:  # fmt: skip
    """pixels (V, 3, S, S) in [-1, 1], tokens (L,), state (n,), noise (H, A), all without a batch; float64."""
    w = {k: v.double() for k, v in weights.items()}
    prefix, expert, width = config.prefix, config.expert, config.prefix.width

    def affine(x: Tensor, name: str) -> Tensor:
        return slow.linear(w, name, x)

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + prefix.eps).sqrt() * w[name + ".weight"]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q (T, heads, d), k, v (S, kv_heads, d), mask (T, S)."""
        seen, shared = None if mask is None else mask.tolist(), q.shape[1] // k.shape[1]
        heads = [slow.attend(q[:, h], k[:, h // shared], v[:, h // shared], seen) for h in range(q.shape[1])]
        return torch.cat(heads, -1)

    def rotate(x: Tensor, first: int) -> Tensor:
        positions = list(range(first, first + len(x)))
        return torch.stack([slow.rotate(x[:, h], positions) for h in range(x.shape[1])], 1)

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up = affine(rms(x, name + ".post_attention_layernorm"), name + ".gate_up_proj").chunk(2, -1)
        return x + affine(slow.silu(gate) * up, name + ".down_proj")

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, prefix.head_dim))

    def split(x: Tensor) -> tuple[Tensor, ...]:
        return heads(x).split((prefix.heads, prefix.kv_heads, prefix.kv_heads), 1)

    rows = []
    side, s = config.vision.image_size // config.vision.patch_size, config.shuffle
    for view in pixels.double():
        x = slow.tower(w, config.vision, view)
        for row in range(0, side, s):
            for column in range(0, side, s):
                square = [x[(row + a) * side + column + b] for a in range(s) for b in range(s)]
                rows.append(affine(torch.cat(square)[None], "projector")[0] * width**0.5)
    embedded, of_state = w["embed.weight"][tokens] * width**0.5, affine(state.double()[None], "state_proj")
    x = torch.cat((torch.stack(rows), embedded, of_state))
    n = len(x)
    seen = torch.ones(n, n, dtype=torch.bool)
    seen[:-1, -1] = False
    cache = []
    for i in range(prefix.depth):
        name = f"prefix.layers.{i}"
        q, k, v = split(affine(rms(x, name + ".input_layernorm"), name + ".qkv_proj"))
        q, k = rotate(q, 0), rotate(k, 0)
        cache.append((k, v))
        x = mlp(x + affine(attend(q, k, v, seen), name + ".o_proj"), name)
    a = noise.double()
    horizon = len(a)
    causal = torch.cat((torch.ones(horizon, n, dtype=torch.bool), torch.ones(horizon, horizon).tril().bool()), 1)
    for step in range(steps):
        time = slow.time_embedding(1 - step / steps, expert.width).expand(horizon, -1)
        hidden = slow.silu(affine(torch.cat((affine(a, "action_in_proj"), time), -1), "action_time_mlp_in"))
        x = affine(hidden, "action_time_mlp_out")
        for i, (k, v) in enumerate(cache):
            name = f"expert.layers.{i}"
            normed = rms(x, name + ".input_layernorm")
            if config.crosses(i):
                q = rotate(heads(affine(normed, name + ".q_proj")), 0)
                keys, values = (
                    heads(affine(t.flatten(1), f"{name}.{which}_proj")) for t, which in ((k, "key"), (v, "value"))
                )
                attended = attend(q, keys, values)
            else:
                q, own, values = split(affine(normed, name + ".qkv_proj"))
                attended = attend(rotate(q, n), torch.cat((k, rotate(own, n))), torch.cat((v, values)), causal)
            x = mlp(x + affine(attended, name + ".o_proj"), name)
        a = a - affine(rms(x, "expert.norm"), "action_out_proj") / steps
    return a
